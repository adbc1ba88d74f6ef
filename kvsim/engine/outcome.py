"""The result of a run, for its report: one row per request, and the counts of tiers, links and policies."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.core.serving import ServedCache, Server
from kvsim.core.tier import Tier
from kvsim.engine.link_use import LinkUse
from kvsim.engine.scaling import Scaling
from kvsim.hardware.tier_kinds import ALWAYS

if TYPE_CHECKING:
    from kvsim.engine.event_log import EventLog
    from kvsim.engine.recorder import Recorder

FINISHED, REJECTED, SHED = 0, 1, 2
"""What becomes of a request: it is answered; it could not run even alone; or the admission policy has refused it, or one that it
waits for."""
FEW_HITS = 0.001
"""Hits for each page written to a tier, below which the tier is looked at more closely."""
PHASES = ("queue", "load", "prefill")
"""What a request does until its first token; see ``Outcome.phases_s``."""


@dataclass(slots=True, kw_only=True)
class Disagreement:
    """Pages that some but not all tensor-parallel ranks had at the end of a transfer, so that no request can use them.

    ``pages`` sums, over the transfers with such pages (``transfers``), the difference between the rank with the most and
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
    held_pages: int | None = None
    """Of a tier below the GPU that gave next to no hits (``FEW_HITS``): the pages that it has at the end. None of other tiers,
    and of those of an engine's own cache."""
    own_pages: int | None = None
    """Those of them that no tier above it has."""


@dataclass(slots=True, kw_only=True)
class EngineUse:
    """What one engine of several has done; pages are those of its GPU tier."""

    engine: int
    host: int
    role: str
    """both, prefill or decode."""
    capacity_pages: int | None
    peak_pages: int
    evicted_pages: int
    inserted_pages: int
    busy_s: float
    """Time in steps."""
    waited_s: float
    """Sum of the times that requests were in its queue; of a decode engine, that they waited for its pages."""
    most_queued: int
    retractions: int
    failures: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of one run over ``requests``.

    ``columns`` has what was recorded of each request, by the rows of ``kvsim/engine/columns.py``: arrays in trace order, of a
    column by tier with one column per tier (``tier_names``). The properties are those that reports compute with. Times are nan
    if the run has no clock (replay) or the request was rejected or shed; such a request has no hits.
    """

    requests: Sequence[Request]
    page_tokens: int
    columns: dict[str, np.ndarray]
    tiers: dict[str, TierUse]
    links: dict[str, LinkUse]
    prefetch: dict[str, int]
    placement: dict[str, int]
    checkpoints: dict[str, int]
    known_pages: np.ndarray | None = None
    """Pages whose KV was cached when the request was admitted, 0 if rejected; None for models without recurrent layers."""
    link_lanes: list[LinkUse] = field(default_factory=list)
    """The links one by one; ``links`` sums those of the same name."""
    engines: list[EngineUse] = field(default_factory=list)
    """What each engine has done; empty for a single one."""
    outages: dict[int, list[list[float]]] = field(default_factory=dict)
    """[start, end] in seconds of each time that an engine was down, by its number; infinite end: it did not come back."""
    engines_busy_s: list[float] = field(default_factory=list)
    """Time in steps of each engine, in order of their numbers; empty without a clock."""
    engines_claiming_s: list[float] = field(default_factory=list)
    """Time in which requests that each engine had admitted waited for slots whose pages were being written down."""
    engines_exchange_s: list[float] = field(default_factory=list)
    """Time in which each engine's GPUs exchanged activations, on average over its stages; 0 if they are only tensor-parallel."""
    engines_stages_s: list[float] = field(default_factory=list)
    """Time in which each engine's stages were busy, on average; 0 with a single stage."""
    scaling: Scaling | None = None
    """The engines over time, if a policy starts and stops them."""
    has_admission: bool = False
    """Whether a policy could refuse requests."""
    retractions: int = 0
    drafts: dict[str, int] = field(default_factory=dict)
    """What drafts for answers have come to; empty without any (see ``Schedule.drafts``)."""
    adapter_use: dict[str, int] = field(default_factory=dict)
    """What LoRA adapters have come to; empty where they cost nothing (see ``Schedule.adapter_use``)."""
    tool_calls: dict[str, int] = field(default_factory=dict)
    """What pages have done during tool calls; empty unless the prefetch policy decides about it (see ``ToolCallCounts``)."""
    lost_to_disagreement: Disagreement = field(default_factory=Disagreement)
    simulated_s: float = 0.0
    wall_s: float = 0.0
    hardware: dict[str, Any] = field(default_factory=dict)
    """Findings of a run on real memory; see ``Substrate.findings``."""
    timeline: "Recorder | None" = None
    """The timeline of the run, if one was recorded."""
    events: "EventLog | None" = None
    """The event log of the run, if one was written."""

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The tiers that results list, from the top down: ``ALWAYS``, then the others of the run."""
        return tiers_listed(self.tiers)

    @property
    def status(self) -> np.ndarray:
        """FINISHED, REJECTED or SHED."""
        return self.columns["status"]

    @property
    def hit_pages(self) -> np.ndarray:
        """Hit pages, one column per tier."""
        return self.columns["hit_pages"]

    @property
    def arrival_s(self) -> np.ndarray:
        """Time of arrival; ``ttft_s`` and ``e2e_s`` count from it."""
        return self.columns["arrival_s"]

    @property
    def ttft_s(self) -> np.ndarray:
        """Time to first token; of several samples, that of the first."""
        return self.columns["ttft_s"]

    @property
    def tpot_s(self) -> np.ndarray:
        """Mean time per output token after the first, of the sample that ends last; nan for answers of one token."""
        return self.columns["tpot_s"]

    @property
    def e2e_s(self) -> np.ndarray:
        """Time until all samples have ended."""
        return self.columns["e2e_s"]

    @property
    def engine(self) -> np.ndarray:
        """Number of the engine that computed the prompt, -1 if rejected or shed, or without a clock."""
        return self.columns["engine"]

    @property
    def decoder(self) -> np.ndarray:
        """Number of the engine that decoded the answer, likewise."""
        return self.columns["decoder"]

    @property
    def phases_s(self) -> np.ndarray:
        """``ttft_s`` in parts that add up to it, columns as in ``PHASES``; nan where that is.

        queue    without pages: until its admission, which follows a prefetch and, where prefill and decode are apart, the pages
                 to decode on; then until its slots are free; and again after a retraction or a failure before the first token
        load     with pages, some of which were still being loaded: from the start of the first step that could not compute it
                 for that reason to that of the step that did; and what steps that computed it waited for layers to arrive, for
                 its own loads or those of another prompt in the step (see ``Work.stalled_s``)
        prefill  the rest: computing, also what was lost again; waiting for steps under way and for a share of the next ones;
                 and, where prefill and decode are apart, sending its KV to the engine that decodes
        """
        queue_s, load_s = self.columns["queue_s"], self.columns["load_s"]
        return np.column_stack((queue_s, load_s, np.maximum(0.0, self.ttft_s - (queue_s + load_s))))

    @property
    def is_disaggregated(self) -> bool:
        """Whether some engines compute prompts and others decode."""
        return bool(self.engines) and self.engines[-1].role == "decode"


def tier_names(tiers: Iterable[Tier]) -> tuple[str, ...]:
    """Return the names of the tiers that the results of a run with these tiers list; see ``Outcome.tier_names``."""
    return tiers_listed([tier.name for tier in sorted(tiers, key=lambda tier: tier.level)])


def tiers_listed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the tiers that results list where a run has these, from the top down: ``ALWAYS``, then the others, once each."""
    return (*ALWAYS, *[name for name in dict.fromkeys(names) if name not in ALWAYS])


