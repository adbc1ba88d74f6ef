"""Policies with several queues do what slow models do that go page by page; and never lose track of a page."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.cache import Cache
from kvsim.core.rules import Rules
from kvsim.engine.prefetching import Prefetching
from kvsim.policies.eviction.arc import ARC
from kvsim.policies.eviction.mq import MultiQueue
from kvsim.policies.eviction.queues import QueueEviction
from kvsim.policies.eviction.s3_fifo import S3FIFO
from kvsim.policies.eviction.sieve import Sieve
from kvsim.policies.eviction.slru import SegmentedLRU, SizedSegmentedLRU
from kvsim.policies.eviction.two_q import TwoQ
from kvsim.policies.eviction.w_tinylfu import WTinyLFU
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from tests.core.small import make_tiers, small_cache
from tests.policies.queue_models import (
    ARCModel,
    Model,
    MQModel,
    S3FIFOModel,
    SieveModel,
    SizedSLRUModel,
    TwoQModel,
    WTinyLFUModel,
)
from tests.workloads import EXAMPLES, make_request, pages_of

PAIRS: dict[str, tuple[Callable[[], Any], type[Model]]] = {
    "arc": (ARC, ARCModel),
    "two_q": (TwoQ, TwoQModel),
    "s3_fifo": (S3FIFO, S3FIFOModel),
    "sieve": (Sieve, SieveModel),
    "mq": (lambda: MultiQueue(queues=3, life_time=9), MQModel),
    "w_tinylfu": (lambda: WTinyLFU(window=0.25), WTinyLFUModel),
    "slru": (lambda: SizedSegmentedLRU(protected_fraction=0.5), SizedSLRUModel),
}


@st.composite
def workloads(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of 1 to 8 pages that branch from one another, as page ids; some have several extents."""
    ids: dict[tuple[int, ...], int] = {}
    gap = draw(st.integers(2, 9))
    words = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=8)
    pool = draw(st.lists(words, min_size=3, max_size=12))
    prompts = []
    for word in draw(st.lists(st.sampled_from(pool), min_size=5, max_size=60)):
        cut = draw(st.integers(1, len(word)))
        path = tuple(word[:cut])
        prompts.append([ids.setdefault(path[:end], len(ids) + len(ids) // gap) for end in range(1, len(path) + 1)])
    return prompts


def marks_of(policy: QueueEviction) -> dict[int, tuple[int, int, Any]]:
    """Every page's mark."""
    marks = {}
    for node in policy.pages():
        pages = pages_of(node.runs)
        each = [(mark.queue, mark.place, mark.value) for count, mark in policy.parts(node) for _ in range(count)]
        marks.update(zip(pages, each, strict=True))
    return marks


@pytest.mark.parametrize("name", PAIRS)
@given(numbered=st.booleans(), prompts=workloads(), capacity=st.integers(2, 24), in_flight=st.integers(1, 3))
@settings(max_examples=EXAMPLES)
def test_queues_do_what_the_slow_model_does(
    name: str, numbered: bool, prompts: list[list[int]], capacity: int, in_flight: int
) -> None:
    make, kind = PAIRS[name]
    policy, model = make(), kind(capacity, in_flight)
    tiers, edges = make_tiers([capacity], [policy], [], slots=numbered, page_tokens=1)
    cache = Cache(tiers, edges, Rules(recompute_last_token=False), 1)
    replay = Replay(
        CacheServer(cache, Prefetching(cache, NoPrefetch(), Offer)), ReplaySettings(in_flight=in_flight, hold_output=False)
    )
    for numbers in prompts:
        (hits,) = replay.play([make_request(numbers)])
        assert (hits and hits[0]) == model.serve(numbers)
        marks = marks_of(policy)
        assert marks == {number: page.mark for number, page in model.pages.items()}
        for queue, size in enumerate(policy.sizes):
            assert size == sum(mark[0] == queue for mark in marks.values())
    cache.check()


@pytest.mark.parametrize("name", PAIRS)
def test_an_unlimited_tier_keeps_everything(name: str) -> None:
    policy = PAIRS[name][0]()
    cache = small_cache(gpu=None, slots=False, eviction=[lambda: policy])
    for word in ("abc", "abd", "abc", "xyz", "ab"):
        cache.use(word)
    assert cache.on("gpu") == "abcdxyz"
    assert sum(policy.sizes) == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TwoQ(kin=0.0), "kin must be above 0 and below 1, not 0.0; it is a share of the tier's pages"),
        (lambda: TwoQ(kout=0.0), "kout must be above 0, not 0.0"),
        (lambda: S3FIFO(small=1.0), "small must be above 0 and below 1, not 1.0"),
        (lambda: S3FIFO(ghost=-1.0), "ghost must be above 0, not -1.0"),
        (lambda: S3FIFO(move_threshold=4), "move_threshold must be from 1 to 3, not 4"),
        (lambda: MultiQueue(queues=0), "queues must be at least 1, not 0"),
        (lambda: MultiQueue(life_time=0), "life_time must be at least 1, not 0"),
        (lambda: MultiQueue(ghost=0.0), "ghost must be above 0, not 0.0"),
        (lambda: WTinyLFU(window=1.0), "window must be above 0 and below 1, not 1.0"),
        (lambda: SegmentedLRU(segments="two"), "segments must be unsized or sized, not two"),
        (lambda: SegmentedLRU(segments="sized", protected_fraction=1), "protected_fraction must be above 0 and below 1, not 1"),
        (lambda: SegmentedLRU(protected_fraction=0.5), "protected_fraction=0.5 has no effect without segments=sized"),
        (lambda: SegmentedLRU(segments="sized", protected_hits=0), "protected_hits must be at least 1, not 0"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
