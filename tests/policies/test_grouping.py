"""What a replay hits and counts does not depend on how pages are grouped into nodes, whatever the policies."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.cache import Cache
from kvsim.core.request import Request, RetentionRange
from kvsim.core.rules import Rules
from kvsim.engine.outcome import Outcome, tier_names
from kvsim.engine.prefetching import Prefetching
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.arc import ARC
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.filo import FILO
from kvsim.policies.eviction.gdsf import GDSF
from kvsim.policies.eviction.length_aware import LengthAware
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lfu_da import LFUDynamicAging
from kvsim.policies.eviction.lpc import LearnedPrefix
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.lru_k import LRUK
from kvsim.policies.eviction.mq import MultiQueue
from kvsim.policies.eviction.mru import MRU
from kvsim.policies.eviction.priority import Priority
from kvsim.policies.eviction.retention import RetentionPriority
from kvsim.policies.eviction.s3_fifo import S3FIFO
from kvsim.policies.eviction.session_aware import SessionAware
from kvsim.policies.eviction.sieve import Sieve
from kvsim.policies.eviction.slru import SegmentedLRU, SizedSegmentedLRU
from kvsim.policies.eviction.tail_latency import TailLatency
from kvsim.policies.eviction.ttl import TimeToLive
from kvsim.policies.eviction.two_q import TwoQ
from kvsim.policies.eviction.w_tinylfu import WTinyLFU
from kvsim.policies.eviction.workload_aware import PageReuse, WorkloadAware
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.cost_aware import CostAware
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.replaying.replay import Replay, Rows
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from tests.core.small import make_tiers
from tests.workloads import branching_requests

EVICTIONS: dict[str, Any] = {
    "arc": ARC, "fifo": FIFO, "filo": FILO, "gdsf": GDSF, "length_aware": LengthAware, "lfu": LFU, "lfu_da": LFUDynamicAging,
    "lru": LRU, "lru_k": LRUK, "mq": MultiQueue, "mru": MRU, "s3_fifo": S3FIFO, "sieve": Sieve, "slru": SegmentedLRU,
    "slru_sized": SizedSegmentedLRU, "ttl": partial(TimeToLive, ttl_s=4), "two_q": TwoQ, "w_tinylfu": WTinyLFU,
    "priority": Priority, "tail_latency": partial(TailLatency, threshold=4), "workload_aware": WorkloadAware,
    "lpc": partial(LearnedPrefix, interval_s=9.0), "retention": RetentionPriority, "session_aware": SessionAware,
    "page_reuse": PageReuse,
}  # fmt: skip
EXAMPLES = int(os.environ.get("KVSIM_MODEL_EXAMPLES", 20))
"""How many random workloads each policy plays."""

PLACEMENTS: list[Any] = [
    WriteBack,
    WriteThrough,
    WriteThroughSelective,
    Exclusive,
    partial(WriteBack, watermark=0.5),
    partial(WriteBack, watermark=0.2),
    StoreThreshold,
    partial(StoreThreshold, k=2, tracker_pages=9),
    partial(ByLength, min_tokens=9, disk_min_tokens=14),
    partial(CostAware, margin=0.1),
    partial(CostAware, margin=0.01),
]


def play_single_pages(replay: Replay, requests: list[Request]) -> Outcome:
    """As ``run``, but all nodes are cut into single pages before each request."""
    rows = Rows(len(tier_names(replay.server.tiers)))
    assert isinstance(replay.server, CacheServer)
    cache = replay.server.cache
    assert isinstance(cache, Cache)
    for request in requests:
        for node in list(cache.tree.root.descendants()):
            while node.pages > 1:
                cache.residency.cut(node, 1)
        rows.add(replay.play([request]))
    while replay.live:
        replay.server.finish_request(replay.live.pop(0))
    return replay._outcome(requests, rows, wall_s=0.0)


def play(
    player: Callable[[Replay, list[Request]], Outcome], requests: list[Request], capacities: list[int], eviction: Any,
    placements: tuple[Any, Any], recompute_last_token: bool, prefetches: bool, replay: ReplaySettings,
) -> Outcome:  # fmt: skip
    evictions, made = [eviction() for _ in capacities], [placement() for placement in placements]
    tiers, edges = make_tiers(capacities, evictions, made, slots=False, page_tokens=4)
    cache = Cache(tiers, edges, Rules(recompute_last_token=recompute_last_token), 4)
    prefetch = ThresholdPrefetch(min_tokens=4, in_flight_fraction=1.0) if prefetches else NoPrefetch()
    prefetch.bind(PolicyContext(tier=1, capacity_pages=capacities[-1], page_tokens=4))
    return player(Replay(CacheServer(cache, Prefetching(cache, prefetch, Offer)), replay), requests)


@pytest.mark.parametrize("name", EVICTIONS)
@given(
    requests=branching_requests(),
    capacities=st.lists(st.integers(4, 14), min_size=1, max_size=3),
    placements=st.tuples(st.sampled_from(PLACEMENTS), st.sampled_from(PLACEMENTS)),
    recompute_last_token=st.booleans(),
    prefetches=st.booleans(),
    replay=st.builds(ReplaySettings, in_flight=st.integers(1, 3), hold_output=st.booleans()),
)
@settings(max_examples=EXAMPLES // 2)
def test_single_pages_fare_as_nodes_do(name: str, requests: list[Request], **setting: Any) -> None:
    for at, request in enumerate(requests):
        request.arrival_s, request.session, request.priority, request.kind = float(at), at % 3, at % 2, "ab"[at % 2]
        request.turn, request.retention = at // 3, (RetentionRange(5, 17, 60 * (at % 2), 4.0),) * (at % 4 != 3)
    nodes, pages = (play(player, requests, eviction=EVICTIONS[name], **setting) for player in (Replay.run, play_single_pages))
    assert nodes.hit_pages.tolist() == pages.hit_pages.tolist()
    assert (nodes.tiers, nodes.placement, nodes.prefetch) == (pages.tiers, pages.placement, pages.prefetch)
