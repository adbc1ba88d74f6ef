"""Which of many engines have each page: one index over all of them, by extents of page ids."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from typing import Final

import numpy as np

from kvsim.pages.extent_counts import PageCounts
from kvsim.pages.extents import Extent

BLOCK_BITS: Final = 12
"""Pages are looked up in blocks of 2**12 ids, so that lists of segments stay short."""
MANY: Final = 64
"""Owners of a segment from which on they are an array of flags, one for each engine, instead of a set."""
FEW: Final = 16
"""Owners down to which they remain one."""


class Segment:
    """Consecutive page ids, from ``start`` up to, not including, ``end``, that the same engines own. Never without an owner."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.owners: set[int] = set()
        self.flags: np.ndarray | None = None
        """With many owners, these instead: 1 for each engine that is one."""
        self.count = 0

    def second_part(self, start: int) -> "Segment":
        """Shorten the segment to what is before ``start``. Returns the rest of it, with the same owners."""
        rest = Segment(start, self.end)
        rest.owners, rest.count = self.owners.copy(), self.count
        rest.flags = None if self.flags is None else self.flags.copy()
        self.end = start
        return rest

    def has(self, engine: int) -> bool:
        """Whether an engine is an owner."""
        return engine in self.owners if self.flags is None else bool(self.flags[engine])

    def has_owners_of(self, other: "Segment") -> bool:
        """Whether two segments have the same owners."""
        if self.count != other.count:
            return False
        if self.flags is None or other.flags is None:
            return self.flags is other.flags and self.owners == other.owners
        return bool((self.flags == other.flags).all())

    def add(self, engine: int, engines: int) -> None:
        """Add an owner, of so many ``engines``."""
        if self.has(engine):
            return
        self.count += 1
        if self.flags is not None:
            self.flags[engine] = 1
            return
        self.owners.add(engine)
        if self.count > MANY:
            self.flags = np.zeros(engines, np.int8)
            self.flags[list(self.owners)] = 1
            self.owners = set()

    def discard(self, engine: int) -> None:
        """Remove an owner."""
        if not self.has(engine):
            return
        self.count -= 1
        if self.flags is None:
            self.owners.discard(engine)
            return
        self.flags[engine] = 0
        if self.count < FEW:
            self.owners = set(np.flatnonzero(self.flags).tolist())
            self.flags = None


class Leading:
    """How many leading pages of a path each engine owns. Valid until owners change."""

    def __init__(self) -> None:
        self.few: dict[int, int] = {}
        """Pages of some engines, besides those in ``many``."""
        self.many: list[tuple[np.ndarray, int]] = []
        """Flags of all engines, 1 for each that owns so many pages more."""

    def most(self) -> int:
        """Return a number of pages that no engine owns more of."""
        return sum([pages for _, pages in self.many]) + max(self.few.values(), default=0)

    def of_all(self, engines: int) -> np.ndarray:
        """Return the pages of each of so many engines."""
        total: np.ndarray = np.zeros(engines, np.int64)
        for flags, pages in self.many:
            total += np.multiply(flags, pages, dtype=np.int64)
        for engine, pages in self.few.items():
            total[engine] += pages
        return total


