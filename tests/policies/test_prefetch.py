"""Prefetch policies: how much is read ahead, what is loaded, how long a request waits."""

from math import inf
from typing import Any

import pytest

from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.policies.context import PolicyContext
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.policies.prefetch.base import Offer, Refusal
from kvsim.policies.prefetch.break_even import BreakEvenPrefetch
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from tests.engine.small import HARDWARE, MODEL
from tests.engine.small import PAGE_TOKENS as SMALL_PAGE
from tests.workloads import make_request

ANY = make_request(range(4), prompt_tokens=64)


def bound(policy: Any) -> Any:
    """The policy for pages of 16 tokens and a CPU tier of 100 pages."""
    policy.bind(PolicyContext(tier=1, capacity_pages=100, page_tokens=16))
    return policy


def offer(
    stored: int, *, in_flight: int = 0, available: int = 100, queued_s: float = 0.0, first: int = 0, prompt_tokens: int = 4_096
) -> Offer:
    return Offer(
        request=make_request([], prompt_tokens=prompt_tokens),
        first_page=first,
        stored_pages=stored,
        in_flight_pages=in_flight,
        available_pages=available,
        queued_s=queued_s,
    )


def test_none_reads_nothing_ahead_and_loads_everything() -> None:
    assert bound(NoPrefetch()).fetch(offer(50)) == 0
    assert NoPrefetch().load(ANY, 1, 3, 4) == 7
    assert NoPrefetch().wait_s(1_000) == inf


def test_threshold_fetches_from_256_tokens_on() -> None:
    policy = bound(ThresholdPrefetch())
    assert policy.fetch(offer(15)) is Refusal.THRESHOLD
    assert policy.fetch(offer(16)) == 16


@pytest.mark.parametrize("kind", [ThresholdPrefetch, AdaptivePrefetch])
def test_nothing_is_fetched_while_half_of_the_cpu_tier_is_in_flight_already(kind: Any) -> None:
    policy = bound(kind())
    assert policy.fetch(offer(90, in_flight=0)) == 90
    assert policy.fetch(offer(20, in_flight=49)) == 20
    assert policy.fetch(offer(20, in_flight=50)) is Refusal.RATE_LIMIT


def test_threshold_wants_room_for_all_of_it() -> None:
    assert bound(ThresholdPrefetch()).fetch(offer(20, available=19)) is Refusal.MEMORY


def test_adaptive_takes_what_fits_if_that_is_enough() -> None:
    policy = bound(AdaptivePrefetch())
    assert policy.fetch(offer(20, available=17)) == 17
    assert policy.fetch(offer(20, available=15)) is Refusal.MEMORY


def test_threshold_loads_from_the_cpu_only_and_from_ten_tokens_on() -> None:
    policy = bound(ThresholdPrefetch(load_min_tokens=40))
    assert policy.load(ANY, 0, 2, 5) == 0
    assert policy.load(ANY, 0, 3, 5) == 3


def test_short_prompts_neither_fetch_nor_load_below_their_bounds() -> None:
    policy = bound(ThresholdPrefetch(min_prompt_tokens=2_048, load_min_prompt_tokens=256))
    assert policy.fetch(offer(50, prompt_tokens=2_047)) is Refusal.THRESHOLD
    assert policy.fetch(offer(50, prompt_tokens=2_048)) == 50
    assert policy.load(make_request([], prompt_tokens=255), 0, 9, 0) == 0
    assert policy.load(make_request([], prompt_tokens=256), 0, 9, 0) == 9


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
        ("base_s", -1.0, "base_s must be 0 or more, not -1.0"),
        ("per_1024_tokens_s", -1.0, "per_1024_tokens_s must be 0 or more, not -1.0"),
        ("min_prompt_tokens", -1, "min_prompt_tokens must be 0 or more, not -1"),
        ("load_min_prompt_tokens", -1, "load_min_prompt_tokens must be 0 or more, not -1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThresholdPrefetch(**{setting: value})


def break_even(*, margin: float = 1.0, **changes: float) -> BreakEvenPrefetch:
    """The policy where a page takes 4 s to compute, 2 s to read from disk and 1 s to load."""
    policy = BreakEvenPrefetch(margin=margin)
    hardware = HardwareSpec(**(HARDWARE | changes))
    policy.bind(PolicyContext(tier=1, capacity_pages=100, page_tokens=SMALL_PAGE, model=MODEL, hardware=hardware))
    return policy


def test_break_even_fetches_what_is_read_and_loaded_sooner_than_computed() -> None:
    assert break_even().fetch(offer(5)) == 5
    assert break_even(margin=4 / 3 - 0.01).fetch(offer(5)) == 5
    assert break_even(margin=4 / 3 + 0.01).fetch(offer(5)) is Refusal.THRESHOLD


def test_break_even_counts_what_the_disk_has_to_read_before() -> None:
    assert break_even().fetch(offer(5, queued_s=4.9)) == 5
    assert break_even().fetch(offer(5, queued_s=5.1)) is Refusal.THRESHOLD


def test_break_even_fetches_longer_continuations_only_where_reading_takes_a_fixed_time() -> None:
    slow = {"disk_latency_s": 2.5, "host_latency_s": 1.0}
    assert break_even(**slow).fetch(offer(3)) is Refusal.THRESHOLD
    assert break_even(**slow).fetch(offer(4)) == 4


def test_break_even_takes_what_fits_if_that_pays() -> None:
    slow = {"disk_latency_s": 2.5, "host_latency_s": 1.0}
    assert break_even(**slow).fetch(offer(9, available=4)) == 4
    assert break_even(**slow).fetch(offer(9, available=3)) is Refusal.MEMORY
    assert break_even().fetch(offer(9, available=0)) is Refusal.MEMORY
    assert break_even(**slow).fetch(offer(3, available=2)) is Refusal.THRESHOLD


def test_break_even_sees_that_attention_makes_late_pages_dear() -> None:
    model = ModelSpec(layers=1, hidden_size=1, vocabulary=1, heads=1, kv_heads=1, head_dim=1, mlp_width=1)
    policy = BreakEvenPrefetch()
    # A page of 4 tokens after s others takes 4 * 14 FLOPs of matrices and 4 * (4 s + 10) of attention, and has 16 bytes.
    assert model.prefill_flops(4, 7) == 4 * 14 + 4 * (4 * 7 + 10)
    rates = {"flops_per_s": 1.0, "disk_read_bytes_per_s": 16 / 150, "host_to_device_bytes_per_s": 1e30}
    hardware = HardwareSpec(**(HARDWARE | rates | {"both_directions_bytes_per_s": 2e30}))
    policy.bind(PolicyContext(tier=1, capacity_pages=100, page_tokens=4, model=model, hardware=hardware))
    assert policy.fetch(offer(1, first=0)) is Refusal.THRESHOLD  # 96 s of computing against 150 s of reading
    assert policy.fetch(offer(1, first=1)) == 1  # 160 s


def test_break_even_loads_what_saves_most_time() -> None:
    assert break_even().load(ANY, 0, 2, 3) == 5
    assert break_even(disk_read_bytes_per_s=64 / 4).load(ANY, 0, 2, 3) == 2
    assert break_even(host_latency_s=20.0).load(ANY, 0, 2, 0) == 0
    assert break_even().load(ANY, 0, 0, 3) == 3


def test_break_even_refuses_a_margin_out_of_range() -> None:
    with pytest.raises(ValueError, match="margin must be above 0, not 0"):
        BreakEvenPrefetch(margin=0.0)
