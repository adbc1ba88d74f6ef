"""Engines that are simulated in processes of their own: the same results, to the last bit, or a reason why not.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

import os
import signal
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import event, given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import kvsim
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.plans.arguments import arguments_of
from kvsim.plans.from_python import plan_for
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.routing.session_affinity import SessionAffinity
from kvsim.run import play
from kvsim.run.alone import run_alone
from kvsim.run.interrupts import remembered
from kvsim.run.processes import Line, Processes, finish
from kvsim.trace.base import Trace
from tests.composing import plan
from tests.engine.configurations import Case, cases
from tests.engine.drawn import RUNS, SETTINGS
from tests.engine.test_configurations_random import one_line

APART = cases().filter(lambda case: any(each.startswith("cluster.engines=") for each in case.simulate))
ROUTING = ("round_robin", "random", "session_affinity")


def plain(value: Any) -> Any:
    """A value that compares bit by bit."""
    if hasattr(value, "tobytes"):
        return value.dtype, value.shape, value.tobytes()
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return [(key, plain(one)) for key, one in value.items()]
    return [plain(one) for one in value] if isinstance(value, list) else repr(value)


def check_same(one: Outcome, apart: Outcome) -> None:
    for field in fields(Outcome):
        if field.name not in ("requests", "wall_s"):
            assert plain(getattr(one, field.name)) == plain(getattr(apart, field.name)), field.name


def without(case: Case, *keys: str) -> Case:
    """The run without some settings."""
    return Case(
        lines=case.lines,
        common=case.common,
        replay=[],
        simulate=[each for each in case.simulate if not each.startswith(keys)],
        tail=case.tail,
        bigram=case.bigram,
    )


@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 6))
@given(case=APART, routing=st.sampled_from(ROUTING))
def test_processes_give_the_results_of_one(case: Case, routing: str) -> None:
    """What a case has that makes its engines depend on each other is left out."""
    case = without(case, "routing", "cluster.failures", "cluster.engines_per_host", "engine.reset_at_s", "tiers.disk.scope")
    alone = case.but(f"routing={routing}", "cluster.engines_per_host=1")
    apart = alone.but("cluster.workers=2")
    try:
        requests = alone.requests()
        one = play.simulate(alone.plan("simulate"), requests)
        two = play.simulate(apart.plan("simulate"), requests)
    except UsageError as error:
        event(one_line(error)[:70])
        reject()
    check_same(one, two)


def chats(**settings: Any) -> Trace:
    return kvsim.load_trace("synthetic", sessions=40, sessions_per_s=4.0, max_prompt_tokens=12_000, **settings)


FOUR = ("cluster.engines=4", "tiers.gpu.capacity=1000pages")
TIERS = ("cluster.engines_per_host=2", "tiers.cpu.capacity=3000pages", "tiers.disk.capacity=9000pages", "prefetch=threshold")


@pytest.mark.parametrize("tiers", [(), TIERS, (*TIERS, "placement=write_back")], ids=["gpu", "tiers", "write_back"])
@pytest.mark.parametrize("workers", [2, 3])
def test_chats_that_wait_for_answers_run_apart(tiers: tuple[str, ...], workers: int) -> None:
    trace, ended = chats(), list[int]()
    settings = (*FOUR, *tiers, "routing=session_affinity")
    one = kvsim.simulate(trace, *settings)
    apart = kvsim.simulate(trace, *settings, f"cluster.workers={workers}", advance=ended.append)
    check_same(one.outcome, apart.outcome)
    assert ended == sorted(ended) and ended[-1] == len(trace.requests)
    assert one.record["config"] == apart.record["config"]
    assert one.record["config_hash"] == apart.record["config_hash"]
    assert len({each for each in apart.outcome.engine.tolist() if each >= 0}) == 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("cluster.engines=1",), "cluster.workers has no effect with one engine: set cluster.engines above 1, or leave it out"),
        (("routing=kv_aware",), "cluster.workers: KVAware chooses by the state of all engines: set cluster.workers=1, or"),
        (("routing=least_loaded",), "cluster.workers: LeastLoaded chooses by the state of all engines: set"),
        (
            ("tiers.cpu.capacity=100pages",),
            "cluster.workers: all engines share a tier or the links of a host: set cluster.workers=1, or set "
            "cluster.engines_per_host lower",
        ),
        (("cluster.failures=[{engine: 0, at_s: 1}]",), "cluster.workers: requests of an engine that fails go to others: set"),
        (("cluster.engines=1", "cluster.prefill=2", "cluster.decode=2"), "cluster.workers: the engines that compute prompts and"),
        (("events=true",), "cluster.workers: events are written in one process: set cluster.workers=1"),
        (("timeline=true",), "cluster.workers: timeline is written in one process: set cluster.workers=1"),
        (("engine.reset_at_s=[3.0]",), "cluster.workers: engine.reset_at_s resets all engines once all are idle: set"),
        (("hardware.gpus=2", "hardware.rank_jitter=0.1"), "cluster.workers: hardware.rank_jitter and hardware.rank_faults are"),
        (("routing=round_robin",), "cluster.workers: RoundRobin chooses by the order of requests, and in this trace some arrive"),
    ],
)
def test_engines_that_depend_on_each_other_stay_in_one_process(settings: tuple[str, ...], expected: str) -> None:
    given = {setting.split("=")[0]: setting for setting in (*FOUR, "routing=session_affinity", "cluster.workers=2", *settings)}
    if "cluster.engines=1" in settings and len(settings) == 1:
        del given["routing"]
    with pytest.raises(UsageError) as error:
        kvsim.simulate(chats(), *given.values())
    assert one_line(error.value).startswith(expected)


def test_workers_have_no_effect_on_a_replay() -> None:
    with pytest.raises(UsageError, match=r"cluster\.workers has no effect on kvsim replay"):
        kvsim.replay(chats(), "cluster.workers=2")


def test_requests_that_run_alone_run_in_one_process() -> None:
    """Each waits for the one before it, wherever that is: what a search for a rate that none holds ends with."""
    words = ("trace=synthetic", "trace.sessions=6", "trace.max_prompt_tokens=12000", *FOUR, "routing=round_robin")
    one, two = [run_alone(plan(*words, *more, command="simulate")).outcome for more in ((), ("cluster.workers=2",))]
    check_same(one, two)


def test_a_request_that_waits_for_one_of_another_process_is_refused() -> None:
    class Odd(SessionAffinity):
        """Sends every turn to another engine."""

        @property
        def chooses_by(self) -> str:
            return "request"

        def choose(self, request: Any, engines: Any, now: float) -> int:
            return int(engines[request.index % len(engines)].engine)

    with pytest.raises(UsageError, match=r"cluster.workers: request \d+ waits for request \d+, which another engine serves: set"):
        kvsim.simulate(chats(), *FOUR, "cluster.workers=2", routing=Odd())


def test_a_class_with_choices_of_its_own_must_say_what_they_depend_on() -> None:
    class Own(SessionAffinity):
        def choose(self, request: Any, engines: Any, now: float) -> int:
            return int(min(engines, key=lambda status: status.outstanding_tokens).engine)

    with pytest.raises(UsageError, match="Own chooses by the state of all engines"):
        kvsim.simulate(chats(), *FOUR, "cluster.workers=2", routing=Own())


def test_an_error_of_a_policy_in_a_process_is_that_of_the_policy() -> None:
    class Failing(LRU):
        def rank(self, node: Any) -> float:
            raise ValueError("no rank")

    with pytest.raises(UsageError, match=r"Failing\b.*no rank"):
        kvsim.simulate(chats(), *FOUR, "cluster.workers=2", routing="session_affinity", eviction=Failing())


def test_processes_with_policies_of_the_users_own_are_recounted() -> None:
    class Own(LRU):
        def rank(self, node: Any) -> Any:
            return super().rank(node)

    trace, settings = chats(), (*FOUR, "routing=session_affinity")
    one = kvsim.simulate(trace, *settings, eviction=Own())
    apart = kvsim.simulate(trace, *settings, "cluster.workers=2", eviction=Own())
    check_same(one.outcome, apart.outcome)


def test_a_policy_that_changes_requests_in_a_process_is_refused() -> None:
    class Rogue(LRU):
        def bind(self, context: Any) -> None:
            super().bind(context)
            self.requests = context.requests

        def rank(self, node: Any) -> Any:
            self.requests[3].priority = 77
            return super().rank(node)

    with pytest.raises(UsageError, match=r"Rogue\b.*priority of request 3 was 0 and is 77"):
        kvsim.simulate(chats(), *FOUR, "cluster.workers=2", routing="session_affinity", eviction=Rogue())


def run(jobs: list[Any]) -> None:
    with Processes(jobs) as processes:
        finish(processes, None)


def test_processes_that_are_no_longer_needed_end_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """A command's handlers of signals, which processes inherit, raise errors."""
    read_end, write_end = os.pipe()

    def endless(line: Line) -> dict[str, Any]:
        os.write(write_end, b"!")
        while True:
            signal.pause()

    def failing(line: Line) -> dict[str, Any]:
        os.read(read_end, 1)
        raise UsageError("wrong")

    with remembered(), pytest.raises(UsageError, match="wrong"):
        run([endless, failing])
    assert capfd.readouterr().err == ""
    os.close(read_end)
    os.close(write_end)


def test_a_process_that_dies_is_told() -> None:
    def dying(line: Line) -> dict[str, Any]:
        os._exit(3)

    with pytest.raises(UsageError, match=r"cluster\.workers: a worker process died, perhaps for lack of memory: use fewer"):
        run([dying, lambda line: {}])


def test_the_plan_is_checked_before_the_trace_is_read() -> None:
    with pytest.raises(UsageError, match="chooses by the state"):
        plan_for("simulate", chats(), arguments_of([*FOUR, "cluster.workers=2", "routing=kv_aware"], {}))
