"""What a run hands to its report: one row a request, and what tiers, links and policies counted."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.hybrid import HybridCache
from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request

if TYPE_CHECKING:
    from kvsim.core.serving import ServedCache, ServingCache
    from kvsim.engine.recorder import Recorder

FINISHED, REJECTED = 0, 1


@dataclass(slots=True, kw_only=True)
class LinkUse:
    """Traffic of one link. ``intervals`` has a row (start_s, end_s, bytes) for each transfer, in order of start."""

    bytes: int = 0
    transfers: int = 0
    busy_s: float = 0.0
    intervals: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))


@dataclass(slots=True, kw_only=True)
class TierUse:
    """Pages of one tier: its capacity (None: unlimited), the most that were in use, and what went in and out."""

    capacity_pages: int | None
    peak_pages: int
    evicted_pages: int
    inserted_pages: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One run over ``requests``; arrays have one entry a request, in the order of the trace.

    ``hit_pages`` has the columns gpu, cpu, disk; a rejected request has none. Times are nan where a run has no clock
    (replay) or the request was rejected: ``ttft_s`` and ``e2e_s`` count from the arrival, ``tpot_s`` is the mean time
    per output token after the first (nan for answers of one token).
    """

    requests: list[Request]
    page_tokens: int
    status: np.ndarray
    hit_pages: np.ndarray
    arrival_s: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2e_s: np.ndarray
    tiers: dict[str, TierUse]
    links: dict[str, LinkUse]
    prefetch: dict[str, int]
    placement: dict[str, int]
    checkpoints: dict[str, int]
    known_pages: np.ndarray | None = None
    """Pages whose KV was there when the request was admitted, 0 if it was rejected; None for models without recurrent layers."""
    retractions: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    hardware: dict[str, Any] = field(default_factory=dict)
    """What a run on real memory has found out: see ``Substrate.findings``."""
    timeline: "Recorder | None" = None
    """What happened when, if that was recorded."""


def describe_cache(cache: "ServedCache | ServingCache", requests: list[Request]) -> dict[str, Any]:
    """The fields of an outcome that the cache knows, after a run over these requests."""
    tiers = {
        tier.name: TierUse(
            capacity_pages=None if tier.pool.capacity >= UNLIMITED else tier.pool.capacity,
            peak_pages=tier.pool.peak_pages,
            evicted_pages=tier.evicted_pages,
            inserted_pages=tier.inserted_pages,
        )
        for tier in cache.tiers
    }
    known = cache.known_pages if isinstance(cache, HybridCache) else None
    return {
        "tiers": tiers,
        "placement": asdict(cache.counts),
        "checkpoints": cache.describe_checkpoints() if isinstance(cache, HybridCache) else {},
        "known_pages": None if known is None else np.array([known.get(r.index, 0) for r in requests], dtype=np.int64),
    }
