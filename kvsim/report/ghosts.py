"""What no cache can exceed, beside the hits of a run: Belady's bound and an unlimited cache."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvsim.results.rates import percent
from kvsim.results.result import RunRecord

Bounds = Mapping[str, Mapping[str, Any]]
"""What is recorded of each bound, such as its ``hit_rate``, by kind."""
NO_BOUNDS: Bounds = MappingProxyType({})
NAMES = {"belady": "Belady's bound", "unlimited": "unlimited cache"}
MOST = (
    "the most page hits that any policies can get on this trace with one tier as large as all tiers, free moves, no pages "
    "occupied by running requests, and requests in trace order"
)
BOTH = "Both reject requests larger than the GPU tier; rates cover the requests served."
MEANING = f"belady: {MOST}. unlimited: nothing is ever evicted. {BOTH}"
"""What the rows of tables mean."""
ELSEWHERE = "Its bounds, Belady's and an unlimited cache, are on the page that kvsim report makes of it."


class Ghost(NamedTuple):
    """A bar below that of the hits."""

    kind: str
    name: str
    share: str
    """Its length, and its hit rate as text."""


def ghosts(bounds: Bounds) -> list[Ghost]:
    """Return the bars of those bounds that have a hit rate."""
    rates = {kind: (bounds.get(kind) or {}).get("hit_rate") for kind in NAMES}
    return [Ghost(kind, NAMES[kind], percent(rate)) for kind, rate in rates.items() if rate is not None]


def bounds_note(result: RunRecord, bounds: Bounds) -> str:
    """Say what the bars mean or, of a run whose bounds exist and are not given, where they are; empty if there are none."""
    if ghosts(bounds):
        return f"Belady's bound: {MOST}. Unlimited cache: nothing is ever evicted. {BOTH}"
    return ELSEWHERE if result.get("bounds") and result["hit_rate"] is not None else ""


def share_of_belady(result: RunRecord, bounds: Bounds) -> float | None:
    """Return the hit rate of a run as a share of Belady's bound; None without one, or if it is 0."""
    rate = (bounds.get("belady") or {}).get("hit_rate")
    return result["hit_rate"] / rate if rate and result["hit_rate"] is not None else None
