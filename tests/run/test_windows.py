"""Engines whose router hears of them late, played in processes of their own: the same results, to the last bit.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import kvsim
from kvsim.errors import UsageError
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.run import play
from kvsim.trace.base import Trace
from tests.engine.configurations import Case
from tests.engine.drawn import RUNS, SETTINGS
from tests.engine.test_configurations_random import one_line
from tests.run.test_apart import APART, FOUR, TIERS, check_same, without

LATE = ("routing.late_answers=true",)
ROUTING: dict[str, tuple[str, ...]] = {
    "kv_aware": LATE,
    "dynamo": (*LATE, "routing.router_predicted_ttl_s=0.1", "routing.router_temperature=0.5"),
    "lmetric": LATE,
    "llm_d": ("routing.prefix=precise",),
    "llm_d_active": (*LATE, "routing.active_request_weight=1"),
}


def words(routing: str, staleness_s: float) -> tuple[str, ...]:
    return f"routing={routing.removesuffix('_active')}", f"routing.staleness_s={staleness_s}", *ROUTING[routing]


@hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 6))
@given(case=APART, routing=st.sampled_from(sorted(ROUTING)), staleness_s=st.sampled_from([0.001, 0.02, 0.5, 10.0]))
def test_processes_give_the_results_of_one(case: Case, routing: str, staleness_s: float) -> None:
    """What a case has that makes its engines depend on each other is left out."""
    case = without(case, "routing", "cluster.failures", "cluster.engines_per_host", "engine.reset_at_s", "tiers.disk.scope")
    alone = case.but(*words(routing, staleness_s), "cluster.engines_per_host=1")
    try:
        requests = alone.requests()
        one = play.simulate(alone.plan("simulate"), requests)
        two = play.simulate(alone.but("cluster.workers=2").plan("simulate"), requests)
    except UsageError as error:
        event(one_line(error)[:70])
        reject()
    check_same(one, two)


def prompts(**settings: Any) -> Trace:
    """Chats whose turns come at times that are known before."""
    trace = kvsim.load_trace("synthetic", sessions=40, sessions_per_s=4.0, max_prompt_tokens=12_000, **settings)
    at_s = 0.0
    for number, request in enumerate(trace.requests):
        at_s = at_s + (number % 7) / 16 if request.after >= 0 else max(at_s, request.arrival_s)
        request.after, request.arrival_s, request.delay_s = -1, at_s, 0.0
    return trace


@pytest.mark.parametrize("tiers", [(), TIERS], ids=["gpu", "tiers"])
@pytest.mark.parametrize("routing", sorted(ROUTING))
def test_a_router_that_hears_late_chooses_as_in_one_process(routing: str, tiers: tuple[str, ...]) -> None:
    """Many requests arrive at the same time as others, and as reports do."""
    trace, ended = prompts(), list[int]()
    settings = (*FOUR, *tiers, *words(routing, 0.5))
    one = kvsim.simulate(trace, *settings)
    apart = kvsim.simulate(trace, *settings, "cluster.workers=2", advance=ended.append)
    check_same(one.outcome, apart.outcome)
    assert ended == sorted(ended) and ended[-1] == len(trace.requests)
    assert len(set(apart.outcome.engine.tolist())) > 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ("routing=kv_aware", "routing.staleness_s=1"),
            "KVAware chooses by the state of all engines: set cluster.workers=1, or routing=session_affinity, or "
            "routing.late_answers=true with routing.staleness_s above 0",
        ),
        (("routing=llm_d",), "LlmD hears of engines 0 s late: set cluster.workers=1, or routing.staleness_s to 0.0001 or more"),
        (
            ("routing=skylb", "routing.staleness_s=1"),
            "SkyLB chooses by the state of all engines: set cluster.workers=1, or routing=session_affinity",
        ),
        (("routing=lmetric", "routing.staleness_s=1e-9", *LATE), "LMetric hears of engines 1e-09 s late: set"),
        (
            ("routing=llm_d", "routing.staleness_s=1", "cluster.failures=[{engine: 0, at_s: 1}]"),
            "requests of an engine that fails go to others: set",
        ),
        (
            ("routing=llm_d", "routing.staleness_s=1"),
            "LlmD chooses by the order of requests, and in this trace some arrive when others have ended: set",
        ),
    ],
)
def test_what_cannot_be_played_in_windows_is_one_line(settings: tuple[str, ...], expected: str) -> None:
    trace = kvsim.load_trace("synthetic", sessions=4, sessions_per_s=4.0, max_prompt_tokens=12_000)
    with pytest.raises(UsageError) as error:
        kvsim.simulate(trace, *FOUR, *settings, "cluster.workers=2")
    assert one_line(error.value).startswith(f"cluster.workers: {expected}")


def test_a_router_that_keeps_requests_is_refused() -> None:
    @dataclass(kw_only=True, eq=False)
    class Keeping(LeastLoaded):
        staleness_s: float = 1.0
        may_keep: bool = True

        @property
        def chooses_by(self) -> str:
            return "reports"

    with pytest.raises(UsageError, match=r"cluster\.workers: Keeping may keep requests until an engine reports: set"):
        kvsim.simulate(prompts(), *FOUR, "cluster.workers=2", routing=Keeping())


def test_an_error_of_the_router_ends_all_processes() -> None:
    class Failing(RoutingPolicy):
        staleness_s = 0.5

        @property
        def chooses_by(self) -> str:
            return "reports"

        def choose(self, request: Any, engines: Any, now: float) -> int:
            if request.index > 20:
                raise ValueError("no choice")
            return int(request.index % 4)

    with pytest.raises(UsageError, match=r"Failing\b.*no choice"):
        kvsim.simulate(prompts(), *FOUR, "cluster.workers=2", routing=Failing())
