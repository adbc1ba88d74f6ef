"""An ordered set of pages, stored as extents: queues, ghost lists and count tables that cost time per extent, not per page."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvsim.pages.extents import Extent

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int that compiled code does not box

MOST: Final = 512
"""Segments in a block."""


class _Segment:
    """Consecutive page ids that are also neighbours in the order and have the same value."""

    __slots__ = ("start", "stop", "tail_first", "value", "older", "newer")

    def __init__(self, start: int, stop: int, tail_first: bool, value: Any, older: "_Segment | None" = None) -> None:
        """Hold pages ``start ... stop - 1``; enter the order after ``older``, or start a new order without it."""
        self.start = start
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


class _ById:
    """All segments by page id, in blocks, so that an insertion shifts one block only. No block is empty, unless it is alone.

    A segment has a block, by number, and a place there.
    """

    def __init__(self) -> None:
        self.blocks: list[list[_Segment]] = [[]]

    def block_of(self, page: int) -> int:
        """Return the first block with a segment that ends behind a page; the last block if there is none."""
        blocks = self.blocks
        low: i64 = 0
        high: i64 = len(blocks) - 1
        while low < high:
            middle = (low + high) // 2
            if blocks[middle][-1].stop > page:
                high = middle
            else:
                low = middle + 1
        return low

    def place_in(self, block: list[_Segment], page: int) -> int:
        """Return the place of the first segment of a block that ends behind a page; behind all if there is none."""
        low: i64 = 0
        high: i64 = len(block)
        while low < high:
            middle = (low + high) // 2
            if block[middle].stop > page:
                high = middle
            else:
                low = middle + 1
        return low

    def insert(self, at: int, place: int, segment: _Segment) -> None:
        """Insert a segment in front of the one that has this place, where it belongs."""
        block = self.blocks[at]
        block.insert(place, segment)
        if len(block) > MOST:
            self.blocks.insert(at + 1, block[MOST // 2 :])
            del block[MOST // 2 :]

    def remove(self, segment: _Segment) -> None:
        at = self.block_of(segment.start)
        block = self.blocks[at]
        del block[self.place_in(block, segment.start)]
        if not block and len(self.blocks) > 1:
            del self.blocks[at]

    def overlapping(self, start: int, stop: int) -> list[_Segment]:
        """Return the segments with pages of ``start ... stop - 1``, in ascending order."""
        at = self.block_of(start)
        block = self.blocks[at]
        place = self.place_in(block, start)
        found: list[_Segment] = []
        while True:
            if place == len(block):
                at += 1
                if at == len(self.blocks):
                    return found
                block, place = self.blocks[at], 0
            segment = block[place]
            if segment.start >= stop:
                return found
            found.append(segment)
            place += 1


class ExtentOrder:
    """Pages from oldest to most recent, each with a value: equivalent to an ``OrderedDict`` keyed by page id.

    Paths enter at the recent end, either tail first (the deepest page becomes the oldest) or head first. Pages are looked up
    extent by extent, at O(log segments) per segment that overlaps the extent.
    """

    def __init__(self) -> None:
        self.pages = 0
        """Number of pages."""
        self._by_id = _ById()
        self._upto = 0
        """Every page that was ever added has a lower id than this."""
        self._end = _Segment(-1, -1, True, None)
        """Sentinel before the oldest and after the most recent segment."""

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and bool(self._overlapping(page, page + 1))

    def pieces(self, extents: Iterable[Extent]) -> list[tuple[Extent, Any]]:
        """Cut the path, from head to tail, into (extent, value) pieces of one value each; the value of absent pages is None."""
        pieces: list[tuple[Extent, Any]] = []
        for start, pages in extents:
            stop = start + pages
            for segment in self._overlapping(start, stop):
                if start < segment.start:
                    pieces.append(((start, segment.start - start), None))
                    start = segment.start
                upto = segment.stop if segment.stop < stop else stop
                pieces.append(((start, upto - start), segment.value))
                start = upto
            if start < stop:
                pieces.append(((start, stop - start), None))
        return pieces

    def leading(self, extents: Iterable[Extent]) -> list[Extent]:
        """Return the path's leading pages that are present without a gap, in pieces of one value each."""
        pieces: list[Extent] = []
        for start, pages in extents:
            stop = start + pages
            for segment in self._overlapping(start, stop):
                if start < segment.start:
                    return pieces
                upto = segment.stop if segment.stop < stop else stop
                pieces.append((start, upto - start))
                start = upto
            if start < stop:
                return pieces
        return pieces

    def leading_pages(self, extents: Iterable[Extent]) -> int:
        """Count the path's leading pages that are present without a gap."""
        return sum([pages for _, pages in self.leading(extents)])

    def count(self, extents: Iterable[Extent]) -> int:
        """Count the path's pages that are present."""
        return sum([pages for (_, pages), value in self.pieces(extents) if value is not None])

    def append(self, extents: Sequence[Extent], *, tail_first: bool = True, value: Any = True) -> None:
        """Put the path's pages at the recent end with this value (not None); pages that are present already move there."""
        by_id, end = self._by_id, self._end
        if tail_first and len(extents) > 1:
            extents = extents[::-1]
        for start, pages in extents:
            stop, last = start + pages, end.older
            continues = (last.start == stop if tail_first else last.stop == start) and last.value == value
            if start >= self._upto:  # behind all others
                at = len(by_id.blocks) - 1
                place = len(by_id.blocks[at])
                self._upto = stop
            else:
                at = by_id.block_of(start)
                block = by_id.blocks[at]
                place = by_id.place_in(block, start)
                if place < len(block) and (found := block[place]).start < stop:
                    if found.start == start and found.stop == stop and not continues:
                        found.move_behind(last)
                        found.tail_first, found.value = tail_first, value
                        continue
                    self.remove(((start, pages),))
                    at = by_id.block_of(start)
                    place = by_id.place_in(by_id.blocks[at], start)
                if stop > self._upto:
                    self._upto = stop
            self.pages += pages
            last = end.older
            if (last.start != stop if tail_first else last.stop != start) or last.value != value or last.tail_first != tail_first:
                by_id.insert(at, place, _Segment(start, stop, tail_first, value, last))
            elif tail_first:  # continues the last segment, cut from the same path earlier
                last.start = start
            else:
                last.stop = stop

    def mark(self, extents: Iterable[Extent], value: Any) -> None:
        """Give the path's pages that are present this value (not None), where they are in the order."""
        for start, pages in extents:
            for segment in self._cut_out(start, pages):
                segment.value = value

    def may_hold(self, extents: Iterable[Extent]) -> bool:
        """Whether pages of the path may be present: False if all have higher ids than any page ever added."""
        upto = self._upto
        return any(start < upto for start, _ in extents)

    def touch(self, extents: Collection[Extent], *, tail_first: bool = True) -> int:
        """Move the path's pages that are present to the recent end, keeping their values. Returns their number."""
        if not self.may_hold(extents):
            return 0
        here = [piece for piece in self.pieces(extents) if piece[1] is not None]
        if tail_first:
            here.reverse()
        for extent, value in here:
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
        segments = self._overlapping(start, stop)
        if segments:
            if segments[0].start < start:
                segments[0] = self._cut(segments[0], start)
            if segments[-1].stop > stop:
                self._cut(segments[-1], stop)
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

    def _overlapping(self, start: int, stop: int) -> list[_Segment]:
        """Return the segments with pages of ``start ... stop - 1``, in ascending order."""
        return self._by_id.overlapping(start, stop) if start < self._upto else []

    def _cut(self, segment: _Segment, page: int) -> _Segment:
        """Cut a segment before a page. Returns the part from that page on, a new segment next to it in the order."""
        older = segment.older if segment.tail_first else segment
        rest = _Segment(page, segment.stop, segment.tail_first, segment.value, older)
        at = self._by_id.block_of(segment.start)
        place = self._by_id.place_in(self._by_id.blocks[at], segment.start)
        segment.stop = page
        self._by_id.insert(at, place + 1, rest)
        return rest

    def _drop(self, segment: _Segment) -> None:
        self._by_id.remove(segment)
        older, newer = segment.older, segment.newer
        older.newer, newer.older = newer, older
        self.pages -= segment.stop - segment.start
