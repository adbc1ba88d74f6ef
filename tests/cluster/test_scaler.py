"""Engines that start and stop while requests come, by hand and by any policy. See small.py and small_cluster.py.

A prompt of a letter takes 5 s (a page and a token), one of four letters 17 s; further tokens of an answer take next to nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.answers import PolicyError
from kvsim.core.request import Request
from kvsim.engine.outcome import FINISHED
from kvsim.engine.scaling import Scaling
from kvsim.policies.autoscaling.base import AutoscalingPolicy, ClusterStatus
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.kv_aware import KVAware
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.routing.round_robin import RoundRobin
from tests.cluster.small_cluster import SmallCluster, small_cluster
from tests.engine.drawn import SETTINGS
from tests.engine.small import STEP_READS, Ask, ask, hits, make_requests, seconds
from tests.policies.small_routing import NAMES, policy_of

STATES = ("up", "starting", "draining", "waiting_requests", "running_requests", "arrived_requests", "ended_requests")


class Says(AutoscalingPolicy):
    """Answers what a list says, then its last entry; asked every 10 s. Keeps what it has seen."""

    def __init__(self, *answers: Any, every_s: float = 10.0) -> None:
        self.answers = answers
        self.every_s = every_s
        self.seen: list[dict[str, Any]] = []
        self.cluster: SmallCluster | None = None

    @property
    def asked_every_s(self) -> float:
        return self.every_s

    def engines(self, status: ClusterStatus) -> int:
        names = (*STATES, "now", "interval_s", "mean_requests", "kv_use", "ttft_s", "tpot_s", "hit_tokens", "begun_tokens")
        self.seen.append({name: getattr(status, name) for name in names})
        if self.cluster is not None:
            assert self.cluster.scaler is not None
            self.cluster.scaler.check()
        answer: int = self.answers[min(len(self.seen), len(self.answers)) - 1]
        return answer

    def column(self, *names: str) -> list[Any]:
        return [tuple(one[name] for name in names) if len(names) > 1 else one[names[0]] for one in self.seen]


def scaled(*answers: Any, **settings: Any) -> tuple[SmallCluster, Says]:
    """Three engines of 8 pages, of which one is up at first, and the policy that says how many should be."""
    policy = Says(*answers, every_s=settings.pop("every_s", 10.0))
    cluster = small_cluster(**{"gpu": 8, "hosts": (0, 0, 0), "routing": LeastLoaded(), "autoscaling": policy, **settings})
    policy.cluster = cluster
    return cluster, policy


def engines_of(cluster: SmallCluster, *asks: Ask) -> list[int]:
    engines: list[int] = cluster.serve(*asks).engine.tolist()
    assert cluster.scaler is not None
    cluster.scaler.check()
    return engines


def changes(cluster: SmallCluster) -> list[tuple[float, int, int, int]]:
    assert cluster.scaler is not None
    return [(round(time_s, 6), *counts) for time_s, *counts in cluster.scaler.scaling.changes]


# --- engines come and go -------------------------------------------------------------------------------------------------


def test_an_engine_serves_once_it_has_started() -> None:
    """Asked at 10 s, engine 1 is up at 12: it gets the requests of 12 s and later that find it idle."""
    cluster, _ = scaled(2)
    assert engines_of(cluster, ask("aaaa"), ask("bbbb", 11.0), ask("cccc", 12.5), ask("dddd", 13.0)) == [0, 0, 1, 1]
    assert changes(cluster)[:3] == [(0.0, 1, 0, 0), (10.0, 1, 1, 0), (12.0, 2, 0, 0)]


def test_a_draining_engine_ends_what_it_has_and_gets_nothing_else() -> None:
    """At 10 s, engine 1 has b, until 18 s. c is for engine 0 although that has more to do."""
    cluster, _ = scaled(1, scaling={"first": 2})
    assert engines_of(cluster, ask("aaaa"), ask("bbbb", 1.0), ask("cccc", 11.0), ask("dddd", 30.0)) == [0, 1, 0, 0]
    assert changes(cluster) == [(0.0, 2, 0, 0), (10.0, 1, 0, 1), (18.0, 1, 0, 0)]


def test_an_engine_stops_when_its_requests_have_ended_though_its_router_hears_of_that_late() -> None:
    """The router hears of the end of a, at 17 s, only at 24 s: engine 1 is off at 17 s all the same."""
    routing = KVAware(staleness_s=7.0, late_answers=True)
    cluster, _ = scaled(1, scaling={"first": 2}, routing=routing)
    assert engines_of(cluster, ask("aaaa"), ask("bbbb", 1.0), ask("cccc", 11.0), ask("dddd", 30.0)) == [1, 0, 0, 0]
    assert changes(cluster) == [(0.0, 2, 0, 0), (10.0, 1, 0, 1), (17.0, 1, 0, 0)]


def test_an_engine_without_requests_stops_at_once() -> None:
    cluster, _ = scaled(1, scaling={"first": 3})
    engines_of(cluster, ask("aaaa"), ask("bbbb", 12.0))
    assert changes(cluster) == [(0.0, 3, 0, 0), (10.0, 1, 0, 0)]


def test_the_engines_that_came_last_leave_first() -> None:
    """Engines 1 and 2 begin to start at 10 s, in this order, and have ended b and c at 20 s, when 2 leaves; 1 leaves at 50 s."""
    cluster, _ = scaled(3, 2, 2, 2, 1)
    asks = [ask("aaaa"), ask("b", 13.0), ask("c", 14.0), ask("d", 45.0), ask("e", 49.0), ask("f", 51.0)]
    assert engines_of(cluster, *asks) == [0, 1, 2, 0, 1, 0]
    there = [(0.0, 1, 0, 0), (10.0, 1, 2, 0), (12.0, 3, 0, 0), (20.0, 2, 0, 0), (50.0, 1, 0, 1), (54.0, 1, 0, 0)]
    assert changes(cluster) == there


def test_engines_that_are_starting_are_taken_back_first() -> None:
    """Asked for at 10 s, they would be up at 30 s; taken back at 20 s, they never are."""
    cluster, _ = scaled(3, 1, scaling={"start_s": 20.0})
    engines_of(cluster, ask("aaaa"), ask("b", 35.0))
    assert changes(cluster) == [(0.0, 1, 0, 0), (10.0, 1, 2, 0), (20.0, 1, 0, 0)]


def test_a_start_that_is_taken_back_and_made_again_takes_its_time_again() -> None:
    cluster, _ = scaled(2, 1, 2, scaling={"start_s": 25.0})
    engines_of(cluster, ask("a", 1.0), ask("b", 70.0))
    assert changes(cluster)[-2:] == [(30.0, 1, 1, 0), (55.0, 2, 0, 0)]


def test_a_draining_engine_takes_up_room_until_it_stops() -> None:
    """Of two engines, engine 1 drains from 10 to 18 s; wanted again at 15 s, it starts at 18 and is up at 20."""
    cluster, _ = scaled(2, 1, 2, hosts=(0, 0), every_s=5.0, scaling={"first": 2})
    engines_of(cluster, ask("aaaa"), ask("bbbb", 1.0), ask("c", 40.0))
    assert changes(cluster) == [(0.0, 2, 0, 0), (10.0, 1, 0, 1), (18.0, 1, 1, 0), (20.0, 2, 0, 0)]


def test_the_policy_is_kept_within_the_bounds() -> None:
    cluster, policy = scaled(100, 0, 0, scaling={"least": 2, "first": 2})
    engines_of(cluster, ask("aaaa"), ask("b", 60.0))
    assert policy.column("up", "starting")[:4] == [(2, 0), (3, 0), (2, 0), (2, 0)]


def test_without_any_engine_requests_wait_for_one() -> None:
    """The engine stops at 10 s. b, of 20.5 s, is seen at 30 s; an engine starts until 32 s, and computes it until 37."""
    cluster, policy = scaled(0, 0, 1, scaling={"least": 0})
    outcome = cluster.serve(ask("a", 1.0), ask("b", 20.5))
    assert outcome.ttft_s.tolist() == seconds([5, 16.5])
    assert policy.column("waiting_requests")[:3] == [0, 0, 1]


def test_requests_that_nobody_will_serve_end_the_run() -> None:
    cluster, policy = scaled(0, scaling={"least": 0}, every_s=3600.0)
    with pytest.raises(RuntimeError, match="1 requests are stuck: 0 queued, 0 admitted, 0 without pages to decode on, 1 without"):
        cluster.run(make_requests([ask("a", 4000.0)]))
    assert 24 <= len(policy.seen) <= 30, "it is asked for a day in which nothing else happens"


# --- caches --------------------------------------------------------------------------------------------------------------


class Told(RoutingPolicy):
    """Sends each request to the last engine that is up; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, float]] = []

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        return engines[-1].engine

    def on_draining(self, engine: int, now: float) -> None:
        self.told.append(("draining", engine, round(now, 6)))

    def on_down(self, engine: int, now: float) -> None:
        self.told.append(("down", engine, round(now, 6)))

    def on_up(self, engine: int, now: float) -> None:
        self.told.append(("up", engine, round(now, 6)))

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        self.told.append(("ended", engine, round(now, 6)))


