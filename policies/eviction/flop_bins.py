"""The bins of ``flop_aware``: leaves of equal value share one, and few of the bins can hold the leaf of the lowest utility."""

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from kvsim.core.tree import Node

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int that compiled code does not box

NEVER: Final = float("inf")

Entry = tuple[float, int, Node, int]
"""(last use, number of the entry, leaf or state, number of requests announced by its last use)."""


class Bin:
    """The leaves of one value, as a heap of entries; its head is the one that was used longest ago.

    ``used_s``, ``node`` and ``turn`` are those of the head. They stay what they were while the heap is changed, until the bins
    are told.
    """

    __slots__ = ("entries", "node", "place", "turn", "used_s")

    def __init__(self, place: int, entries: list[Entry]) -> None:
        """``entries`` are a heap, and not empty."""
        self.place: i64 = place
        self.entries = entries
        head = entries[0]
        self.used_s = head[0]
        self.node = head[2]
        self.turn: i64 = head[3]

    def note_head(self) -> None:
        """Note the head of a heap that has changed and is not empty."""
        head = self.entries[0]
        self.used_s, self.node, self.turn = head[0], head[2], head[3]


class Bins:
    """The bins that have entries, in ascending order of their places, and the front.

    The front are those bins whose head was used before the heads of all lower bins. One that gains such a head drops the bins
    after it that it outdoes. One that loses its head leaves a gap, in which bins may come to the front that it had outdone. The
    gap waits until somebody asks for the front: mostly what is left of a victim enters a lower bin with the same last use, and
    outdoes the gap as the victim did.
    """

    __slots__ = ("_front", "_gap_at", "_gap_place", "_gap_used_s", "_is_open", "filled")

    def __init__(self) -> None:
        self.filled: list[Bin] = []
        self._front: list[Bin] = []
        self._is_open = False
        self._gap_at = 0
        """Where in the front the bins of the gap belong."""
        self._gap_place = 0
        """Where the gap begins; it ends before the next bin of the front."""
        self._gap_used_s = NEVER
        """No head in the gap was used before."""

    def front(self) -> list[Bin]:
        """Return the bins of the front, in ascending order of their places; not to be changed."""
        if self._is_open:
            self._close()
        return self._front

    def push(self, place: int, entry: Entry) -> None:
        """Add an entry to the bin at this place."""
        filled = self.filled
        index = first_from(filled, place)
        if index < len(filled):
            known = filled[index]
            if known.place == place:
                heappush(known.entries, entry)
                if entry[0] < known.used_s:
                    known.note_head()
                    self._advance(known)
                return
        added = Bin(place, [entry])
        filled.insert(index, added)
        self._advance(added)

    def pop(self, known: Bin) -> None:
        """Remove a bin's head."""
        if len(known.entries) == 1:
            known.entries.pop()
        else:
            heappop(known.entries)
        self.note_lost(known)

    def note_lost(self, changed: Bin) -> None:
        """Note that a bin has lost its head. The next one, if any, was used no earlier, unless corrected."""
        if self._is_open:
            self._close()
        front = self._front
        at = first_from(front, changed.place)
        if at < len(front) and front[at] is changed:
            del front[at]
            self._is_open = True
            self._gap_at, self._gap_place, self._gap_used_s = at, changed.place, changed.used_s
        if changed.entries:
            before_s = changed.used_s
            changed.note_head()
            if changed.used_s < before_s:
                self._advance(changed)
        else:
            del self.filled[first_from(self.filled, changed.place)]

    def fill(self, heaps: list[tuple[int, list[Entry]]]) -> None:
        """Replace all entries by these, by place in ascending order."""
        filled = []
        for place, entries in heaps:
            if entries:
                heapify(entries)
                filled.append(Bin(place, entries))
        self.filled, self._front = filled, []
        self._is_open, self._gap_at, self._gap_place, self._gap_used_s = True, 0, 0, -NEVER

    def _advance(self, changed: Bin) -> None:
        """Put a bin whose head was used earlier than the one before into the front, if it belongs there."""
        used_s = changed.used_s
        if self._is_open:
            if changed.place <= self._gap_place and used_s <= self._gap_used_s:
                self._is_open = False
            else:
                self._close()
        front = self._front
        at = first_from(front, changed.place)
        if at and front[at - 1].used_s <= used_s:
            return
        if at == len(front) or front[at] is not changed:
            front.insert(at, changed)
        at += 1
        stop = at
        while stop < len(front) and front[stop].used_s >= used_s:
            stop += 1
        if stop > at:
            del front[at:stop]

    def _close(self) -> None:
        """Find the front's bins in the gap."""
        self._is_open = False
        front, filled = self._front, self.filled
        at: i64 = self._gap_at
        bound_s = front[at - 1].used_s if at else NEVER
        count: i64 = len(filled)
        end: i64 = first_from(filled, front[at].place) if at < len(front) else count
        index: i64 = first_from(filled, self._gap_place)
        while index < end:
            found = filled[index]
            if found.used_s < bound_s:
                front.insert(at, found)
                at += 1
                bound_s = found.used_s
            index += 1


def first_from(bins: list[Bin], place: int) -> int:
    """Return where in ascending bins the first one is whose place is this or a higher one; their number if there is none."""
    wanted: i64 = place
    low: i64 = 0
    high: i64 = len(bins)
    while low < high:
        middle = (low + high) >> 1
        if bins[middle].place < wanted:
            low = middle + 1
        else:
            high = middle
    return low
