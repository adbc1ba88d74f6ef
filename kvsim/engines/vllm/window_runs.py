"""Blocks of the groups with a window: runs of pages with one history, and where they are along prompts."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

from kvsim.core.pool import Pool
from kvsim.pages.extents import Extent


class RunList:
    """Runs of blocks in the order of their pages on a path: those that a request holds, or that were given back together."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs: list[BlockRun] = []

    def add_part(self, run: "BlockRun", part: "BlockRun") -> None:
        """Take in what has been cut off one of these runs."""
        runs, depth = self.runs, part.segment.depth
        at = runs.index(run) + 1
        while at < len(runs) and runs[at].segment.depth < depth:
            at += 1
        runs.insert(at, part)


class BlockRun:
    """Blocks of consecutive pages, in some groups, that were named together and have been held and given back together."""

    __slots__ = ("groups", "idle_in", "is_doomed", "segment", "slots", "users", "width")

    def __init__(self, segment: "Segment", groups: int, slots: Any) -> None:
        self.segment = segment
        """Its pages."""
        self.groups = groups
        """A bit for each group that it has blocks of."""
        self.width = groups.bit_count()
        """Number of these groups."""
        self.slots = slots
        """One for each page and group; which one has which does not matter."""
        self.users: dict[RunList, None] = {}
        """What the requests hold that hold it."""
        self.idle_in: RunList | None = None
        """What it was given back with, if no request holds it."""
        self.is_doomed = False
        """Whether the cache has been emptied while it was held."""

    @property
    def blocks(self) -> int:
        """Number of its blocks."""
        return self.segment.pages * self.width

    def divide(self, part: "BlockRun") -> None:
        """Note that ``part`` has been cut off this run: whoever has this one has both."""
        part.is_doomed, part.idle_in = self.is_doomed, self.idle_in
        if self.idle_in is not None:
            self.idle_in.add_part(self, part)
        for user in self.users:
            part.users[user] = None
            user.add_part(self, part)


class Segment:
    """Consecutive pages of an extent, and the runs of exactly these pages, the oldest first."""

    __slots__ = ("along", "depth", "pages", "runs", "start")

    def __init__(self, along: "Along", start: int, pages: int, depth: int) -> None:
        self.along = along
        self.start = start
        self.pages = pages
        self.depth = depth
        """Pages of the path before it."""
        self.runs: list[BlockRun] = []

    def has_all(self, groups: int) -> bool:
        """Whether each of these groups has a block of each page."""
        found = 0
        for run in self.runs:
            found |= run.groups
        return found == groups


class Along:
    """The segments of one extent, in order; there may be gaps between them."""

    __slots__ = ("before", "segments", "start", "starts")

    def __init__(self, start: int, before: int) -> None:
        self.start = start
        self.before = before
        """Pages of the path before the extent."""
        self.segments: list[Segment] = []
        self.starts: list[int] = []
        """The first page of each segment."""

    def put(self, at: int, segment: Segment) -> None:
        """Insert a segment at a place among the others."""
        self.segments.insert(at, segment)
        self.starts.insert(at, segment.start)


Found = tuple[Segment, int, int]
"""Pages of a segment: how many come before them in it, and how many they are."""