def test_an_engine_comes_back_with_an_empty_cache() -> None:
    """Engine 1 computes aaaa at 13 s, stops at 30 s after its request, and starts again at 50 s."""
    cluster, _ = scaled(2, 2, 1, 1, 2, routing=Told(), hosts=(0, 0))
    outcome = cluster.serve(ask("aaaa", 13.0), ask("aaaa", 31.0), ask("aaaa", 60.0), ask("aaaa", 80.0))
    assert outcome.engine.tolist() == [1, 0, 1, 1]
    assert [hits(outcome, number)[0] for number in range(4)] == [0, 0, 0, 4]


@pytest.mark.parametrize(("loses_all", "found"), [(False, (0, 4, 0)), (True, (0, 0, 0))])
def test_what_an_engine_wrote_down_ends_with_it_if_the_tier_is_its_own(loses_all: bool, found: tuple[int, int, int]) -> None:
    cluster, _ = scaled(2, 2, 1, 1, 2, routing=Told(), hosts=(0, 0), cpu=8, is_cpu_divided=True, scaling={"loses_all": loses_all})
    outcome = cluster.serve(ask("aaaa", 13.0), ask("aaaa", 60.0))
    assert outcome.engine.tolist() == [1, 1] and hits(outcome, 1) == found


def test_what_is_in_memory_of_the_host_stays() -> None:
    cluster, _ = scaled(2, 2, 1, routing=Told(), hosts=(0, 0), cpu=8)
    outcome = cluster.serve(ask("aaaa", 13.0), ask("aaaa", 60.0))
    assert outcome.engine.tolist() == [1, 0] and hits(outcome, 1) == (0, 4, 0)


