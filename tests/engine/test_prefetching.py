"""What becomes of prefetched pages, in a replay: every one is used or wasted, and what is refused says why."""

from collections.abc import Callable
from typing import Any

import pytest

from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from tests.core.small import make_tiers
from tests.engine.small import counted
from tests.workloads import make_requests


def play(
    words: list[str],
    policy: PrefetchPolicy,
    capacities: tuple[int, int, int],
    *,
    in_flight: int = 1,
    persistent: tuple[int, ...] = (),
    placement: Callable[[], Any] = WriteBack,
) -> Outcome:
    """Replay prompts of one-token pages, a page for each letter, over three tiers; ``persistent`` are numbers of prompts."""
    tiers, edges = make_tiers(capacities, [LRU(), LRU(), LRU()], [placement(), placement()], slots=True, page_tokens=1)
    cache = Cache(tiers, edges, Rules(recompute_last_token=False), 1)
    policy.bind(PolicyContext(tier=1, capacity_pages=capacities[1], page_tokens=1))
    requests: list[Request] = make_requests(words)
    for number in persistent:
        requests[number].persistent = True
    prefetching = Prefetching(cache, policy, Offer)
    outcome = Replay(CacheServer(cache, prefetching), ReplaySettings(in_flight=in_flight)).run(requests)
    cache.check()
    assert not cache.transfers.fetch_pins and not prefetching.in_flight_pages
    counts = outcome.prefetch
    assert counts["fetched_pages"] == counts["used_pages"] + counts["wasted_pages"]
    return outcome


def eager(**settings: float) -> ThresholdPrefetch:
    return ThresholdPrefetch(**{"min_tokens": 1, "in_flight_fraction": 1.0, "load_min_tokens": 0} | settings)  # type: ignore[arg-type]


ABCD_ON_DISK = ["abcd", "efgh", "ijkl"]
"""With 4 pages on the GPU and 4 in the CPU tier, the disk has a to d now."""


def test_a_short_continuation_is_refused_by_the_threshold() -> None:
    outcome = play([*ABCD_ON_DISK, "abcd"], eager(min_tokens=5), (4, 4, 20))
    assert outcome.hit_pages[-1].tolist() == [0, 0, 0]
    assert counted(outcome) == {"refused_by_threshold": 4}


@pytest.mark.parametrize("policy", [AdaptivePrefetch(min_tokens=3, load_min_tokens=0), eager()])
def test_the_pages_that_it_continues_are_no_room_for_a_prefetch(policy: PrefetchPolicy) -> None:
    """The CPU tier has a, w and x; the disk has b, c and d. Beside a there is room for two of them."""
    outcome = play(["abcd", "w", "x", "y", "z", "s", "t", "abcd"], policy, (4, 3, 12))
    assert outcome.hit_pages[-1].tolist() == [0, 1, 0]
    assert counted(outcome) == {"refused_by_memory": 3}


def test_a_rejected_request_gives_up_what_was_fetched_for_it() -> None:
    """``play`` checks that nothing stays pinned. The next request finds the pages in the CPU tier and needs no fetch."""
    outcome = play([*ABCD_ON_DISK, "x", "abcd", "abc"], eager(), (4, 4, 20), persistent=(3,))
    assert outcome.status[-2] == REJECTED and outcome.hit_pages[-1].tolist() == [0, 3, 0]
    assert counted(outcome) == {"fetched": 4, "wasted": 4}


def test_what_the_load_bound_leaves_in_the_cpu_tier_is_wasted() -> None:
    outcome = play([*ABCD_ON_DISK, "abcd"], eager(load_min_tokens=5), (4, 4, 20))
    assert outcome.hit_pages[-1].tolist() == [0, 0, 0]
    assert counted(outcome) == {"fetched": 4, "wasted": 4}


def test_nothing_is_fetched_for_a_request_larger_than_the_gpu() -> None:
    outcome = play([*ABCD_ON_DISK, "abcdx"], eager(), (4, 4, 20))
    assert outcome.status[-1] == REJECTED
    assert counted(outcome) == {}


def test_a_request_that_first_has_to_wait_for_another_counts_once() -> None:
    outcome = play([*ABCD_ON_DISK, "abcd"], eager(), (4, 4, 20), in_flight=2)
    assert outcome.hit_pages[-1].tolist() == [0, 0, 4]
    assert counted(outcome) == {"fetched": 4, "used": 4}
