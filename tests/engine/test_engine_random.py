"""Any requests on tiers of a few pages: all end, nothing leaks, bytes add up, and the cache is right after every transfer.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.cost_aware import CostAware
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.policies.prefetch.base import STOP_RULES
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from tests.engine.small import HARDWARE, PAGE_BYTES, Ask, SmallEngine, ask, bytes_moved, same_outcome, small_engine

RUNS = int(os.environ.get("KVSIM_ENGINE_RUNS", 100))
SETTINGS = settings(max_examples=RUNS)

PLACEMENTS = st.sampled_from(
    [
        WriteThrough,
        WriteThroughSelective,
        WriteBack,
        Exclusive,
        partial(WriteBack, watermark=0.5),
        partial(StoreThreshold, k=2, tracker_pages=9),
        partial(ByLength, min_tokens=9, disk_min_tokens=14),
        partial(CostAware, margin=0.1),
    ]
)
WORDS = st.text("ab", max_size=6) | st.sampled_from(["aaaaaa", "aaabbb", "abab"])
SPEEDS = st.sampled_from([0.1, 1.0, 10.0])
RATES = [name for name in HARDWARE if name.startswith(("host_", "device_", "disk_")) and name.endswith("per_s")]


@st.composite
def asks(draw: st.DrawFn) -> list[Ask]:
    """A few requests to a few hundred tokens, some of which wait for one before them."""
    some, at = [], 0.0
    for index in range(draw(st.integers(1, 24))):
        at += draw(st.sampled_from([0.0, 0.0, 0.5, 3.0, 20.0, 100.0]))
        after = draw(st.integers(-1, index - 1)) if draw(st.integers(0, 3)) == 0 else -1
        word, tokens = draw(WORDS), draw(st.integers(0, 6))
        tokens = max(tokens, not word)
        output = draw(st.sampled_from([0, 1, 2, 5, 9, 15]))
        some.append(ask(word, at, tokens=tokens, output=output, after=after, delay_s=draw(st.sampled_from([0.0, 2.0]))))
    return some


@st.composite
def engines(draw: st.DrawFn) -> Callable[[], SmallEngine]:
    """Makes the same small engine again and again."""
    tiers = draw(st.integers(1, 3))
    gpu, cpu, disk = draw(st.integers(1, 14)), draw(st.integers(1, 10)), draw(st.integers(1, 12))
    placement = [draw(PLACEMENTS), draw(PLACEMENTS)]
    kind = draw(st.sampled_from([NoPrefetch, ThresholdPrefetch, AdaptivePrefetch]))
    prefetching: dict[str, Any] = {}
    if kind is not NoPrefetch:
        prefetching = {
            "min_tokens": 1,
            "in_flight_fraction": draw(st.sampled_from([0.5, 1.0])),
            "stop": draw(st.sampled_from(STOP_RULES)),
        }
        prefetching |= {"base_s": draw(st.sampled_from([0.0, 3.0])), "load_min_tokens": draw(st.sampled_from([0, 8]))}
    hardware = {name: HARDWARE[name] * draw(SPEEDS) for name in RATES}
    fastest = max(hardware["host_to_device_bytes_per_s"], hardware["device_to_host_bytes_per_s"])
    hardware |= {"both_directions_bytes_per_s": 1.2 * fastest, "host_latency_s": draw(st.sampled_from([0.0, 0.3]))}
    engine_settings = {
        "max_batch_tokens": draw(st.sampled_from([3, 10, 1000])),
        "max_running_requests": draw(st.sampled_from([1, 3, 100])),
        "overlap": draw(st.sampled_from(["none", "layerwise"])),
        "links": draw(st.sampled_from(["fifo", "shared"])),
    }
    recompute = draw(st.booleans())

    def make() -> SmallEngine:
        return small_engine(
            gpu=gpu,
            cpu=cpu if tiers > 1 else 0,
            disk=disk if tiers > 2 else 0,
            placement=placement,
            prefetch=kind(**prefetching),
            recompute_last_token=recompute,
            hardware=hardware,
            **engine_settings,  # type: ignore[arg-type]
        )

    return make


@SETTINGS
@given(make=engines(), asks=asks())
def test_every_request_ends_and_nothing_is_left_of_it(make: Callable[[], SmallEngine], asks: list[Ask]) -> None:
    engine = make()
    outcome = engine.serve(*asks)
    event(f"retractions: {outcome.retractions > 0}")
    event(f"revived: {outcome.placement['revived_pages'] > 0}")
    event(f"prefetched: {outcome.prefetch['used_pages'] > 0}")
    check_rows(outcome, engine)
    check_links(outcome, engine)


def check_rows(outcome: Outcome, engine: SmallEngine) -> None:
    """Those that fit have finished, and their times and hits can be."""
    page_tokens, recomputes = engine.cache.page_tokens, engine.cache.rules.recompute_last_token
    for request in outcome.requests:
        index = request.index
        fits = -(-(request.prompt_tokens + request.output_tokens) // page_tokens) <= engine.cache.gpu.pool.capacity
        assert (outcome.status[index] == FINISHED) == fits
        most = (request.prompt_tokens - recomputes) // page_tokens
        assert 0 <= outcome.hit_pages[index].sum() <= min(most, request.prompt_pages) * fits
        assert (outcome.hit_pages[index] >= 0).all()
        if fits:
            computed = max(1, request.prompt_tokens - int(outcome.hit_pages[index].sum()) * page_tokens)
            assert outcome.retractions or outcome.ttft_s[index] >= computed - 1e-6
            assert (outcome.phases_s[index] >= 0).all()
            assert abs(outcome.phases_s[index].sum() - outcome.ttft_s[index]) < 1e-6
            assert outcome.retractions or outcome.phases_s[index, 2] >= computed - 1e-6, "a load counts as computing"
            assert outcome.e2e_s[index] >= outcome.ttft_s[index] + max(0, request.output_tokens - 1) - 1e-6
        if request.after >= 0 and outcome.status[request.after] == FINISHED:
            before = outcome.arrival_s[request.after] + outcome.e2e_s[request.after]
            assert abs(outcome.arrival_s[index] - (before + request.delay_s)) < 1e-6


def check_links(outcome: Outcome, engine: SmallEngine) -> None:
    """What the links carried is what the cache counted; only a prefetch that was cut short brings parts of pages."""
    moved, counted = bytes_moved(outcome), outcome.placement
    assert moved["written"] == counted["written_pages"] * PAGE_BYTES
    assert moved["loaded"] == counted["loaded_pages"] * PAGE_BYTES
    assert moved["fetched"] >= counted["fetched_pages"] * PAGE_BYTES
    if engine.prefetching.policy.wait_s(0) == float("inf"):
        assert moved["fetched"] == counted["fetched_pages"] * PAGE_BYTES
    if "disk-cpu" in outcome.links:
        partial = outcome.links["disk-cpu"].transfers * PAGE_BYTES
        assert moved["fetched"] < counted["fetched_pages"] * PAGE_BYTES + max(1, partial)
    assert outcome.hit_pages[:, 1:].sum() <= counted["loaded_pages"]
    prefetch = outcome.prefetch
    assert prefetch["used_pages"] + prefetch["wasted_pages"] == prefetch["fetched_pages"] <= counted["fetched_pages"]
    for link in outcome.links.values():
        assert link.busy_s >= 0 and link.intervals[:, 2].sum() >= link.bytes - link.transfers


@SETTINGS
@given(make=engines(), asks=asks())
def test_the_cache_is_right_after_every_transfer(make: Callable[[], SmallEngine], asks: list[Ask]) -> None:
    engine = make()
    engine.is_checked = True
    engine.serve(*asks)


@settings(SETTINGS, max_examples=max(1, RUNS // 5))
@given(make=engines(), asks=asks())
def test_the_same_run_twice_has_the_same_outcome(make: Callable[[], SmallEngine], asks: list[Ask]) -> None:
    assert same_outcome(make().serve(*asks), make().serve(*asks))
