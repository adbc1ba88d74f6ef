"""What a shadow has to say at one moment."""

from collections.abc import Mapping
from typing import NamedTuple


class Share(NamedTuple):
    """Events of one kind in one medium: how many the engine sent, and how many of those were predicted."""

    matched: int = 0
    missed: int = 0
    """Sent by the engine, but not predicted."""
    extra: int = 0
    """Predicted, but not sent."""

    @property
    def share(self) -> float | None:
        """Predicted events per event of the engine; None before the first."""
        sent = self.matched + self.missed
        return self.matched / sent if sent else None


class ScoreView(NamedTuple):
    """How many blocks of an engine's events the preset has predicted, by medium."""

    stored: Mapping[str, Share]
    removed: Mapping[str, Share]


class EngineView(NamedTuple):
    """What an engine's own events tell of it."""

    name: str
    rank: int | None = None
    """Its data-parallel rank; None if its events name none."""
    pages: Mapping[str, int] = {}
    """Blocks that it has, by medium; for a model with several groups of layers, by medium and group (``gpu, group 1``)."""
    stored: int = 0
    """Blocks in its BlockStored events, those stored again included."""
    removed: int = 0
    """Blocks in its BlockRemoved events."""
    cleared: int = 0
    """AllBlocksCleared events."""
    unknown_parents: int = 0
    """BlockStored events whose parent is not known."""
    unknown_removed: int = 0
    """Blocks removed that were not known."""
    gaps: int = 0
    lost_batches: int = 0
    """Batches of events that were lost in these gaps."""
    known: bool = False
    """Whether the tree is all that the engine has."""
    requests: int = 0
    """Requests of which it said how much it had cached, or of which its events tell that."""
    hit_rate: float | None = None
    """Cached tokens per prompt token of those; None if there are none."""
    score: ScoreView | None = None


class GhostView(NamedTuple):
    """How a ghost cache fares."""

    name: str
    differs: str
    """Its settings that differ from the first ghost's, as overrides; empty for the first."""
    requests: int
    """Requests that it has served."""
    rejected: int
    """Requests that it could not hold even alone."""
    hit_rate: float | None
    """Hit tokens per prompt token of the requests served; None before the first."""
    hit_rate_by_tier: Mapping[str, float]
    """The same, by the tier that the hit pages came from."""
    points: float | None
    """Percentage points above the first ghost's hit rate."""
    recent_hit_rate: float | None
    """Over the last requests only."""
    recent_requests: int
    checked_requests: int
    """Requests of which the engine said how much it had cached."""
    alike_requests: int
    """Those of them in which this ghost has cached exactly as many tokens."""
    engine_points: float | None
    """Percentage points above the engine's own hit rate, over the checked requests; None if there are none."""
    occupancy: Mapping[str, tuple[int, int | None]]
    """By tier, over all engines: the pages that are taken, and the capacity; None for one that is unlimited."""
    emptied: int
    """How often it was emptied because memory was short."""
    problem: str
    """Why it has stopped; empty while it runs."""


class Snapshot(NamedTuple):
    """Everything that a shadow shows."""

    at_s: float
    """When the last event or request came, by the sources' clock."""
    events: int
    """Events received."""
    requests: int
    """Requests served by the ghosts."""
    skipped: int
    """Requests that were left out, because something about them was wrong or no engine was free."""
    late: int
    """Requests that arrived, by their time, before one that had been served; they were served all the same."""
    gaps: int
    memory_bytes: int
    forgotten_pages: int
    """Page ids that nothing referred to any more and that were forgotten."""
    engines: tuple[EngineView, ...]
    ghosts: tuple[GhostView, ...]
    notes: tuple[str, ...]
    """What makes the numbers worth less than they seem, one line each."""
