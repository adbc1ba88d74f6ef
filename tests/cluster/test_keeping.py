"""Routers that keep requests, and what they see of tiers below GPUs, by hand. See small.py and small_cluster.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvsim.cluster.cluster import Failure
from kvsim.core.answers import PolicyError
from kvsim.core.request import Request
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from tests.cluster.small_cluster import small_cluster
from tests.engine.small import ask, seconds


@dataclass(kw_only=True, eq=False)
class OneAtATime(RoutingPolicy):
    """Sends a request only to an engine that has reported that nothing runs there and has been sent nothing else."""

    staleness_s: float = 0.0
    by_reports: bool = False
    hears_late: bool = False
    may_keep: bool = True
    needs_reports: bool = True
    sent: list[tuple[int, int, float]] = field(default_factory=list)

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int | None:
        for one in engines:
            if not (one.running_requests or one.waiting_requests if self.by_reports else one.outstanding_requests):
                return one.engine
        return None

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self.sent.append((request.index, engine, round(now, 6)))


def test_requests_wait_at_the_router_in_their_order() -> None:
    """A prompt of 4 pages and a token takes 17 s, and its only output token is the first one."""
    policy = OneAtATime()
    outcome = small_cluster(gpu=8, routing=policy).serve(*[ask(4 * word, at) for word, at in zip("abcde", range(5), strict=True)])
    assert policy.sent == [(0, 0, 0.0), (1, 1, 1.0), (2, 0, 17.0), (3, 1, 18.0), (4, 0, 34.0)]
    assert outcome.ttft_s.tolist() == seconds([17, 17, 32, 32, 47])
    assert outcome.columns["queue_s"].tolist() == seconds([0, 0, 15, 15, 30]), "to wait at the router is to wait"


@pytest.mark.parametrize(("staleness_s", "sent_s"), [(0.0, 34.0), (3.0, 37.0), (30.0, 64.0)])
def test_a_kept_request_is_offered_again_when_a_report_has_arrived(staleness_s: float, sent_s: float) -> None:
    """Engine 0 computes a and b from 0 to 34 s: at 17 s it reports that b waits, at 34 s that nothing does. Engine 1 is down. c
    comes when the first of these reports has arrived."""
    policy = OneAtATime(by_reports=True, staleness_s=staleness_s)
    settings = {"max_running_requests": 1}
    cluster = small_cluster(gpu=5, routing=policy, failures=[Failure(engine=1, at_s=0.0)], settings=settings)
    cluster.serve(ask("aaaa"), ask("bbbb", 0.5), ask("cccc", 18.0 + staleness_s))
    assert policy.sent == [(0, 0, 0.0), (1, 0, 0.5), (2, 0, sent_s)]


def test_a_kept_request_is_offered_again_when_the_router_hears_that_one_has_ended() -> None:
    """As in the first test, where engine 0 is free at 17 s; the router hears of that at 20 s."""
    policy = OneAtATime(hears_late=True, staleness_s=3.0)
    small_cluster(gpu=8, routing=policy).serve(*[ask(4 * word, at) for word, at in zip("abc", range(3), strict=True)])
    assert policy.sent == [(0, 0, 0.0), (1, 1, 1.0), (2, 0, 20.0)]


def test_a_failed_engine_gives_its_requests_back_behind_those_that_wait() -> None:
    """Engine 0 fails at 5 s with request 0, while 2 waits: engine 1 gets 2 at 18 s and 0 after that."""
    policy = OneAtATime()
    cluster = small_cluster(gpu=8, routing=policy, failures=[Failure(engine=0, at_s=5.0)])
    cluster.serve(ask("aaaa"), ask("bbbb", 1.0), ask("cccc", 2.0))
    assert policy.sent == [(0, 0, 0.0), (1, 1, 1.0), (2, 1, 18.0), (0, 1, 35.0)]


def test_an_engine_that_is_back_gets_what_waits() -> None:
    policy = OneAtATime()
    cluster = small_cluster(gpu=8, routing=policy, failures=[Failure(engine=0, at_s=1.0, back_after_s=3.0)])
    cluster.serve(ask("aaaa", 2.0), ask("bbbb", 3.0))
    assert policy.sent == [(0, 1, 2.0), (1, 0, 4.0)]


class Never(RoutingPolicy):
    """Keeps everything, by its setting or against the rules."""

    def __init__(self, *, may_keep: bool) -> None:
        self._may_keep = may_keep

    @property
    def may_keep(self) -> bool:
        return self._may_keep

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int | None:
        return None


def test_who_keeps_everything_is_told_so() -> None:
    with pytest.raises(RuntimeError, match=r"1 requests are stuck: 0 queued, 0 admitted, .* 1 without an engine"):
        small_cluster(gpu=8, routing=Never(may_keep=True)).serve(ask("aaaa"))
    with pytest.raises(PolicyError, match="is a return missing"):
        small_cluster(gpu=8, routing=Never(may_keep=False)).serve(ask("aaaa"))


# --- what a router sees --------------------------------------------------------------------------------------------------


class Seeing(RoutingPolicy):
    """Takes turns, and notes what it sees of the engines."""

    needs_cached_pages = needs_lower_pages = needs_reports = True

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.holders: list[list[int]] = []

    def bind(self, context: RoutingContext) -> None:
        self._holders = context.holders

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        assert self._holders is not None
        cached = [one.cached_pages(request) for one in engines]
        self.seen.append([(pages, one.lower_pages(request, pages)) for pages, one in zip(cached, engines, strict=True)])
        self.holders.append(sorted(self._holders(request)))
        return engines[request.index % len(engines)].engine


def test_a_router_sees_the_tiers_below() -> None:
    """Engine 0 computes abcd, which the CPU tier of its host has from 21 s and the disk from 29 s. Engine 2 has another host."""
    policy = Seeing()
    cluster = small_cluster(gpu=8, cpu=20, disk=20, hosts=(0, 0, 1), routing=policy)
    cluster.serve(ask("abcd"), ask("abcx", 22.0), ask("abcd", 60.0))
    assert policy.seen[0] == [(0, ((1, 0), (2, 0)))] * 3
    assert policy.seen[1] == [(3, ((1, 0), (2, 0))), (0, ((1, 3), (2, 0))), (0, ((1, 0), (2, 0)))]
    assert policy.seen[2] == [(4, ((1, 0), (2, 0))), (3, ((1, 1), (2, 0))), (0, ((1, 0), (2, 0)))]
    assert policy.holders == [[], [0, 1], [0, 1]]


class Looking(Seeing):
    """Notes the reports of the first engine, which gets everything."""

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        one = engines[0]
        self.seen.append((one.used_pages, one.pages_in_use, one.waiting_requests, one.pending_requests))
        return 0


def test_cached_pages_that_nobody_uses_are_not_in_use() -> None:
    """aaaa takes 17 s and leaves 4 pages. bbbb, with 8 output tokens, needs 5 pages from 20 s on, 6 from 41 s: its step ends at
    37 s. Meanwhile two come, of which only one may run with it in the step that begins at 37 s."""
    policy = Looking()
    cluster = small_cluster(gpu=30, routing=policy, settings={"max_running_requests": 2})
    cluster.serve(
        ask("aaaa"), ask("bbbb", 20.0, output=8), ask("cccc", 21.0), ask("dddd", 22.0), ask("eeee", 37.1), ask("f", 56.0)
    )
    assert policy.seen[1] == (4, 0, 0, 0)
    assert policy.seen[4] == (9, 5, 2, 0), "what came during a step is not pending at its end"
    assert policy.seen[5][2:] == (2, 1), "dddd was left in the queue at 37 s; eeee came after that"
