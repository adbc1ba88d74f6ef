"""What the random tests of engines draw: requests, policies and machines. KVSIM_ENGINE_RUNS=5000 makes as many runs."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

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
from tests.engine.small import HARDWARE, PAGE_BYTES, Ask, ask

RUNS = int(os.environ.get("KVSIM_ENGINE_RUNS", 40))
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
def machines(draw: st.DrawFn) -> dict[str, Any]:
    """Rates of links and disks."""
    hardware = {name: HARDWARE[name] * draw(SPEEDS) for name in RATES}
    fastest = max(hardware["host_to_device_bytes_per_s"], hardware["device_to_host_bytes_per_s"])
    hardware |= {"both_directions_bytes_per_s": 1.2 * fastest, "host_latency_s": draw(st.sampled_from([0.0, 0.3]))}
    hardware["interconnect_bytes_per_s"] = PAGE_BYTES * draw(SPEEDS)
    hardware["interconnect_latency_s"] = draw(st.sampled_from([0.0, 0.3]))
    hardware["host_memory_bytes_per_s"] = draw(st.sampled_from([None, fastest]))
    return hardware


@st.composite
def prefetches(draw: st.DrawFn) -> Callable[[], Any]:
    """Makes a prefetch policy."""
    kind = draw(st.sampled_from([NoPrefetch, ThresholdPrefetch, AdaptivePrefetch]))
    if kind is NoPrefetch:
        return NoPrefetch
    return partial(
        kind,
        min_tokens=1,
        in_flight_fraction=draw(st.sampled_from([0.5, 1.0])),
        stop=draw(st.sampled_from(STOP_RULES)),
        base_s=draw(st.sampled_from([0.0, 3.0])),
        load_min_tokens=draw(st.sampled_from([0, 8])),
    )