class WindowIndex:
    """Finds the runs along a prompt. As in ``StateIndex``, an extent begins at the same page in all prompts that share it."""

    def __init__(self, groups: int, pool: Pool) -> None:
        self._extents: dict[int, Along] = {}
        self._groups = (1 << groups) - 1
        self._pool = pool

    def segments(self) -> Iterator[Segment]:
        """Iterate over all segments."""
        for along in self._extents.values():
            yield from along.segments

    def clear(self) -> None:
        """Forget all segments. They can still be cut by whoever has them."""
        self._extents = {}

    # --- look-up ---------------------------------------------------------------------------------------------------------

    def deepest(self, extents: tuple[Extent, ...], limit: int, wanted: int) -> tuple[int, list[Found]]:
        """Return (end, found) of the last pages in a row within a prompt's first ``limit`` that all groups have.

        These are the ``wanted`` pages before ``end``, or all the prompt's pages before it; none of them, and 0, without such.
        """
        end, first, found = 0, -1, list[Found]()
        for start, pages in reversed(extents):
            along = self._extents.get(start)
            if along is None:
                continue
            upto = start + min(pages, limit - along.before)
            at = bisect_left(along.starts, upto) - 1
            while at >= 0:
                segment = along.segments[at]
                at -= 1
                if not segment.has_all(self._groups):
                    first = -1
                    continue
                usable = min(segment.pages, upto - segment.start)
                if segment.depth + usable != first:
                    end, found = segment.depth + usable, []
                first = max(segment.depth, end - wanted)
                skipped = first - segment.depth
                if usable > skipped:
                    found.append((segment, skipped, usable - skipped))
                if end - first == wanted:
                    found.reverse()
                    return end, found
        if first:
            return 0, []
        found.reverse()
        return end, found

    # --- changes ---------------------------------------------------------------------------------------------------------

    def segments_of(self, extent: Extent, before: int, start: int, pages: int) -> list[Segment]:
        """Return the segments of ``pages`` pages of an extent from ``start`` on, made and cut as needed.

        ``before`` pages of the path come before the extent.
        """
        along = self._extents.get(extent[0])
        if along is None:
            along = self._extents[extent[0]] = Along(extent[0], before)
        at, made = bisect_right(along.starts, start) - 1, []
        if at >= 0 and along.segments[at].start < start < along.segments[at].start + along.segments[at].pages:
            self.cut(along.segments[at], start - along.segments[at].start)
        at = bisect_left(along.starts, start)
        while pages:
            if at < len(along.starts) and along.starts[at] == start:
                segment = along.segments[at]
                if segment.pages > pages:
                    self.cut(segment, pages)
            else:
                gap = along.starts[at] - start if at < len(along.starts) else pages
                segment = Segment(along, start, min(gap, pages), before + start - along.start)
                along.put(at, segment)
            made.append(segment)
            at, start, pages = at + 1, start + segment.pages, pages - segment.pages
        return made

    def cut(self, segment: Segment, pages: int) -> Segment:
        """Cut a segment and its runs after ``pages`` pages. Returns the upper part; ``segment`` keeps the first pages."""
        upper = Segment(segment.along, segment.start + pages, segment.pages - pages, segment.depth + pages)
        segment.pages = pages
        segment.along.put(bisect_left(segment.along.starts, upper.start), upper)
        for run in segment.runs:
            run.slots, slots = self._pool.split(run.slots, run.blocks)
            part = BlockRun(upper, run.groups, slots)
            upper.runs.append(part)
            run.divide(part)
        return upper

    def join(self, lower: BlockRun, upper: BlockRun) -> bool:
        """Undo a cut if nothing distinguishes two runs, which requests hold: ``lower`` becomes both. Returns whether it does."""
        first, second = lower.segment, upper.segment
        if first.along is not second.along or first.start + first.pages != second.start or lower.groups != upper.groups:
            return False
        if len(first.runs) > 1 or len(second.runs) > 1 or lower.users != upper.users:
            return False
        lower.slots = self._pool.join(lower.slots, upper.slots)
        for user in upper.users:
            user.runs.remove(upper)
        self._take_out(second)
        first.pages += second.pages
        return True

    def cut_groups(self, run: BlockRun, groups: int) -> None:
        """Cut a run so that it keeps only some of its groups."""
        others = run.groups & ~groups
        run.groups, run.width = groups, groups.bit_count()
        run.slots, slots = self._pool.split(run.slots, run.blocks)
        part = BlockRun(run.segment, others, slots)
        run.segment.runs.insert(run.segment.runs.index(run) + 1, part)
        run.divide(part)

    def remove(self, run: BlockRun) -> None:
        """Remove a run."""
        run.segment.runs.remove(run)
        if not run.segment.runs:
            self._take_out(run.segment)

    def _take_out(self, segment: Segment) -> None:
        along = segment.along
        at = bisect_left(along.starts, segment.start)
        del along.starts[at], along.segments[at]
        if not along.starts:
            del self._extents[along.start]
