"""How often each page is held, by extents of page ids instead of page by page."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from kvsim.pages.extents import Extent


class PageCounts:
    """A count for each page id, 0 at first. What a call costs depends on the number of extents with one count, not on pages.

    The ids from ``_starts[i]`` up to, not including, ``_starts[i + 1]`` have the count ``_counts[i]``; neighbours differ.
    """

    def __init__(self) -> None:
        self._starts = [-1]
        self._counts = [0]
        self.pages = 0
        """Pages with a count above 0."""

    def add(self, extents: Iterable[Extent]) -> int:
        """Count every page of the extents once more. Returns how many had the count 0."""
        before = self.pages
        for start, pages in extents:
            self._change(start, start + pages, 1)
        return self.pages - before

    def remove(self, extents: Iterable[Extent]) -> int:
        """Count every page of the extents once less. Returns how many have the count 0 now. All must have been counted."""
        before = self.pages
        for start, pages in extents:
            self._change(start, start + pages, -1)
        return before - self.pages

    def leading(self, extents: Iterable[Extent]) -> int:
        """Return how many pages of a path, from its first on, have a count above 0."""
        starts, counts, leading = self._starts, self._counts, 0
        for start, pages in extents:
            end = start + pages
            at = bisect_right(starts, start) - 1
            while counts[at]:
                at += 1
                if starts[at] >= end:
                    break
            else:
                return leading + max(0, starts[at] - start)
            leading += pages
        return leading

    def total(self, extents: Iterable[Extent]) -> int:
        """Return the sum of the counts of all pages of the extents."""
        starts, counts, total = self._starts, self._counts, 0
        for start, pages in extents:
            at, end = bisect_right(starts, start) - 1, start + pages
            while start < end:
                until = min(end, starts[at + 1]) if at + 1 < len(starts) else end
                total += counts[at] * (until - start)
                start, at = until, at + 1
        return total

    def shares(self, extents: Iterable[Extent]) -> float:
        """Return the sum of 1 / count over all pages of the extents; each must have a count above 0."""
        starts, counts, shares = self._starts, self._counts, 0.0
        for start, pages in extents:
            at, end = bisect_right(starts, start) - 1, start + pages
            while start < end:
                until = min(end, starts[at + 1]) if at + 1 < len(starts) else end
                shares += (until - start) / counts[at]
                start, at = until, at + 1
        return shares

    def last(self, extents: Sequence[Extent]) -> int:
        """Return the count of the last page of a path, which must have one."""
        start, pages = extents[-1]
        return self._counts[bisect_right(self._starts, start + pages - 1) - 1]

    def trailing(self, extents: Sequence[Extent]) -> int:
        """Return how many pages at the end of a path have the count of its last page, which must exist."""
        starts, counts, trailing = self._starts, self._counts, 0
        count = self.last(extents)
        for start, pages in reversed(extents):
            at = bisect_right(starts, start + pages - 1) - 1
            while counts[at] == count and starts[at] > start:
                at -= 1
            if counts[at] != count:
                return trailing + max(0, start + pages - starts[at + 1]) if at + 1 < len(starts) else trailing
            trailing += pages
        return trailing

    def counted(self) -> list[tuple[int, int, int]]:
        """Return all pages with a count above 0, ascending, as (first id, pages, count)."""
        starts, counts = self._starts, self._counts
        return [(starts[at], starts[at + 1] - starts[at], count) for at, count in enumerate(counts) if count]

    def _change(self, start: int, end: int, by: int) -> None:
        starts, counts = self._starts, self._counts
        first, last = self._cut(start), self._cut(end)
        for at in range(first, last):
            counts[at] += by
            if counts[at] < 0:
                raise AssertionError(f"pages {starts[at]} to {starts[at + 1] - 1} are removed more often than they were added")
            if counts[at] == (by > 0):
                self.pages += by * (starts[at + 1] - starts[at])
                self._changed(starts[at], starts[at + 1], by > 0)
        self._join(last)
        self._join(first)

    def _changed(self, start: int, end: int, is_counted: bool) -> None:
        """The pages from ``start`` up to, not including, ``end`` have a count above 0 from now on, or the count 0 again."""

    def _cut(self, start: int) -> int:
        """Return the position in the lists that begins with this id, cutting one in two if need be."""
        starts = self._starts
        at = bisect_left(starts, start)
        if at == len(starts) or starts[at] != start:
            starts.insert(at, start)
            self._counts.insert(at, self._counts[at - 1])
        return at

    def _join(self, at: int) -> None:
        """Join a position with the one before it if their counts are equal."""
        if self._counts[at] == self._counts[at - 1]:
            del self._starts[at], self._counts[at]
