"""From a plan to its result."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.run.curves import CurveSettings
from kvsim.run.execute import KEPT, draw, execute, load_trace
from kvsim.settings.configuration import compose

OVERRIDES = ("trace=synthetic", "trace.sessions=30")


def plan(command: str, *overrides: str) -> Plan:
    words = [*OVERRIDES, *overrides]
    return build_run(compose(words), command=command, overrides=words)


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_the_trace_of_the_plan_is_played_unless_another_is_given(command: str) -> None:
    made = plan(command, "tiers.gpu.capacity=8000pages")
    loaded, other = execute(command, made), load_trace(plan(command, "trace.limit=20"))[0]
    assert loaded.outcome.requests == load_trace(made)[0].requests
    assert execute(command, made, other).outcome.requests == other.requests != loaded.outcome.requests


def test_what_watches_a_run_hears_how_much_there_is_and_how_much_is_done() -> None:
    heard: list[Any] = []

    @contextmanager
    def watch(requests: int) -> Iterator[Any]:
        heard.append(requests)
        yield heard.append
        heard.append("over")

    requests = len(execute("replay", plan("replay", "tiers.gpu.capacity=8000pages"), watch=watch).outcome.requests)
    assert heard[0] == requests and heard[-2:] == [requests, "over"]
    heard.clear()
    draw(plan("curve"), CurveSettings(capacities=[4000], policies=["fifo"]), watch=watch)
    assert heard[0] == 2 * requests and heard[-2:] == [2 * requests, "over"]


def test_a_run_without_room_for_any_request_ends_before_it_begins() -> None:
    with pytest.raises(UsageError, match="no request fits"):
        execute("replay", plan("replay", "tiers.gpu.capacity=1pages"))


def test_a_process_keeps_the_traces_that_it_used_last() -> None:
    first = load_trace(plan("replay"))[0]
    for limit in range(1, KEPT):
        load_trace(plan("replay", f"trace.limit={limit}"))
    assert load_trace(plan("replay"))[0] is first
    for limit in range(1, KEPT + 1):
        load_trace(plan("replay", f"trace.limit={limit}"))
    assert load_trace(plan("replay"))[0] is not first
