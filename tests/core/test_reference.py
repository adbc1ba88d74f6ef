"""The core hits what a slow model hits that goes page by page and shares no code with it, request by request."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.cache import TieredCache
from kvsim.core.instant import InstantCache
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.replay import Replay, ReplaySettings
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
from tests.core.reference import SlowCache
from tests.core.small import make_request, make_tiers

EVICTIONS: dict[str, Any] = {"lru": LRU, "fifo": FIFO, "lfu": LFU, "slru": SegmentedLRU}
PLACEMENTS: dict[str, Any] = {
    "write_back": WriteBack,
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "exclusive": Exclusive,
}
PAGE_TOKENS = 4

Setting = dict[str, Any]


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Prompts of a few pages that branch from one another, with and without a partial page at the end."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    words = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=7)
    for index, word in enumerate(draw(st.lists(words, min_size=12, max_size=50))):
        pages = [ids.setdefault(tuple(word[:end]), len(ids)) for end in range(1, len(word) + 1)]
        tail = draw(st.integers(-PAGE_TOKENS + 1, PAGE_TOKENS - 1))
        prompt_tokens, output_tokens = PAGE_TOKENS * len(word) + tail, draw(st.integers(0, 9))
        requests.append(make_request(pages, index=index, prompt_tokens=prompt_tokens, output_tokens=output_tokens))
    return requests


def hits_of_core(
    kind: type[TieredCache], requests: list[Request], capacities: list[int], *, policy: str, placement: str, page_tokens: int,
    recompute_last_token: bool, in_flight: int, hold_output: bool,
) -> list[list[int]]:  # fmt: skip
    """Hit pages on the GPU and in the CPU tier for each request, as replayed."""
    evictions = [EVICTIONS[policy]() for _ in capacities]
    placements = [PLACEMENTS[placement]() for _ in capacities[1:]]
    tiers: list[Tier] = make_tiers(capacities, evictions, placements, slots=False, page_tokens=page_tokens)
    assert all(isinstance(tier.pool, Pool) for tier in tiers)
    cache = kind(tiers, Rules(recompute_last_token=recompute_last_token), page_tokens)
    replay = Replay(cache, Prefetching(cache, NoPrefetch(), Offer), ReplaySettings(in_flight=in_flight, hold_output=hold_output))
    outcome = replay.run(requests)
    cache.check()
    rows: list[list[int]] = outcome.hit_pages[:, :2].tolist()
    return [row if served else [-1, -1] for row, served in zip(rows, outcome.status == 0, strict=True)]


def hits_of_model(requests: list[Request], capacities: list[int], **setting: Any) -> list[list[int]]:
    """The same, from the slow model; -1 for what can never run."""
    model = SlowCache(*capacities, **setting)
    return [list(model.serve(request) or (-1, -1)) for request in requests]


def compare(requests: list[Request], capacities: list[int], setting: Setting) -> list[list[int]]:
    """Assert that all caches hit what the model hits; returns that."""
    hits = hits_of_model(requests, capacities, **setting)
    for kind in (TieredCache, InstantCache) if len(capacities) > 1 else (TieredCache,):
        assert hits_of_core(kind, requests, capacities, **setting) == hits
    return hits


SETTINGS: dict[str, Any] = {
    "policy": st.sampled_from(sorted(EVICTIONS)),
    "recompute_last_token": st.booleans(),
    "in_flight": st.integers(1, 3),
    "hold_output": st.booleans(),
    "page_tokens": st.just(PAGE_TOKENS),
}


@given(
    requests=workloads(), capacity=st.integers(2, 12), setting=st.fixed_dictionaries({**SETTINGS, "placement": st.just("none")})
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_one_tier_hits_what_the_slow_model_hits(requests: list[Request], capacity: int, setting: Setting) -> None:
    compare(requests, [capacity], setting)


@given(
    requests=workloads(),
    gpu=st.integers(2, 9),
    more=st.integers(0, 8),
    setting=st.fixed_dictionaries({**SETTINGS, "placement": st.sampled_from(sorted(PLACEMENTS))}),
)
@settings(max_examples=250, deadline=None, derandomize=True, database=None)
def test_two_tiers_hit_what_the_slow_model_hits(requests: list[Request], gpu: int, more: int, setting: Setting) -> None:
    compare(requests, [gpu, 2 * gpu + more], setting)


@pytest.fixture(scope="module")
def conversation(shared: Path) -> list[Request]:
    path = shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
    return Mooncake(path=str(path), tail="all", limit=1_500).load(512).requests


@pytest.mark.parametrize(("policy", "in_flight"), [("lru", 1), ("lru", 5), ("fifo", 1), ("lfu", 2), ("slru", 1)])
def test_one_tier_hits_the_same_on_conversation(conversation: list[Request], policy: str, in_flight: int) -> None:
    setting = {"policy": policy, "placement": "none", "page_tokens": 512, "recompute_last_token": in_flight > 1}
    hits = compare(conversation, [1_000], {**setting, "in_flight": in_flight, "hold_output": in_flight > 1})
    assert sum(gpu for gpu, _ in hits) > 500


@pytest.mark.parametrize(
    ("placement", "cpu_hits"), [("write_back", 500), ("write_through", 500), ("write_through_selective", 50), ("exclusive", 500)]
)
def test_two_tiers_hit_the_same_on_conversation(conversation: list[Request], placement: str, cpu_hits: int) -> None:
    setting = {"policy": "lru", "placement": placement, "page_tokens": 512, "recompute_last_token": True}
    hits = compare(conversation, [1_000, 3_000], {**setting, "in_flight": 2, "hold_output": True})
    assert sum(cpu for _, cpu in hits) > cpu_hits
