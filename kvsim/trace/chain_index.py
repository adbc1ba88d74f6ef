"""Assigns chained page ids to arbitrary foreign ids."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable

from kvsim.pages.extents import Extent, append_extent

LARGEST = 1 << 62
"""Foreign ids from which on arrays do not hold them."""


class ChainIndex:
    """Assigns page ids to sequences of foreign ids that do not identify their prefix, or do so only within a scope.

    Two sequences of one scope get equal page ids exactly for their common prefix; sequences of different scopes share no page
    ids. New page ids are consecutive. Foreign ids may come in any order; the work grows with the extents of input and output, not
    with pages.

    A segment is a stretch of a path in which foreign ids and page ids increase together. The successor of a page is either the
    next page of its segment, or the first page of another segment, indexed by (page id of the predecessor, foreign id).

    Segments whose foreign ids are larger than all before them are kept in arrays, 32 bytes each: in most published traces, new
    blocks have the next ids. Others take ten times as much.
    """

    def __init__(self) -> None:
        self.pages = 0
        """Number of page ids assigned so far."""
        self._branches: dict[tuple[int, int], list[int]] = {}
        self._starts, self._lengths, self._firsts, self._before = (array("q") for _ in range(4))
        """Of segments with ascending foreign ids: first foreign id, pages, first page id, and the page id before that."""

    def lookup(self, foreign: Iterable[Extent], scope: int = 0) -> tuple[Extent, ...]:
        """Return the page ids of a sequence of foreign ids, both as extents, the result normalised; ``scope`` is 0 or more."""
        extents: list[Extent] = []
        segment = [0, 0, -scope, -1]  # foreign id of its first page, pages, page id of its first page, place in the arrays
        depth = 0  # pages of the segment already passed; the root is an empty segment before id -scope
        for start, pages in foreign:
            while pages:
                if depth == segment[1] or segment[0] + depth != start:
                    segment, depth = self._branch(segment, depth, start, pages)
                step = min(pages, segment[1] - depth)
                append_extent(extents, segment[2] + depth, step)
                depth, start, pages = depth + step, start + step, pages - step
        return tuple(extents)

    def reserve(self, pages: int) -> int:
        """Assign ``pages`` consecutive page ids that no sequence has, and return the first."""
        first_page = self.pages
        self.pages += pages
        return first_page

    def _branch(self, segment: list[int], depth: int, start: int, pages: int) -> tuple[list[int], int]:
        """Return the segment and the position in it where foreign id ``start`` follows the first ``depth`` pages of ``segment``.

        If that position is new, the ``pages`` ids from ``start`` on are added there, by extending the segment or creating one.
        """
        place = segment[2] + depth - 1, start
        known = self._known(*place)
        if known is not None:
            return known, 0
        first_page = self.reserve(pages)
        if 0 < depth == segment[1] and segment[0] + depth == start and segment[2] + depth == first_page:
            segment[1] += pages
            if segment[3] >= 0:
                self._lengths[segment[3]] += pages
            return segment, depth
        return self._add(place, pages, first_page), 0

    def _known(self, before: int, start: int) -> list[int] | None:
        """Return the segment that begins with this foreign id behind this page; None if there is none."""
        at = bisect_right(self._starts, start) - 1
        if at >= 0 and self._starts[at] == start and self._before[at] == before:
            return [start, self._lengths[at], self._firsts[at], at]
        return self._branches.get((before, start))

    def _add(self, place: tuple[int, int], pages: int, first_page: int) -> list[int]:
        before, start = place
        if start >= LARGEST or self._starts and start < self._starts[-1] + self._lengths[-1]:
            self._branches[place] = new = [start, pages, first_page, -1]
            return new
        self._starts.append(start)
        self._lengths.append(pages)
        self._firsts.append(first_page)
        self._before.append(before)
        return [start, pages, first_page, len(self._starts) - 1]
