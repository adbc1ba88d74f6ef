"""An instant cache decides exactly what a cache decides whose transfers are settled one at a time, as soon as they are made."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.cache import TieredCache
from kvsim.core.instant import InstantCache
from kvsim.core.pages import append_run
from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.replay import Replay, ReplaySettings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.trace.mooncake import Mooncake

PLACEMENTS = (WriteBack, WriteThrough, WriteThroughSelective, Exclusive)
EVICTIONS = (LRU, FIFO, LFU, SegmentedLRU)
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
CHECK_EVERY = 500


class Watched(Replay):
    """Checks every invariant now and then, in the middle of the run."""

    def serve(self, request: Request) -> tuple[int, int, int] | None:
        hits = super().serve(request)
        if request.index % CHECK_EVERY == 0:
            self.cache.check()
        return hits


def play(
    kind: type[TieredCache],
    requests: list[Request],
    capacities: tuple[int, ...],
    *,
    placement: type,
    eviction: type,
    pool: type[Pool] = Pool,
    in_flight: int = 1,
    page_tokens: int = 512,
) -> tuple[Outcome, dict[str, int]]:
    tiers = []
    for index, capacity in enumerate(capacities):
        policy = eviction()
        policy.bind(PolicyContext(tier=index))
        tiers.append(Tier(("gpu", "cpu", "disk")[index], index, pool(capacity), policy, placement() if index else None))
    cache = kind(tiers, Rules(recompute_last_token=False), page_tokens)
    replay = Watched(cache, Prefetching(cache, NoPrefetch(), Offer), ReplaySettings(in_flight=in_flight))
    outcome = replay.run(requests)
    cache.check()
    return outcome, asdict(cache.counts)


def assert_alike(requests: list[Request], capacities: tuple[int, ...], **settings_: object) -> None:
    instant, counts = play(InstantCache, requests, capacities, **settings_)  # type: ignore[arg-type]
    settled, settled_counts = play(TieredCache, requests, capacities, **settings_)  # type: ignore[arg-type]
    assert np.array_equal(instant.hit_pages, settled.hit_pages)
    assert np.array_equal(instant.status, settled.status)
    assert counts == settled_counts
    assert instant.tiers == settled.tiers


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_instant_and_settled_are_alike_on_conversation(shared: Path, placement: type, eviction: type) -> None:
    requests = Mooncake(path=str(shared / "traces" / CONVERSATION), tail="all", limit=3_000).load(512).requests
    assert_alike(requests, (600, 1_500, 6_000), placement=placement, eviction=eviction)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Prompts of 1 to 9 pages that branch from one another; a page id stands for one path."""
    ids: dict[tuple[int, ...], int] = {}
    gap = draw(st.integers(2, 9))
    requests = []
    words = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=9)
    for index, word in enumerate(draw(st.lists(words, min_size=1, max_size=90))):
        runs: list[tuple[int, int]] = []
        for end in range(1, len(word) + 1):
            append_run(runs, ids.setdefault(tuple(word[:end]), len(ids) + len(ids) // gap), 1)
        requests.append(
            Request(
                index=index,
                arrival_s=float(index),
                prompt_tokens=4 * len(word),
                output_tokens=draw(st.integers(0, 9)),
                runs=tuple(runs),
                prompt_pages=len(word),
            )
        )
    return requests


@given(
    requests=workloads(),
    capacities=st.tuples(st.integers(9, 20), st.integers(20, 40), st.integers(20, 60)),
    placement=st.sampled_from(PLACEMENTS),
    eviction=st.sampled_from(EVICTIONS),
    pool=st.sampled_from((Pool, SlotPool)),
    in_flight=st.integers(1, 2),
)
@settings(max_examples=200, deadline=None)
def test_instant_and_settled_are_alike(
    requests: list[Request],
    capacities: tuple[int, int, int],
    placement: type,
    eviction: type,
    pool: type[Pool],
    in_flight: int,
) -> None:
    given_ = {"placement": placement, "eviction": eviction, "pool": pool, "in_flight": in_flight, "page_tokens": 4}
    assert_alike(requests, capacities, **given_)