def test_the_router_is_told_when_an_engine_drains_and_stops() -> None:
    """a and b are with engine 1 from 13 s: it drains from 20 s, and stops when both have ended."""
    policy = Told()
    cluster, _ = scaled(2, 1, routing=policy, hosts=(0, 0))
    cluster.serve(ask("aaaa", 13.0), ask("b", 14.0), ask("c", 40.0))
    expected = [("down", 1, 0.0), ("up", 1, 12.0), ("draining", 1, 20.0), ("ended", 1), ("ended", 1), ("down", 1), ("ended", 0)]
    assert [told[: len(wanted)] for told, wanted in zip(policy.told, expected, strict=True)] == expected
    assert policy.told[5][2] == policy.told[4][2] > 30.0


def test_an_engine_waits_for_its_copies_before_it_stops() -> None:
    """aaaa is computed at 17 s and written down until 21 s: the engine is there until then, and the copy is whole."""
    cluster, _ = scaled(1, 1, routing=Told(), hosts=(0, 0), cpu=8, scaling={"first": 2})
    outcome = cluster.serve(ask("aaaa"), ask("aaaa", 40.0))
    assert changes(cluster) == [(0.0, 2, 0, 0), (10.0, 1, 0, 1), (21.0, 1, 0, 0)]
    assert hits(outcome, 1) == (0, 4, 0)


# --- what the policy sees ------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_interval() -> None:
    """One at a time, for a little more than 5 s each: at 10 s, the first has ended, and the second runs; at 20 s, the fourth."""
    cluster, policy = scaled(1, settings={"max_running_requests": 1})
    cluster.serve(ask("a"), ask("b"), ask("c"), ask("d", 6.0), ask("e", 25.0))
    names = ("arrived_requests", "ended_requests", "waiting_requests", "running_requests")
    assert policy.column(*names)[:3] == [(4, 1, 2, 1), (0, 2, 0, 1), (1, 1, 0, 1)]
    assert policy.column("now", "interval_s")[:2] == [(10.0, 10.0), (20.0, 10.0)]


def test_the_mean_number_of_requests_counts_time() -> None:
    """aaaa is under way from 2 to 19 s: for 8 of the first 10 s, for 9 of the next."""
    cluster, policy = scaled(1)
    cluster.serve(ask("aaaa", 2.0), ask("b", 41.0))
    assert policy.column("mean_requests")[:4] == [pytest.approx(0.8), pytest.approx(0.9), 0.0, 0.0]


def test_times_are_those_of_first_tokens_and_answers_in_the_interval() -> None:
    """Steps of 1 s: the answer to a has its tokens at 2, 3 and 4 s. Nobody is asked after the end, at 16 s."""
    cluster, policy = scaled(1, hardware=STEP_READS)
    cluster.serve(ask("a", 1.0, output=3), ask("b", 15.0))
    assert policy.column("ttft_s", "tpot_s") == [((pytest.approx(1.0),), (pytest.approx(1.0),))]
    assert policy.column("ended_requests") == [1]


def test_the_share_of_kv_in_use_is_that_of_requests() -> None:
    """At 10 s, aaaa holds 5 of 8 pages; at 20 s, 4 are cached and no request uses them."""
    cluster, policy = scaled(1)
    cluster.serve(ask("aaaa", 1.0), ask("b", 21.0))
    assert policy.column("kv_use")[:2] == [5 / 8, 0.0]


