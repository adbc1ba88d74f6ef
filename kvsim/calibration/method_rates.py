"""Derives the rule that chooses a copy method by fragment size, from measured rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsim.hardware.copy_rule import CopyRule, Method
from kvsim.substrate.hardware.memory.tier_copy import Way

STAGED_SUFFICES = 0.75
"""Staging is preferred to a kernel that accesses the bus if it reaches at least this share of the kernel's rate. Beside copies of
pages, products took 1.1 to 1.65 times as long where the kernel copied, and 1.06 times at most where copies were staged, at nearly
the same rate (experiments/hardware/copies.md on an H200, copy_variants.md on an H100)."""
MEMCPY_SUFFICES = 0.75
"""memcpy, which uses no multiprocessors, is preferred if it reaches at least this share of the best rate. During
prefill a kernel waits for products of large matrices to end: on an H200 staged loads of 100 to 500 MB then ran at 1 to 5 GB/s."""
ENOUGH = 0.99
"""A number of programs suffices if it reaches at least this share of the best rate."""

Rates = Mapping[tuple[Way, Method, int], float]
"""Rates by direction, method and fragment size, in any unit."""


@dataclass(frozen=True)
class Pair:
    """Copies in both directions at once, with the storing kernel throttled to ``pace_bytes_per_s``.

    ``rate`` is the total of both directions, in any unit.
    """

    fragment_bytes: int
    load: Method
    pace_bytes_per_s: float
    rate: float


def derived_rule(alone: Rates, pairs: Sequence[Pair], *, layers: int, programs: int = 4) -> CopyRule:
    """Derive the rule from the rates of long copies of pages of ``layers`` fragments: use copy engines where they suffice.

    ``pairs`` must contain loads by ``kernel`` and ``staged`` for the same fragment sizes.
    """
    sizes = sorted({size for _, _, size in alone}, reverse=True)

    def good_from(method: Method, others: Sequence[Method], ways: Sequence[Way], share: float) -> int:
        """Return the smallest fragment size from which on the method reaches this share; above the largest if it never does."""
        least = 2 * sizes[0]
        for size in sizes:
            if any(alone[way, method, size] < share * max(alone[way, other, size] for other in others) for way in ways):
                break
            least = size
        return least

    best: dict[tuple[Method, int], Pair] = {}
    for pair in pairs:
        key = pair.load, pair.fragment_bytes
        if key not in best or pair.rate > best[key].rate:
            best[key] = pair
    tried = sorted({pair.fragment_bytes for pair in pairs})
    suffices = [size for size in tried if best["staged", size].rate >= STAGED_SUFFICES * best["kernel", size].rate]
    staged_beside = min(suffices, default=2 * tried[-1])
    fastest = max(best.values(), key=lambda pair: (pair.load == "staged", pair.rate))
    return CopyRule(
        programs=programs,
        memcpy_fragment_bytes=good_from("memcpy", ("kernel", "staged", "memcpy"), ("load", "store"), MEMCPY_SUFFICES),
        staged_load_page_bytes=layers * good_from("staged", ("kernel",), ("load",), STAGED_SUFFICES),
        staged_store_page_bytes=layers * good_from("staged", ("kernel",), ("store",), STAGED_SUFFICES),
        staged_load_beside_store_page_bytes=layers * staged_beside,
        store_beside_load_bytes_per_s=fastest.pace_bytes_per_s,
    )


def fewest_programs(rates: Mapping[int, float]) -> int:
    """Return the smallest number of programs whose rate is close to the best; ``rates`` is by number of programs."""
    return min(programs for programs, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
