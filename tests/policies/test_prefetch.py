"""Prefetch policies: how much is read ahead, what is loaded, how long a request waits."""

from math import inf
from typing import Any

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.policies.prefetch.base import Offer, Refusal
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch


def bound(policy: Any) -> Any:
    """The policy for pages of 16 tokens and a CPU tier of 100 pages."""
    policy.bind(PolicyContext(tier=1, capacity_pages=100, page_tokens=16))
    return policy


def offer(stored: int, *, in_flight: int = 0, available: int = 100) -> Offer:
    return Offer(stored_pages=stored, in_flight_pages=in_flight, available_pages=available)


def test_none_reads_nothing_ahead_and_loads_everything() -> None:
    assert bound(NoPrefetch()).fetch(offer(50)) == 0
    assert NoPrefetch().load(3, 4) == 7
    assert NoPrefetch().wait_s(1_000) == inf


def test_threshold_fetches_from_256_tokens_on() -> None:
    policy = bound(ThresholdPrefetch())
    assert policy.fetch(offer(15)) is Refusal.THRESHOLD
    assert policy.fetch(offer(16)) == 16


def test_threshold_keeps_half_of_the_cpu_tier_in_flight_at_most() -> None:
    policy = bound(ThresholdPrefetch())
    assert policy.fetch(offer(20, in_flight=30)) == 20
    assert policy.fetch(offer(20, in_flight=31)) is Refusal.RATE_LIMIT


def test_threshold_wants_room_for_all_of_it() -> None:
    assert bound(ThresholdPrefetch()).fetch(offer(20, available=19)) is Refusal.MEMORY


def test_adaptive_takes_what_fits_if_that_is_enough() -> None:
    policy = bound(AdaptivePrefetch())
    assert policy.fetch(offer(20, available=17)) == 17
    assert policy.fetch(offer(20, available=15)) is Refusal.MEMORY


def test_threshold_loads_from_the_cpu_only_and_from_ten_tokens_on() -> None:
    policy = bound(ThresholdPrefetch(load_min_tokens=40))
    assert policy.load(2, 5) == 0
    assert policy.load(3, 5) == 3


@pytest.mark.parametrize(("stop", "seconds"), [("best_effort", 0.0), ("wait_complete", inf), ("timeout", 1.0 + 0.25 * 2)])
def test_stop_rules_say_how_long_a_request_waits(stop: str, seconds: float) -> None:
    assert ThresholdPrefetch(stop=stop).wait_s(2_048) == seconds


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("min_tokens", 0, "min_tokens must be at least 1, not 0"),
        ("in_flight_fraction", 1.5, "in_flight_fraction must be above 0 and at most 1, not 1.5"),
        ("load_min_tokens", -1, "load_min_tokens must be 0 or more, not -1"),
        ("stop", "soon", "stop must be one of best_effort, wait_complete, timeout, not soon"),
        ("base_s", -1.0, "base_s and per_1024_tokens_s must be 0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThresholdPrefetch(**{setting: value})