def test_reused_tokens_are_told() -> None:
    cluster, policy = scaled(1)
    cluster.serve(ask("aa"), ask("aab", 11.0), ask("c", 25.0))
    assert policy.column("begun_tokens", "hit_tokens")[:2] == [(9, 0), (13, 8)]


@pytest.mark.parametrize(("answer", "shown"), [(None, "None"), (1.5, "1.5"), (-1, "-1")])
def test_an_answer_that_is_no_number_of_engines_is_an_error(answer: Any, shown: str) -> None:
    cluster, _ = scaled(answer)
    with pytest.raises(PolicyError, match=rf"the autoscaling policy Says returned {shown} from engines\(\), not a whole number"):
        cluster.serve(ask("aaaa"))


@pytest.mark.parametrize("every_s", [0.0, 1e-6, -1.0, float("nan"), None])
def test_an_interval_without_length_is_an_error(every_s: Any) -> None:
    cluster, _ = scaled(1, every_s=every_s)
    with pytest.raises(PolicyError, match=r"from asked_every_s, not a number of at least 0\.001"):
        cluster.serve(ask("aaaa"))


# --- what it costs -------------------------------------------------------------------------------------------------------


def test_engine_seconds_are_those_in_which_engines_are_there() -> None:
    """1 from 0 to 10 s, 2 to 30 s, 1 to 50 s: 10 + 40 + 20. Until 35 s: 10 + 40 + 5."""
    scaling = Scaling(engines=3, start_s=2.0)
    for change in ((0.0, 1, 0, 0), (10.0, 1, 1, 0), (12.0, 2, 0, 0), (25.0, 1, 0, 1), (30.0, 1, 0, 0)):
        scaling.note(*change)
    assert scaling.engine_s(50.0) == 70.0 and scaling.engine_s(35.0) == 55.0 and scaling.engine_s(5.0) == 5.0


def test_changes_of_the_same_time_are_one() -> None:
    scaling = Scaling(engines=2, start_s=0.0)
    scaling.note(0.0, 1, 0, 0)
    scaling.note(0.0, 2, 0, 0)
    assert scaling.changes == [(0.0, 2, 0, 0)]


# --- any policy, any router ----------------------------------------------------------------------------------------------


@st.composite
def traffic(draw: st.DrawFn) -> list[Ask]:
    asks: list[Ask] = []
    for index in range(draw(st.integers(1, 25))):
        word = draw(st.sampled_from(["", "a", "ab", "abc", "abd", "x", "xy"]))
        after = draw(st.integers(-1, index - 1)) if index else -1
        at = draw(st.floats(0, 120))
        asks.append(ask(word, at, after=after, output=draw(st.integers(1, 9)), delay_s=draw(st.floats(0, 9))))
    return asks


@SETTINGS
@given(
    asks=traffic(),
    answers=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    router=st.sampled_from(NAMES),
    every_s=st.sampled_from([0.7, 3.0, 10.0]),
    start_s=st.sampled_from([0.0, 2.0, 17.0]),
    least=st.integers(1, 3),
    cpu=st.sampled_from([0, 6]),
)
def test_every_request_is_served_by_an_engine_that_is_up(
    asks: list[Ask], answers: list[int], router: str, every_s: float, start_s: float, least: int, cpu: int
) -> None:
    """No request is lost, engines are never fewer or more than allowed, and one that drains gets none: ``check``, at each
    question and at the end, and the router's refusal to send anything to an engine that it does not offer."""
    scaling = {"least": least, "first": least, "start_s": start_s}
    cluster, policy = scaled(
        *answers, routing=policy_of(router), every_s=every_s, scaling=scaling, gpu=9, cpu=cpu, settings={"max_batch_tokens": 10}
    )
    outcome = cluster.serve(*asks)
    assert cluster.scaler is not None
    cluster.scaler.check()
    cluster.check()
    assert (outcome.status == FINISHED).all() and not np.isnan(outcome.e2e_s).any()
    for time_s, up, starting, draining in cluster.scaler.scaling.changes:
        assert least <= up + starting and up + starting + draining <= 3, time_s
    assert sum(policy.column("arrived_requests")) <= len(asks)


def test_a_policy_that_keeps_all_engines_changes_nothing() -> None:
    asks = [ask("abcd"[: index % 5], float(index)) for index in range(20)]
    runs = [
        small_cluster(gpu=8, hosts=(0, 0, 0), routing=RoundRobin(), **more).serve(*asks)
        for more in ({}, {"autoscaling": Says(3), "scaling": {"first": 3}})
    ]
    assert (runs[0].hit_pages == runs[1].hit_pages).all() and (runs[0].e2e_s == runs[1].e2e_s).all()
    assert (runs[0].engine == runs[1].engine).all()
