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
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvsim.core.tier import PageWatch, Tier
from kvsim.pages.extents import Extent
from kvsim.shadow.page_ids import LivePageIndex
from kvsim.shadow.snapshot import ScoreView, Share

STORED, REMOVED = "stored", "removed"
Key = tuple[str, str, bytes]
"""Stored or removed, the tier, and the key of the block."""


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
        self.unmatched: dict[tuple[str, str], int] = {}
        """Events that nothing has matched in time, by kind and tier."""
        self._times_s: dict[Key, list[float]] = {}
        """When those happened that wait, by key."""
        self._in_order: deque[tuple[float, Key]] = deque()
        """The same in the order of time; some have been matched since."""

    def wait(self, at_s: float, key: Key) -> None:
        """Let an event wait; times do not go back."""
        self._times_s.setdefault(key, []).append(at_s)
        self._in_order.append((at_s, key))

    def match(self, key: Key) -> bool:
        """Take the first event of this key that waits. Returns False if none does."""
        times_s = self._times_s.get(key)
        if times_s is None:
            return False
        times_s.pop(0)
        if not times_s:
            del self._times_s[key]
        return True

    def give_up(self, before_s: float, *, are_counted: bool = True) -> None:
        """Let no event from before this time wait any more."""
        order, times_s = self._in_order, self._times_s
        while order and (order[0][0] < before_s or order[0][1] not in times_s):
            at_s, key = order.popleft()
            if key in times_s and times_s[key][0] == at_s:
                self.match(key)
                if are_counted:
                    self.miss(key[:2])

    def miss(self, place: tuple[str, str]) -> None:
        """Count an event that nothing matches."""
        self.unmatched[place] = self.unmatched.get(place, 0) + 1

    def __len__(self) -> int:
        return len(self._in_order)


class Scorer(PageWatch):
    """Matches two streams of events while they come; as a watch of the tiers of kvsim's cache, it takes what that does.

    Each side's events come in the order of time, on one clock; one side may be behind the other.
    """

    def __init__(self, index: LivePageIndex, within_s: float, take: Callable[[Happened], None] | None = None) -> None:
        """``take`` gets what kvsim's cache does, by default ``predicted``."""
        self.now_s = 0.0
        """The time of what kvsim's cache does; whoever drives that sets it."""
        self.is_paused = False
        """Whether what happens on either side is left out."""
        self.matched: dict[tuple[str, str], int] = {}
        self._index = index
        self._within_s = within_s
        self._engine, self._own = Side(), Side()
        self._take = take or self.predicted

    # --- kvsim's cache -------------------------------------------------------------------------------------------------------

    def stored(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self._did(STORED, tier, extents)

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self._did(REMOVED, tier, extents)

    def _did(self, kind: str, tier: Tier, extents: tuple[Extent, ...]) -> None:
        if self.is_paused:
            return
        for start, pages in extents:
            for last in range(start, start + pages):
                page = last
                for _ in range(tier.told_unit):
                    self._take(Happened(self.now_s, kind, tier.name, self._index.key_of(page)))
                    page = self._index.before(page)

    # --- both ----------------------------------------------------------------------------------------------------------------

    def predicted(self, event: Happened) -> None:
        """Take the next event of kvsim's cache."""
        self._compare(event, self._own, self._engine)

    def told(self, event: Happened) -> None:
        """Take the engine's next event."""
        self._compare(event, self._engine, self._own)

    def _compare(self, event: Happened, side: Side, other: Side) -> None:
        if self.is_paused:
            return
        side.now_s = max(side.now_s, event.at_s)
        other.give_up(side.now_s - self._within_s)
        place = event.kind, event.tier
        if event.key is None:
            side.miss(place)
            return
        key = (*place, event.key)
        if other.match(key):
            self.matched[place] = self.matched.get(place, 0) + 1
        else:
            side.wait(side.now_s, key)

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
    for event, take in sorted(both, key=lambda one: one[0].at_s):
        take(event)
    scorer.finish()
    return scorer.view()
