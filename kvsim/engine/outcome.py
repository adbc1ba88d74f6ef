"""The result of a run, for its report: one row per request, and the counts of tiers, links and policies."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.serving import HybridServingCache, ServedCache

if TYPE_CHECKING:
    from kvsim.core.serving import ServingCache
    from kvsim.engine.event_log import EventLog
    from kvsim.engine.recorder import Recorder

FINISHED, REJECTED = 0, 1


@dataclass(slots=True, kw_only=True)
class LinkUse:
    """Traffic on one link. ``intervals`` has one row (start_s, end_s, bytes) per transfer, in order of start."""

    bytes: int = 0
    transfers: int = 0
    busy_s: float = 0.0
    intervals: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))


@dataclass(slots=True, kw_only=True)
class Disagreement:
    """Pages that some tensor-parallel rank had at the end of a transfer and some other had not, so that nobody can use them.

    ``pages`` sums, over the transfers of which this is true (``transfers``), the difference between the rank with the most and
    the one with the fewest.
    """

    pages: int = 0
    transfers: int = 0


@dataclass(slots=True, kw_only=True)
class TierUse:
    """Use of one tier, in pages: capacity (None if unlimited), peak in use, evicted and inserted."""

    capacity_pages: int | None
    peak_pages: int
    evicted_pages: int
    inserted_pages: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of one run over ``requests``; arrays have one entry per request, in trace order.

    ``hit_pages`` has the columns gpu, cpu, disk; a rejected request has no hits. Times are nan if the run has no clock
    (replay) or the request was rejected. ``ttft_s`` and ``e2e_s`` count from the arrival; ``tpot_s`` is the mean time per
    output token after the first (nan for answers of one token). Of a request with several samples, ``ttft_s`` is that of the
    first, ``tpot_s`` that of the one that ends last, and ``e2e_s`` counts until all have ended.
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
    load_s: np.ndarray | None = None
    """Seconds in which the request's reads from below were under way, columns cpu and disk; None if the run has no clock. See
    ``ReadTimes``."""
    known_pages: np.ndarray | None = None
    """Pages whose KV was cached when the request was admitted, 0 if rejected; None for models without recurrent layers."""
    retractions: int = 0
    request_retractions: np.ndarray | None = None
    """Retractions of each request; None if the run has no clock."""
    lost_to_disagreement: Disagreement = field(default_factory=Disagreement)
    simulated_s: float = 0.0
    wall_s: float = 0.0
    hardware: dict[str, Any] = field(default_factory=dict)
    """Findings of a run on real memory; see ``Substrate.findings``."""
    timeline: "Recorder | None" = None
    """The timeline of the run, if one was recorded."""
    events: "EventLog | None" = None
    """The event log of the run, if one was written."""


def describe_cache(cache: "ServedCache | ServingCache", requests: list[Request]) -> dict[str, Any]:
    """Return the fields of an outcome that come from the cache, after a run over these requests."""
    tiers = {
        tier.name: TierUse(
            capacity_pages=None if tier.pool.capacity >= UNLIMITED else tier.pool.capacity,
            peak_pages=tier.pool.peak_pages,
            evicted_pages=tier.evicted_pages,
            inserted_pages=tier.inserted_pages,
        )
        for tier in cache.tiers
    }
    known, checkpoints = None, {}
    if isinstance(cache, (ServedCache, HybridServingCache)):
        known, checkpoints = cache.pages_known(), cache.describe_checkpoints()
    return {
        "tiers": tiers,
        "placement": asdict(cache.counts),
        "checkpoints": checkpoints,
        "known_pages": None if known is None else np.array([known.get(r.index, 0) for r in requests], dtype=np.int64),
    }