class PageOwners:
    """The owners, among engines 0 to ``engines`` - 1, of each page id.

    What a call costs depends on the segments on the way, not on pages. Looking up a path costs a step for each segment; for one
    with many owners, that step is arithmetic on an array of all engines.
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._starts: dict[int, list[int]] = {}
        self._segments: dict[int, list[Segment]] = {}
        """Segments that begin in a block, and their first ids, ascending; none crosses the end of a block."""

    def add(self, engine: int, start: int, end: int) -> None:
        """Make an engine an owner of pages ``start`` to ``end`` - 1."""
        while start < end:
            block = start >> BLOCK_BITS
            last = min(end, (block + 1) << BLOCK_BITS)
            self._add_in(block, engine, start, last)
            start = last

    def _add_in(self, block: int, engine: int, start: int, end: int) -> None:
        starts, segments = self._starts.setdefault(block, []), self._segments.setdefault(block, [])
        at = self._cut(starts, segments, start)
        self._cut(starts, segments, end)
        while start < end:
            if at == len(starts) or starts[at] != start:
                gap_ends = end if at == len(starts) else min(end, starts[at])
                starts.insert(at, start)
                segments.insert(at, Segment(start, gap_ends))
            segments[at].add(engine, self._engines)
            start = segments[at].end
            at += 1

    def remove(self, engine: int, start: int, end: int) -> None:
        """Make an engine no owner of pages ``start`` to ``end`` - 1 any more."""
        while start < end:
            block = start >> BLOCK_BITS
            last = min(end, (block + 1) << BLOCK_BITS)
            if block in self._starts:
                self._remove_in(block, engine, start, last)
            start = last

    def _remove_in(self, block: int, engine: int, start: int, end: int) -> None:
        starts, segments = self._starts[block], self._segments[block]
        first = self._cut(starts, segments, start)
        after = self._cut(starts, segments, end)
        for at in range(after - 1, first - 1, -1):
            segments[at].discard(engine)
            if not segments[at].count:
                del starts[at], segments[at]
        if not starts:
            del self._starts[block], self._segments[block]

    @staticmethod
    def _cut(starts: list[int], segments: list[Segment], page: int) -> int:
        """Return the position of the first segment that begins at a page or later, cutting the one that has it inside."""
        at = bisect_left(starts, page)
        if at and segments[at - 1].end > page:
            starts.insert(at, page)
            segments.insert(at, segments[at - 1].second_part(page))
        return at

    def of(self, page: int) -> Collection[int]:
        """Return the owners of a page."""
        segment = self._with(page)
        if segment is None:
            return ()
        return segment.owners if segment.flags is None else np.flatnonzero(segment.flags).tolist()

    def _with(self, page: int) -> Segment | None:
        """Return the segment of a page, joined with those after it that have the same owners; None if nobody owns it."""
        starts = self._starts.get(page >> BLOCK_BITS)
        if starts is None:
            return None
        at = bisect_right(starts, page) - 1
        segments = self._segments[page >> BLOCK_BITS]
        if at < 0 or segments[at].end <= page:
            return None
        segment = segments[at]
        while at + 1 < len(segments) and starts[at + 1] == segment.end and segment.has_owners_of(segments[at + 1]):
            segment.end = segments[at + 1].end
            del starts[at + 1], segments[at + 1]
        return segment

    def leading(self, extents: Iterable[Extent]) -> Leading:
        """Return how many leading pages of a path each engine owns."""
        found = Leading()
        flags: np.ndarray | None = None
        left: list[int] | None = None
        for start, pages in extents:
            end = start + pages
            while start < end:
                segment = self._with(start)
                if segment is None:
                    return found
                step = min(segment.end, end) - start
                start += step
                if left is None and segment.flags is not None:
                    flags = segment.flags if flags is None else flags & segment.flags
                    found.many.append((flags, step))
                    continue
                if left is None:
                    left = [engine for engine in segment.owners if flags is None or flags[engine]]
                else:
                    left = [engine for engine in left if segment.has(engine)]
                if not left:
                    return found
                for engine in left:
                    found.few[engine] = found.few.get(engine, 0) + step
        return found


class OwnCounts(PageCounts):
    """The page counts of one engine, which owns the pages with a count above 0."""

    def __init__(self, owners: PageOwners | None = None, engine: int = 0) -> None:
        super().__init__()
        self._owners = owners
        self._engine = engine

    def _changed(self, start: int, end: int, is_counted: bool) -> None:
        if self._owners is not None:
            if is_counted:
                self._owners.add(self._engine, start, end)
            else:
                self._owners.remove(self._engine, start, end)
