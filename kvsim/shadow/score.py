"""How well a preset predicts an engine: its events beside those of kvsim's own cache, given the same requests.

A block that the engine stores or removes is *matched* if kvsim's cache does the same with it in the same tier, at most
``within_s`` earlier or later. Blocks are the same if their chain keys are: the same tokens after the same tokens. Each event
matches one other, the first with the first, so a block that comes back and leaves again must do so twice. What the engine does
alone is *missed*, what kvsim does alone is *extra*. The score is matched / (matched + missed), of stored and of removed blocks,
by tier.

Reports of reused blocks are no events here, and neither is what a reset drops. The order of events within ``within_s`` does not
count.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvsim.core.tier import PageWatch, Tier
from kvsim.pages.extents import Extent
from kvsim.shadow.page_ids import LivePageIndex
from kvsim.shadow.snapshot import ScoreView, Share

STORED, REMOVED = "stored", "removed"
Place = tuple[str, str]
"""Stored or removed, and the tier."""


class Happened(NamedTuple):
    """A block that was stored or removed, by the engine or by kvsim's cache."""

    at_s: float
    kind: str
    tier: str
    key: bytes | None
    """None for a block that nobody knows."""


class Side:
    """The events of the engine, or of kvsim's cache, that wait for one of the other to match."""

    def __init__(self) -> None:
        self.now_s = float("-inf")
        self.unmatched: dict[Place, int] = {}
        """Events that nothing has matched in time, by kind and tier."""
        self.waiting: dict[Place, dict[bytes, list[float]]] = {}
        """When those happened that wait, by kind and tier, and by key."""
        self._in_order: deque[tuple[float, Place, list[bytes]]] = deque()
        """The same in the order of time, as they came together; some have been matched since."""
        self._ordered = 0

    def wait(self, place: Place, keys: list[bytes]) -> None:
        """Let events wait that happen now."""
        now_s, waiting = self.now_s, self.waiting.setdefault(place, {})
        for key in keys:
            waiting.setdefault(key, []).append(now_s)
        self._in_order.append((now_s, place, keys))
        self._ordered += len(keys)

    def give_up(self, before_s: float, *, are_counted: bool = True) -> None:
        """Let no event from before this time wait any more."""
        order = self._in_order
        while order:
            at_s, place, keys = order[0]
            waiting = self.waiting[place]
            if at_s >= before_s and any(key in waiting for key in keys):
                return
            order.popleft()
            self._ordered -= len(keys)
            given_up = [key for key in keys if key in waiting and take_first(waiting, key, at_s)]
            if are_counted and given_up:
                self.miss(place, len(given_up))

    def miss(self, place: Place, events: int) -> None:
        """Count events that nothing matches."""
        self.unmatched[place] = self.unmatched.get(place, 0) + events

    def __len__(self) -> int:
        return self._ordered


def take_first(waiting: dict[bytes, list[float]], key: bytes, at_s: float | None = None) -> bool:
    """Take the first event of a key that waits. With ``at_s``, do nothing and return False if it is of another time."""
    times_s = waiting[key]
    if at_s is not None and times_s[0] != at_s:
        return False
    if len(times_s) == 1:
        del waiting[key]
    else:
        del times_s[0]
    return True


Take = Callable[[str, str, Sequence[bytes | None]], None]
"""Takes what happens to blocks at a time: stored or removed, the tier, the keys."""


class Scorer(PageWatch):
    """Matches two streams of events while they come; as a watch of the tiers of kvsim's cache, it takes what that does.

    Each side's events come in the order of time, on one clock; one side may be behind the other.
    """

    def __init__(self, index: LivePageIndex, within_s: float, take: Take | None = None) -> None:
        """``take`` gets what kvsim's cache does, by default ``predicted`` at ``now_s``."""
        self.now_s = 0.0
        """The time of what kvsim's cache does; whoever drives that sets it."""
        self.is_paused = False
        """Whether what happens on either side is left out."""
        self.matched: dict[Place, int] = {}
        self._index = index
        self._within_s = within_s
        self._engine, self._own = Side(), Side()
        self._take = take or self._predict

    # --- kvsim's cache -------------------------------------------------------------------------------------------------------

    def stored(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self._did(STORED, tier, extents)

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self._did(REMOVED, tier, extents)

    def _did(self, kind: str, tier: Tier, extents: tuple[Extent, ...]) -> None:
        if self.is_paused:
            return
        index = self._index
        keys: list[bytes | None] = []
        for start, pages in extents:
            if tier.told_unit == 1:
                keys += index.keys_of(start, pages)
            else:
                for last in range(start, start + pages):
                    keys += index.keys_up_to(last, tier.told_unit)
        self._take(kind, tier.name, keys)

    def _predict(self, kind: str, tier: str, keys: Sequence[bytes | None]) -> None:
        self.predicted(self.now_s, kind, tier, keys)

    # --- both ----------------------------------------------------------------------------------------------------------------

    def predicted(self, at_s: float, kind: str, tier: str, keys: Sequence[bytes | None]) -> None:
        """Take what kvsim's cache does next with blocks."""
        self._compare(at_s, (kind, tier), keys, self._own, self._engine)

    def told(self, at_s: float, kind: str, tier: str, keys: Sequence[bytes | None]) -> None:
        """Take what the engine does next with blocks; None is one that nobody knows."""
        self._compare(at_s, (kind, tier), keys, self._engine, self._own)

    def _compare(self, at_s: float, place: Place, keys: Sequence[bytes | None], side: Side, other: Side) -> None:
        if self.is_paused or not keys:
            return
        side.now_s = max(side.now_s, at_s)
        other.give_up(side.now_s - self._within_s)
        theirs, alone, unknown = other.waiting.get(place, {}), list[bytes](), 0
        for key in keys:
            if key is None:
                unknown += 1
            elif key in theirs:
                take_first(theirs, key)
            else:
                alone.append(key)
        if matched := len(keys) - unknown - len(alone):
            self.matched[place] = self.matched.get(place, 0) + matched
        if alone:
            side.wait(place, alone)
        if unknown:
            side.miss(place, unknown)

    def restart(self) -> None:
        """Forget what waits, uncounted: both begin anew."""
        for side in (self._engine, self._own):
            side.give_up(float("inf"), are_counted=False)

    def finish(self) -> None:
        """Count all that waits as unmatched: nothing more will come."""
        for side in (self._engine, self._own):
            side.give_up(float("inf"))

    @property
    def waiting(self) -> int:
        """Events that may still be matched."""
        return len(self._engine) + len(self._own)

    def view(self) -> ScoreView:
        """Return the score so far."""
        missed, extra = self._engine.unmatched, self._own.unmatched
        places = sorted({*self.matched, *missed, *extra})

        def shares(kind: str) -> dict[str, Share]:
            return {
                place[1]: Share(self.matched.get(place, 0), missed.get(place, 0), extra.get(place, 0))
                for place in places
                if place[0] == kind
            }

        return ScoreView(stored=shares(STORED), removed=shares(REMOVED))


def scored(engine: Iterable[Happened], own: Iterable[Happened], within_s: float) -> ScoreView:
    """Return the score of two streams that are there as a whole."""
    scorer = Scorer(LivePageIndex(), within_s)
    both = [(event, scorer.told) for event in engine] + [(event, scorer.predicted) for event in own]
    for (at_s, kind, tier, key), take in sorted(both, key=lambda one: one[0].at_s):
        take(at_s, kind, tier, [key])
    scorer.finish()
    return scorer.view()
