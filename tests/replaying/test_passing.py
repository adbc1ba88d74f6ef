"""Servers that watch or repeat the calls of another one pass on those that it knows."""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsim.core.fan_out import FanOut
from kvsim.core.serving import Server
from kvsim.core.tree import RadixTree
from kvsim.engine.event_log import EventLog
from kvsim.replaying.logged_server import LoggedServer
from kvsim.replaying.moments import Moments
from kvsim.replaying.samples import SampleServer
from kvsim.replaying.server import PassingServer
from kvsim.replaying.steps import SteppedServer
from kvsim.run.observed_order import open_observed
from tests.replaying.test_preempted import engine, request

ANSWERS: dict[str, Any] = {
    "serve": "a lease", "finish_request": None, "begin": "another lease", "begin_chunk": False, "end_chunk": None, "grow": False,
    "decode": False,
    "step_tokens": 16, "preempt": True, "reset": None, "prefetched": {"prefetches": 3}, "verify": None,
    "describe_checkpoints": {"states": 2}, "pages_known": {1: 5}, "held_pages": (7, 6), "held_extents": [(8, 9)],
    "end_pass": None, "look_up_waiting": False, "is_loading": True,
}  # fmt: skip
"""What each public method returns that is asked: nothing that a server returns by default."""
METHODS = [name for name, _ in inspect.getmembers(Server, callable) if not name.startswith("_")]


def told_server() -> tuple[Any, list[tuple[Any, ...]]]:
    """A server that answers as above, and what it has been called with."""
    calls: list[tuple[Any, ...]] = []

    def answer(name: str) -> Callable[..., Any]:
        def method(self: Any, *given: Any, **named: Any) -> Any:
            calls.append((name, *given, *named.values()))
            return ANSWERS[name]

        return method

    told = type("Told", (Server,), {name: answer(name) for name in METHODS} | {"tree": RadixTree(1)})()
    told.tiers, told.page_tokens, told.counts = [], 4, SimpleNamespace()
    told.counts_last_admission = told.loads_first = told.preempts_all = True
    told.takes_by_step = told.decodes_past_end = told.tries_waiting = True
    return told, calls


@pytest.mark.parametrize("name", METHODS)
def test_every_public_method_is_passed_on(name: str) -> None:
    told, calls = told_server()
    passing = PassingServer(told)
    one = request(0, [0, 1])
    given = {"request": one, "pages": 3, "now": 1.5, "lease": "a lease", "tokens": 9, "in_all": 4, "full_pages": 2, "name": "cpu"}
    named = {"step_tokens": {"is_answer": True}, "end_pass": {"is_step": True}}.get(name, {})
    arguments = [given[each] for each in list(inspect.signature(getattr(Server, name)).parameters)[1:] if each not in named]
    assert getattr(passing, name)(*arguments, **named) == ANSWERS[name]
    assert calls == [(name, *arguments, *named.values())]


def test_what_is_no_method_is_that_of_the_other_server() -> None:
    told, _ = told_server()
    passing = PassingServer(told)
    names = [name for name, _ in inspect.getmembers(Server) if not name.startswith("_") and name not in METHODS]
    assert {*names, *Server.__annotations__} - {"tiers", "page_tokens"} == {
        "tree", "counts", "counts_last_admission", "loads_first", "preempts_all", "takes_by_step", "decodes_past_end",
        "tries_waiting",
    }  # fmt: skip
    for name in (*names, "counts", "tiers", "page_tokens"):
        assert getattr(passing, name) is getattr(told, name), name


SHOWN: list[str] = []
WRAPPED: dict[str, Callable[[Server], Server]] = {
    "passing": PassingServer,
    "logged": lambda server: LoggedServer(server, EventLog(server.tiers)),
    "stepped": lambda server: SteppedServer(server, SHOWN.append),
    "samples": lambda server: SampleServer(server, FanOut()),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_moments_of_a_real_run_have_the_same_effects_behind_another_server(name: str) -> None:
    """As in ``test_a_preempted_request_gives_its_pages_back_and_takes_them_again``."""
    asked = [request(0, [0, 1], output_tokens=6), request(1, [10, 11, 12, 13]), request(2, [0, 1])]
    times = [[1.0, 2.0, 3.0, 4.0, 10.0, 11.0], [6.0], [21.0]]
    moments = partial(Moments, admitted_s=np.array([0.0, 5.0, 20.0]), tokens_s=[np.array(each) for each in times])
    replay = open_observed(engine(6), asked)
    replay.server = server = WRAPPED[name](replay.server)
    outcome = replay.run_observed(asked, moments(pauses_s={0: [(4.0, 9.0)]}, preemptions=1))
    server.verify()
    assert outcome.hit_pages[:, 0].tolist() == [0, 0, 2]
    if isinstance(server, LoggedServer):
        events = [line.split('"')[3] for line in server.log.lines]
        assert [event for event in events if event in ("admit", "release", "finish")] == [
            "admit", "release", "admit", "finish", "admit", "finish", "admit", "finish",
        ]  # fmt: skip
    if isinstance(server, SteppedServer):
        assert "request 0 is preempted" in SHOWN
