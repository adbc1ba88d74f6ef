"""A thousand long conversations through three tiers in simulated time."""

import pytest

from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.prefetching import Prefetching
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.core.small import make_tiers
from tests.engine.small import SmallEngine, check_idle
from tests.workloads import long_conversations

PAGE_TOKENS = 512
LLAMA_8B = ModelSpec(layers=32, hidden_size=4096, vocabulary=128256, heads=32, kv_heads=8, head_dim=128, mlp_width=14336)
H200 = HardwareSpec(
    flops_per_s=790e12,
    memory_bytes=141_000_000_000,
    memory_bytes_per_s=4.3e12,
    host_to_device_bytes_per_s=55.4e9,
    device_to_host_bytes_per_s=55.4e9,
    both_directions_bytes_per_s=101e9,
    disk_read_bytes_per_s=3.2e9,
    disk_write_bytes_per_s=3.0e9,
)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return long_conversations(requests=1_000, page_tokens=PAGE_TOKENS)


def make_cache(capacities: list[int | None], placement: type[WriteBack] | type[WriteThrough]) -> Cache:
    tiers, edges = make_tiers(capacities, [LRU(), LRU(), LRU()], [placement(), placement()], slots=False, page_tokens=PAGE_TOKENS)
    return Cache(tiers, edges, Rules(), PAGE_TOKENS)


def make_engine(cache: Cache, prefetch: NoPrefetch | ThresholdPrefetch) -> Engine:
    capacity = cache.tiers[1].pool.capacity
    prefetch.bind(PolicyContext(tier=1, tier_name="cpu", capacity_pages=capacity, page_tokens=PAGE_TOKENS))
    substrate = SimulatedSubstrate(LLAMA_8B, H200, PAGE_TOKENS, links="fifo")
    return SmallEngine(substrate, cache, Prefetching(cache, prefetch, Offer), EngineSettings(), FCFS())


@pytest.mark.long
@pytest.mark.parametrize("placement", [WriteBack, WriteThrough])
@pytest.mark.parametrize("prefetch", [NoPrefetch, ThresholdPrefetch])
def test_a_thousand_conversations_pass_through_three_tiers(
    requests: list[Request], placement: type[WriteBack] | type[WriteThrough], prefetch: type[NoPrefetch] | type[ThresholdPrefetch]
) -> None:
    engine = make_engine(make_cache([600, 1_000, 4_000], placement), prefetch())
    outcome = engine.run(requests)
    check_idle(engine)  # type: ignore[arg-type]
    assert not outcome.status.any()
    assert (outcome.ttft_s > 0).all() and (outcome.e2e_s >= outcome.ttft_s).all()
    endless = make_cache([None], placement)
    bound = Replay(CacheServer(endless, Prefetching(endless, NoPrefetch(), Offer)), ReplaySettings()).run(requests)
    hits, most = outcome.hit_pages.sum(axis=1), bound.hit_pages.sum(axis=1)
    assert (hits <= most).all()
    assert 0 < hits.sum() < most.sum()
    assert all(use.peak_pages <= use.capacity_pages for use in outcome.tiers.values() if use.capacity_pages is not None)
