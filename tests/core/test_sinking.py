"""Eviction in one pass over the heaps, and requests served in one pass, leave every page where the plain calls leave it."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.alone import AloneOnGpu
from kvsim.core.cache import TieredCache
from kvsim.core.instant import InstantCache
from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.runs import append_run
from kvsim.core.sinking import Sinking
from kvsim.core.tier import Tier
from kvsim.core.tree import Node
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.server import TieredServer
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.random import Random
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch


@dataclass(kw_only=True, eq=False)
class Told(RankedEviction):
    """LRU that wants to hear of every removal."""

    removed_pages: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def rank(self, node: Node) -> float:
        return node.last_used

    def on_remove(self, node: Node) -> None:
        self.removed_pages += node.pages


@dataclass(kw_only=True, eq=False)
class KeepEven(PlacementPolicy):
    """Writes down only what begins at an even depth: victims of one pass sink, or are dropped."""

    def after_eviction(self, node: Node, now: float) -> bool:
        return node.depth % 2 == 0


def short_prefetch() -> ThresholdPrefetch:
    """From two pages on."""
    return ThresholdPrefetch(min_tokens=8, load_min_tokens=4)


PLACEMENTS = (WriteBack, WriteThrough, WriteThroughSelective, Exclusive, KeepEven)
EVICTIONS = (LRU, FIFO, LFU, SegmentedLRU, Told)


def make_cache(
    pool: type[Pool], capacities: tuple[int, ...], evictions: tuple[type, ...], placements: tuple[type, ...], rules: Rules
) -> InstantCache:
    tiers = []
    for index, (capacity, eviction) in enumerate(zip(capacities, evictions, strict=False)):
        policy = eviction()
        policy.bind(PolicyContext(tier=index))
        tiers.append(
            Tier(("gpu", "cpu", "disk")[index], index, pool(capacity), policy, placements[index - 1]() if index else None)
        )
    return InstantCache(tiers, rules, page_tokens=4)


def pages_by_tier(cache: TieredCache) -> list[set[int]]:
    return [
        {
            start + at
            for node in cache.tree.root.descendants()
            if node.state[tier.index]
            for start, pages in node.runs
            for at in range(pages)
        }
        for tier in cache.tiers
    ]


def counted(cache: TieredCache) -> list[Any]:
    tiers = [
        (tier.pool.free, tier.pool.peak_pages, tier.evictable_pages, tier.inserted_pages, tier.evicted_pages)
        for tier in cache.tiers
    ]
    return [asdict(cache.counts), *tiers]


class Player:
    """Plays requests one after another, so many unfinished at a time."""

    def __init__(self, cache: InstantCache, prefetch: Callable[[], PrefetchPolicy], in_flight: int) -> None:
        policy = prefetch()
        policy.bind(PolicyContext(tier=1, page_tokens=cache.page_tokens))
        self.cache = cache
        self.prefetching = Prefetching(cache, policy, Offer)
        self.server = TieredServer(cache, self.prefetching)
        self.live: deque[Any] = deque()
        self.in_flight = in_flight

    def play(self, request: Request, pages: int) -> tuple[int, int, int] | None:
        if self.in_flight == 0:
            return self.server.serve_alone(request, pages, request.arrival_s)
        while len(self.live) >= self.in_flight:
            self.server.finish_request(self.live.popleft())
        held = self.server.serve(request, pages, request.arrival_s)
        while held is None and self.live:
            self.server.finish_request(self.live.popleft())
            held = self.server.serve(request, pages, request.arrival_s)
        if held is None:
            return None
        self.live.append(held)
        if self.in_flight == 1:
            self.server.finish_request(self.live.popleft())
        return held.hits


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Prompts of 1 to 9 pages that branch from one another; a page id stands for one path."""
    ids: dict[tuple[int, ...], int] = {}
    gap = draw(st.integers(2, 9))
    requests = []
    words = st.lists(st.sampled_from([0, 0, 0, 0, 1, 2]), min_size=1, max_size=9)
    for index, word in enumerate(draw(st.lists(words, min_size=1, max_size=60))):
        runs: list[tuple[int, int]] = []
        for end in range(1, len(word) + 1):
            append_run(runs, ids.setdefault(tuple(word[:end]), len(ids) + len(ids) // gap), 1)
        requests.append(
            Request(
                index=index,
                arrival_s=float(index // 2),
                prompt_tokens=4 * len(word) - draw(st.integers(0, 3)),
                output_tokens=draw(st.integers(0, 9)),
                runs=tuple(runs),
                prompt_pages=len(word),
            )
        )
    return requests


@given(
    requests=workloads(),
    capacities=st.tuples(st.integers(9, 20), st.integers(3, 30), st.integers(3, 40)),
    tiers=st.integers(2, 3),
    evictions=st.tuples(*[st.sampled_from(EVICTIONS)] * 3),
    placements=st.tuples(*[st.sampled_from(PLACEMENTS)] * 2),
    prefetch=st.sampled_from((NoPrefetch, short_prefetch)),
    rules=st.builds(Rules, recompute_last_token=st.booleans()),
    in_flight=st.integers(0, 3),
    hold_output=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_page_is_where_the_plain_calls_leave_it(
    requests: list[Request],
    capacities: tuple[int, int, int],
    tiers: int,
    evictions: tuple[type, ...],
    placements: tuple[type, ...],
    prefetch: Callable[[], PrefetchPolicy],
    rules: Rules,
    in_flight: int,
    hold_output: bool,
) -> None:
    fast = Player(make_cache(Pool, capacities[:tiers], evictions, placements, rules), prefetch, in_flight)
    plain = Player(make_cache(SlotPool, capacities[:tiers], evictions, placements, rules), prefetch, max(1, in_flight))
    assert not Sinking.suits(plain.cache.tiers) and not AloneOnGpu.suits(plain.cache)
    for request in requests:
        pages = request.prompt_pages + hold_output * -(-request.output_tokens // 4)
        assert fast.play(request, pages) == plain.play(request, pages)
        assert pages_by_tier(fast.cache) == pages_by_tier(plain.cache)
        assert counted(fast.cache) == counted(plain.cache)
    assert fast.prefetching.result() == plain.prefetching.result()
    fast.cache.check()


@pytest.mark.parametrize(
    ("pool", "eviction", "suits"), [(Pool, LRU, True), (SlotPool, LRU, False), (Pool, Told, False), (Pool, Random, False)]
)
def test_heaps_are_used_where_slots_are_numbers_and_nobody_is_told(pool: type[Pool], eviction: type, suits: bool) -> None:
    cache = make_cache(pool, (9, 9), (LRU, eviction), (WriteBack,), Rules(recompute_last_token=False))
    assert Sinking.suits(cache.tiers) is suits