def describe_caches(caches: Sequence[ServedCache | Server], requests: Sequence[Request], hit_pages: np.ndarray) -> dict[str, Any]:
    """Return the fields of an outcome that come from the caches, after a run over these requests. Tiers of a kind are summed.

    ``hit_pages`` are those of each request.
    """
    names = tier_names([tier for cache in caches for tier in cache.tiers])
    tiers: dict[str, TierUse] = {}
    for tier in [tier for cache in caches for tier in cache.tiers]:
        capacity = None if tier.pool.capacity >= UNLIMITED else tier.pool.capacity
        known = tiers.setdefault(tier.name, TierUse(capacity_pages=0, peak_pages=0, evicted_pages=0, inserted_pages=0))
        known.capacity_pages = None if capacity is None or known.capacity_pages is None else known.capacity_pages + capacity
        known.peak_pages += tier.pool.peak_pages
        known.evicted_pages += tier.evicted_pages
        known.inserted_pages += tier.inserted_pages
    note_held(tiers, names, hit_pages, lambda name: held_below(caches, name))
    known_pages, checkpoints = None, dict[str, int]()
    for cache in caches:
        checkpoints = summed([checkpoints, cache.describe_checkpoints()])
        if (known_there := cache.pages_known()) is not None:
            known_pages = np.zeros(len(requests), dtype=np.int64) if known_pages is None else known_pages
            known_pages += np.array([known_there.get(index, 0) for index in values_of(requests, "index")], dtype=np.int64)
    return {
        "tiers": dict(sorted(tiers.items(), key=lambda item: names.index(item[0]))),
        "placement": summed([by_name(cache.counts) for cache in caches]),
        "checkpoints": checkpoints,
        "known_pages": known_pages,
    }


def note_held(
    tiers: dict[str, TierUse], names: Sequence[str], hit_pages: np.ndarray, held: Callable[[str], tuple[int, int] | None]
) -> None:
    """Note what tiers with next to no hits hold, of the ``names`` that results list; ``held`` returns it like ``held_below``."""
    for name, hits in zip(names[1:], hit_pages.sum(axis=0)[1:].tolist(), strict=True):
        if name in tiers:
            few = hits <= FEW_HITS * tiers[name].inserted_pages
            tiers[name].held_pages, tiers[name].own_pages = (held(name) if few else None) or (None, None)


def held_below(caches: Sequence[ServedCache | Server], name: str) -> tuple[int, int] | None:
    """Return the pages that all tiers of a name have, and how many of them no tier above has; None if a cache does not know."""
    found = [held for cache in caches if (held := cache.held_pages(name)) is not None]
    return (sum([held for held, _ in found]), sum([own for _, own in found])) if len(found) == len(caches) else None


def by_name(counts: Any) -> dict[str, int]:
    """Return the fields of a dataclass of numbers; ``asdict`` copies each, which takes long with many engines."""
    return {name: getattr(counts, name) for name in counts.__dataclass_fields__}


def summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the sums of counts by name."""
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
