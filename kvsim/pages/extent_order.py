"""An ordered set of pages, stored as extents: queues, ghost lists and count tables that cost time per extent, not per page."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from kvsim.pages.extents import Extent


class _Segment:
    """Consecutive page ids that are also neighbours in the order and have the same value."""

    __slots__ = ("start", "stop", "tail_first", "value", "anchor", "older", "newer")

    def __init__(self, start: int, stop: int, tail_first: bool, value: Any, older: "_Segment | None" = None) -> None:
        """Hold pages ``start ... stop - 1``; enter the order after ``older``, or start a new order without it."""
        self.start = self.anchor = start
        """``anchor`` is the page id that the segment is indexed by; it stays the same while the segment grows."""
        self.stop = stop
        self.tail_first = tail_first
        self.value = value
        if older is None:
            self.older = self.newer = self
        else:
            self.older = older
            self.newer = newer = older.newer
            older.newer = newer.older = self

    def move_behind(self, other: "_Segment") -> None:
        """Move next to another segment, on its newer side."""
        if other is not self:
            self.older.newer, self.newer.older = self.newer, self.older
            self.older, self.newer = other, other.newer
            other.newer.older = self
            other.newer = self


class _Anchors:
    """The anchors of all segments, sorted, in blocks, so that an insertion shifts one block only."""

    MOST = 512

    def __init__(self) -> None:
        self.blocks: list[list[int]] = [[]]
        self.firsts: list[int] = [-1]
        """The lower bound of each block: its first id, or less."""

    def insert(self, anchor: int) -> None:
        at = bisect_right(self.firsts, anchor) - 1
        block = self.blocks[at]
        insort(block, anchor)
        if len(block) > self.MOST:
            self.halve(at)

    def halve(self, at: int) -> None:
        """Split a block in two."""
        block = self.blocks[at]
        half = block[self.MOST // 2 :]
        del block[self.MOST // 2 :]
        self.blocks.insert(at + 1, half)
        self.firsts.insert(at + 1, half[0])

    def remove(self, anchor: int) -> None:
        at = bisect_right(self.firsts, anchor) - 1
        block = self.blocks[at]
        del block[bisect_left(block, anchor)]
        if not block and at:
            del self.blocks[at], self.firsts[at]

    def around(self, page: int) -> tuple[int, int]:
        """Return the last anchor up to ``page`` and the first one after it; -1 where there is none."""
        at = bisect_right(self.firsts, page) - 1
        block = self.blocks[at]
        place = bisect_right(block, page)
        if place < len(block):
            after = block[place]
        else:
            after = self.blocks[at + 1][0] if at + 1 < len(self.blocks) else -1
        if place:
            return block[place - 1], after
        return self.blocks[at - 1][-1] if at and self.blocks[at - 1] else -1, after


class ExtentOrder:
    """Pages from oldest to most recent, each with a value: equivalent to an ``OrderedDict`` keyed by page id.

    Paths enter at the recent end, either tail first (the deepest page becomes the oldest) or head first. Pages are looked up
    extent by extent, at O(log segments) per segment that overlaps the extent.
    """

    def __init__(self) -> None:
        self.pages = 0
        """Number of pages."""
        self._by_anchor: dict[int, _Segment] = {}
        self._anchors = _Anchors()
        self._upto = 0
        """Every page that was ever added has a lower id than this."""
        self._end = _Segment(-1, -1, True, None)
        """Sentinel before the oldest and after the most recent segment."""

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and self._overlapping(page, 1) is not None

    def pieces(self, extents: Iterable[Extent]) -> list[tuple[Extent, Any]]:
        """Cut the path, from head to tail, into (extent, value) pieces of one value each; the value of absent pages is None."""
        pieces: list[tuple[Extent, Any]] = []
        for start, pages in extents:
            stop = start + pages
            while start < stop:
                segment = self._overlapping(start, stop - start)
                if segment is None:
                    pieces.append(((start, stop - start), None))
                    break
                if start < segment.start:
                    pieces.append(((start, segment.start - start), None))
                    start = segment.start
                upto = segment.stop if segment.stop < stop else stop
                pieces.append(((start, upto - start), segment.value))
                start = upto
        return pieces

    def leading(self, extents: Iterable[Extent]) -> list[Extent]:
        """Return the path's leading pages that are present without a gap, in pieces of one value each."""
        pieces: list[Extent] = []
        for start, pages in extents:
            stop = start + pages
            while start < stop:
                segment = self._overlapping(start, stop - start)
                if segment is None or start < segment.start:
                    return pieces
                upto = segment.stop if segment.stop < stop else stop
                pieces.append((start, upto - start))
                start = upto
        return pieces

    def leading_pages(self, extents: Iterable[Extent]) -> int:
        """Count the path's leading pages that are present without a gap."""
        return sum([pages for _, pages in self.leading(extents)])

    def count(self, extents: Iterable[Extent]) -> int:
        """Count the path's pages that are present."""
        return sum([pages for (_, pages), value in self.pieces(extents) if value is not None])

    def append(self, extents: Sequence[Extent], *, tail_first: bool = True, value: Any = True) -> None:
        """Put the path's pages at the recent end with this value (not None); pages that are present already move there."""
        by_anchor, anchors, end = self._by_anchor, self._anchors, self._end
        for start, pages in reversed(extents) if tail_first else extents:
            stop, last = start + pages, end.older
            continues = (last.start == stop if tail_first else last.stop == start) and last.value == value
            whole = by_anchor.get(start)
            if whole is not None and whole.start == start and whole.stop == stop and not continues:
                whole.move_behind(last)
                whole.tail_first, whole.value = tail_first, value
                continue
            if start >= self._upto:  # behind all others
                at = len(anchors.blocks) - 1
                block = anchors.blocks[at]
                place = len(block)
                self._upto = stop
            else:
                at = bisect_right(anchors.firsts, start) - 1
                block = anchors.blocks[at]
                place = bisect_right(block, start)
                is_free = (
                    0 < place < len(block) and stop <= by_anchor[block[place]].start and by_anchor[block[place - 1]].stop <= start
                )
                if not is_free and self._overlapping(start, pages) is not None:
                    self.remove(((start, pages),))
                    at = bisect_right(anchors.firsts, start) - 1
                    block = anchors.blocks[at]
                    place = bisect_right(block, start)
                if stop > self._upto:
                    self._upto = stop
            self.pages += pages
            last = end.older
            if (last.start != stop if tail_first else last.stop != start) or last.value != value or last.tail_first != tail_first:
                by_anchor[start] = _Segment(start, stop, tail_first, value, last)
                block.insert(place, start)
                if len(block) > anchors.MOST:
                    anchors.halve(at)
            elif tail_first:  # continues the last segment, cut from the same path earlier
                last.start = start
            else:
                last.stop = stop

    def mark(self, extents: Iterable[Extent], value: Any) -> None:
        """Give the path's pages that are present this value (not None), where they are in the order."""
        for start, pages in extents:
            for segment in self._cut_out(start, pages):
                segment.value = value

    def may_hold(self, extents: Collection[Extent]) -> bool:
        """Whether pages of the path may be present: False if all have higher ids than any page ever added."""
        return bool(extents) and min(extents)[0] < self._upto

    def touch(self, extents: Collection[Extent], *, tail_first: bool = True) -> int:
        """Move the path's pages that are present to the recent end, keeping their values. Returns their number."""
        if not self.may_hold(extents):
            return 0
        here = [piece for piece in self.pieces(extents) if piece[1] is not None]
        for extent, value in reversed(here) if tail_first else here:
            self.append((extent,), tail_first=tail_first, value=value)
        return sum([pages for (_, pages), _ in here])

    def remove(self, extents: Iterable[Extent]) -> int:
        """Remove the path's pages that are present. Returns their number."""
        before = self.pages
        for start, pages in extents:
            for segment in self._cut_out(start, pages):
                self._drop(segment)
        return before - self.pages

    def _cut_out(self, start: int, pages: int) -> list[_Segment]:
        """Return the segments that hold exactly the extent's present pages, cutting segments at its start and end."""
        stop = start + pages
        segments: list[_Segment] = []
        while start < stop and (segment := self._overlapping(start, stop - start)) is not None:
            if segment.start < start:
                segment = self._cut(segment, start)
            if segment.stop > stop:
                self._cut(segment, stop)
            segments.append(segment)
            start = segment.stop
        return segments

    def pop_oldest(self, pages: int) -> list[Extent]:
        """Remove the ``pages`` oldest pages, or all if there are fewer. Returns them, oldest extent first."""
        extents = []
        while pages > 0 and (segment := self._end.newer) is not self._end:
            start, stop = segment.start, segment.stop
            if stop - start <= pages:
                self._drop(segment)
                extents.append((start, stop - start))
                pages -= stop - start
                continue
            self.pages -= pages
            if segment.tail_first:
                segment.stop = stop - pages
                extents.append((segment.stop, pages))
            else:
                segment.start = start + pages
                extents.append((start, pages))
            self._find_anchor(segment)
            break
        return extents

    def move_oldest(self, pages: int, other: "ExtentOrder", *, keep: Iterable[Extent] = ()) -> list[Extent]:
        """Move the ``pages`` oldest pages (all if fewer), except those in ``keep``, to the recent end of another order.

        Returns them.
        """
        kept = {segment for start, length in keep for segment in self._cut_out(start, length)} if pages > 0 else set()
        moved: list[Extent] = []
        for segment in self._take_oldest(pages, kept):
            extent = segment.start, segment.stop - segment.start
            other.append((extent,), tail_first=segment.tail_first, value=segment.value)
            moved.append(extent)
        return moved

    def _take_oldest(self, pages: int, kept: Collection[_Segment] = ()) -> Iterator[_Segment]:
        segment = self._end.newer
        while pages > 0 and segment is not self._end:
            if segment in kept:
                segment = segment.newer
                continue
            if segment.stop - segment.start > pages:
                if segment.tail_first:
                    segment = self._cut(segment, segment.stop - pages)
                else:
                    self._cut(segment, segment.start + pages)
            newer = segment.newer
            self._drop(segment)
            yield segment
            pages -= segment.stop - segment.start
            segment = newer

    def oldest_first(self) -> Iterator[tuple[Extent, bool, Any]]:
        """Iterate over (extent, whether its last page is its oldest, value), oldest first. Do not modify the order meanwhile."""
        segment = self._end.newer
        while segment is not self._end:
            yield (segment.start, segment.stop - segment.start), segment.tail_first, segment.value
            segment = segment.newer

    def _overlapping(self, start: int, pages: int) -> _Segment | None:
        """Return the first segment, by page id, that shares a page with the extent."""
        if start >= self._upto:
            return None
        found: _Segment | None = self._by_anchor.get(start)
        if found is not None or not self._by_anchor:
            return found
        before, after = self._anchors.around(start)
        if before >= 0:
            segment = self._by_anchor[before]
            if segment.stop > start:
                return segment
        if after >= 0:
            segment = self._by_anchor[after]
            if segment.start < start + pages:
                return segment
        return None

    def _find_anchor(self, segment: _Segment) -> None:
        """Give a shortened segment a new anchor if it has lost its old one."""
        if not segment.start <= segment.anchor < segment.stop:
            del self._by_anchor[segment.anchor]
            self._anchors.remove(segment.anchor)
            segment.anchor = segment.start
            self._index(segment)

    def _index(self, segment: _Segment) -> None:
        self._by_anchor[segment.anchor] = segment
        self._anchors.insert(segment.anchor)

    def _cut(self, segment: _Segment, page: int) -> _Segment:
        """Cut a segment before a page. Returns the part from that page on, a new segment next to it in the order."""
        older = segment.older if segment.tail_first else segment
        rest = _Segment(page, segment.stop, segment.tail_first, segment.value, older)
        segment.stop = page
        self._find_anchor(segment)
        self._index(rest)
        return rest

    def _drop(self, segment: _Segment) -> None:
        anchor, older, newer = segment.anchor, segment.older, segment.newer
        del self._by_anchor[anchor]
        self._anchors.remove(anchor)
        older.newer, newer.older = newer, older
        self.pages -= segment.stop - segment.start
