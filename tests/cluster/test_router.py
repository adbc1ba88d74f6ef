"""The router: what it knows of engines, what it tells the policy, and what it refuses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvsim.cluster.router import KnownEngine, Report, Router, known_engines
from kvsim.core.answers import PolicyError
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from tests.policies.small_routing import prompt


@dataclass(kw_only=True, eq=False)
class Said(RoutingPolicy):
    """Answers what a test says, and notes what it is told."""

    answer: Any = 0
    needs_cached_pages: bool = False
    needs_reports: bool = False
    staleness_s: float = 0.0
    hears_late: bool = False
    told: list[tuple[Any, ...]] = field(default_factory=list)
    seen: list[tuple[int, ...]] = field(default_factory=list)

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> Any:
        self.seen = [(one.engine, one.outstanding_requests, one.outstanding_tokens) for one in engines]
        return self.answer(request, engines) if callable(self.answer) else self.answer

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self.told.append(("sent", request.index, engine, now))

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self.told.append(("first token", request.index, engine, now))

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        self.told.append(("ended", request.index, engine, now))

    def on_down(self, engine: int, now: float) -> None:
        self.told.append(("down", engine, now))

    def on_up(self, engine: int, now: float) -> None:
        self.told.append(("up", engine, now))


def before(policy: Said, engines: int = 2) -> Router:
    return Router(policy, [KnownEngine(number) for number in range(engines)])


def test_what_was_sent_is_counted_until_it_ends() -> None:
    policy = Said()
    router = before(policy)
    first, second = prompt((0, 2), index=0), prompt((9, 5), index=1)
    assert router.send(first, 1.0) == router.send(second, 2.0) == 0
    assert policy.seen == [(0, 1, 9), (1, 0, 0)], "as it was before the second: two pages of 4 tokens and one token"
    router.first_token(first, 0, 3.0)
    router.ended(first, 0, 4.0)
    router.send(first, 5.0)
    assert policy.seen == [(0, 1, 21), (1, 0, 0)]
    assert policy.told == [
        ("sent", 0, 0, 1.0),
        ("sent", 1, 0, 2.0),
        ("first token", 0, 0, 3.0),
        ("ended", 0, 0, 4.0),
        ("sent", 0, 0, 5.0),
    ]


def test_engines_that_are_down_are_not_offered() -> None:
    policy = Said(answer=2)
    router = before(policy, engines=3)
    router.down(0, 1.0)
    router.send(prompt(), 2.0)
    assert [number for number, _, _ in policy.seen] == [1, 2]
    router.down(1, 3.0)
    router.up(0, 4.0)
    router.send(prompt(), 5.0)
    assert [number for number, _, _ in policy.seen] == [0, 2]
    router.down(0, 6.0)
    router.down(2, 6.0)
    assert not router.has_engines
    assert [told for told in policy.told if told[0] != "sent"] == [
        ("down", 0, 1.0),
        ("down", 1, 3.0),
        ("up", 0, 4.0),
        ("down", 0, 6.0),
        ("down", 2, 6.0),
    ]


@pytest.mark.parametrize("answer", [None, True, 0.0, "0", 1, 3, -1, np.float64(0), [0]])
def test_only_the_number_of_an_engine_that_is_up_is_an_answer(answer: Any) -> None:
    router = before(Said(answer=answer), engines=3)
    router.down(1, 0.0)
    hint = ": is a return missing?" if answer is None else ""
    message = f"the routing policy Said returned {answer!r} from choose(), not the number of an engine that is up (0, 2){hint}"
    with pytest.raises(PolicyError) as error:
        router.send(prompt(), 1.0)
    assert str(error.value) == message


def test_the_number_may_be_of_numpy() -> None:
    assert before(Said(answer=np.int64(1))).send(prompt(), 0.0) == 1


@pytest.mark.parametrize(
    ("read", "needed"),
    [
        (lambda one: one.cached_pages(prompt()), "a routing policy calls cached_pages(): it needs needs_cached_pages = True"),
        (lambda one: one.waiting_requests, "a routing policy reads the load that engines report: it needs needs_reports = True"),
        (lambda one: one.running_requests, "needs_reports = True"),
        (lambda one: one.used_pages, "needs_reports = True"),
    ],
)
def test_a_policy_says_which_reports_it_needs(read: Any, needed: str) -> None:
    with pytest.raises(PolicyError) as error:
        before(Said(answer=lambda _, engines: read(engines[0]))).send(prompt(), 0.0)
    assert needed in str(error.value)


def gpu(capacity: int | None) -> Tier:
    return Tier("gpu", 0, Pool(capacity), LRU())


@pytest.mark.parametrize(("staleness_s", "known"), [(0.0, [(0, 0, 0, 0), (5, 6, 7, 3)]), (2.0, [(0, 0, 0, 0), (0, 0, 0, 0)])])
def test_reports_arrive_with_the_staleness_of_the_policy(staleness_s: float, known: list[tuple[int, ...]]) -> None:
    now, seen = 0.0, list[tuple[int, ...]]()

    def choose(request: Request, engines: Sequence[EngineStatus]) -> int:
        one = engines[1]
        seen.append((one.waiting_requests, one.running_requests, one.used_pages, one.cached_pages(request)))
        return 0

    policy = Said(answer=choose, needs_cached_pages=True, needs_reports=True, staleness_s=staleness_s)
    tiers = {1: gpu(8), 0: gpu(None)}
    engines = known_engines(policy, tiers, lambda: now)
    assert [(one.engine, one.capacity_pages) for one in engines] == [(0, None), (1, 8)]
    router = Router(policy, engines)
    router.send(prompt((0, 4)), now)
    now = 1.0
    router.engines[1].report(Report(5, 6, 7), now)
    (watch,) = tiers[1].watches
    watch.stored(tiers[1], ((0, 3),))
    router.send(prompt((0, 4)), now)
    assert seen == known
    now = 3.0
    router.send(prompt((0, 4)), now)
    assert seen[-1] == (5, 6, 7, 3)


def test_nothing_is_reported_to_a_policy_that_needs_nothing() -> None:
    tiers = {0: gpu(8)}
    known_engines(Said(), tiers, lambda: 0.0)
    assert tiers[0].watches == []


def test_a_router_that_hears_late_counts_requests_until_it_hears_of_their_end() -> None:
    policy = Said(hears_late=True, staleness_s=2.0)
    router = before(policy)
    first, second = prompt((0, 2), index=0), prompt((9, 5), index=1)
    router.send(first, 1.0)
    router.first_token(first, 0, 2.0)
    router.ended(first, 0, 3.0)
    router.send(second, 4.5)
    assert policy.seen == [(0, 1, 9), (1, 0, 0)]
    assert policy.told == [("sent", 0, 0, 1.0), ("first token", 0, 0, 4.0), ("sent", 1, 0, 4.5)]
    router.send(prompt((20, 1), index=2), 5.0)
    assert policy.seen == [(0, 1, 21), (1, 0, 0)], "what arrives at the moment of a choice is known"
    assert policy.told[3] == ("ended", 0, 0, 5.0)


def test_what_arrives_at_the_same_time_is_heard_engine_by_engine() -> None:
    policy = Said(hears_late=True, staleness_s=1.0, answer=lambda request, _: request.index)
    router = before(policy)
    low, high = prompt((0, 2), index=0), prompt((9, 5), index=1)
    for request in (low, high):
        router.send(request, 0.0)
    router.ended(high, 1, 2.0)
    router.first_token(low, 0, 2.0)
    router.ended(low, 0, 2.0)
    router.send(prompt((20, 1), index=0), 9.0)
    assert policy.told[2:5] == [("first token", 0, 0, 3.0), ("ended", 0, 0, 3.0), ("ended", 1, 1, 3.0)]


def test_a_failure_is_known_at_once_with_all_that_the_engine_had_to_say() -> None:
    policy = Said(hears_late=True, staleness_s=5.0, answer=lambda request, _: request.index)
    router = before(policy)
    lost, other = prompt((0, 2), index=0), prompt((9, 5), index=1)
    for request in (lost, other):
        router.send(request, 0.0)
    router.first_token(lost, 0, 1.0)
    router.ended(other, 1, 1.0)
    router.ended(lost, 0, 2.0)
    router.down(0, 2.0)
    assert policy.told[2:] == [("first token", 0, 0, 2.0), ("ended", 0, 0, 2.0), ("down", 0, 2.0)]
    policy.answer = 1
    router.send(prompt((20, 1), index=2), 6.0)
    assert ("ended", 1, 1, 6.0) in policy.told


def test_late_answers_need_staleness() -> None:
    policy = Said(hears_late=True)
    router = before(policy)
    router.send(prompt(), 1.0)
    router.ended(prompt(), 0, 3.0)
    assert policy.told[-1] == ("ended", prompt().index, 0, 3.0)
