"""Which method copies pages fastest, by the size of their fragments: measured, and made a rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvsim.copy_rule import CopyRule, Method
from kvsim.substrate.hardware.tier_copy import Way

STORE_PACE = 0.945
"""Share of memcpy's rate at which a kernel that stores is held: just below what it reaches, so that no queue builds up."""
KEEPS_UP = 0.98
"""Share of the fastest method's rate from which on staging is preferred to a kernel that reaches over the bus."""
WITHOUT_KERNELS = 0.75
"""The same for memcpy, which takes no multiprocessor. Beside prefill a kernel waits until a product of large matrices has ended:
on an H200 staged loads of 100 to 500 MB then went at 1 to 5 GB/s."""
ENOUGH = 0.99
"""Share of the best rate that so many programs must reach."""

Rates = Mapping[tuple[Way, Method, int], float]
"""By direction, method and fragment size; in any unit."""


@dataclass(frozen=True)
class Pair:
    """Both directions at once; the kernel that stores is held to ``pace_bytes_per_s``. ``rate`` is the sum, in any unit."""

    fragment_bytes: int
    load: Method
    pace_bytes_per_s: float
    rate: float


def derived_rule(alone: Rates, pairs: Sequence[Pair], *, layers: int, store_bytes_per_s: float, programs: int = 4) -> CopyRule:
    """The launcher's rule, from long copies of pages of ``layers`` fragments: copy engines as soon as they keep up.

    ``pairs`` have loads by ``kernel`` and ``staged`` for the same fragments. ``store_bytes_per_s`` is a plain copy's rate.
    """
    sizes = sorted({size for _, _, size in alone}, reverse=True)

    def good_from(method: Method, others: Sequence[Method], ways: Sequence[Way], share: float = KEEPS_UP) -> int:
        """The least fragment from which on the method reaches this share; beyond the largest if it never does."""
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
    staged_beside = next((size for size in tried if best["staged", size].rate >= best["kernel", size].rate), 2 * tried[-1])
    fastest = max(best.values(), key=lambda pair: (pair.load == "staged", pair.rate))
    return CopyRule(
        programs=programs,
        memcpy_fragment_bytes=good_from("memcpy", ("kernel", "staged", "memcpy"), ("load", "store"), WITHOUT_KERNELS),
        staged_load_page_bytes=layers * good_from("staged", ("kernel",), ("load",)),
        staged_store_page_bytes=layers * good_from("staged", ("kernel",), ("store",)),
        staged_load_beside_store_page_bytes=layers * staged_beside,
        store_bytes_per_s=STORE_PACE * store_bytes_per_s,
        store_beside_load_bytes_per_s=fastest.pace_bytes_per_s,
    )


def paced(rule: CopyRule, bytes_per_s: float) -> CopyRule:
    """The same rule with stores held to a rate, whatever runs beside them."""
    return replace(rule, store_bytes_per_s=bytes_per_s, store_beside_load_bytes_per_s=bytes_per_s)


def fewest_programs(rates: Mapping[int, float]) -> int:
    """The fewest programs that are about as fast as any number of them, by their rates."""
    return min(programs for programs, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
