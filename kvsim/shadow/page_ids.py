"""Page ids for a stream of requests without end: ids that nothing refers to any more are forgotten."""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from kvsim.pages.extents import Extent
from kvsim.trace.page_index import PageIndex


class LivePageIndex(PageIndex):
    """A page index that can forget. A key that is seen again after that gets a new id, as if it had never been seen.

    Ids of one segment are a stretch of a path. A segment begins where a prompt leaves those before it, and remembers the page
    that it follows. So whatever is kept, the pages before it are kept too, and the known keys of a prompt stay a prefix of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        """First ids of the segments, ascending."""
        self._parents: list[int] = []
        """For each segment, the id of the page before its first one; -1 if that begins a prompt."""
        self._keys: list[list[Hashable]] = []
        """For each segment, the keys of its pages."""
        self.forgotten = 0
        """Number of page ids forgotten so far."""

    @property
    def segments(self) -> int:
        """Number of stretches that the known ids consist of."""
        return len(self._starts)

    def lookup(self, keys: Sequence[Hashable]) -> tuple[Extent, ...]:
        first = self.next_id
        extents = super().lookup(keys)
        new = self.next_id - first
        if new:
            start, pages = extents[-1]
            if pages == new:  # it does not continue the page before it by its id
                self._starts.append(start)
                self._parents.append(extents[-2][0] + extents[-2][1] - 1 if len(extents) > 1 else -1)
                self._keys.append([])
            self._keys[-1].extend(keys[len(keys) - new :])
        return extents

    def key_of(self, page: int) -> Any:
        """Return the key of an id; None for one that is not known."""
        at = bisect_right(self._starts, page) - 1
        if at < 0:
            return None
        keys, place = self._keys[at], page - self._starts[at]
        return keys[place] if place < len(keys) else None

    def keys_of(self, start: int, pages: int) -> list[Any]:
        """Return the keys of consecutive ids; None for each that is not known."""
        found: list[Any] = []
        page, stop = start, start + pages
        while page < stop:
            at = bisect_right(self._starts, page) - 1
            end = min(stop, self._starts[at + 1]) if at + 1 < len(self._starts) else stop
            place = page - self._starts[at] if at >= 0 else 0
            known = self._keys[at][place : place + end - page] if at >= 0 else []
            found += known
            found += [None] * (end - page - len(known))
            page = end
        return found

    def keys_up_to(self, page: int, pages: int) -> list[Any]:
        """Return the keys of so many pages of a path, that of ``page`` first and then those before it; None for one unknown."""
        found: list[Any] = []
        for _ in range(pages):
            found.append(self.key_of(page))
            page = self.before(page)
        return found

    def before(self, page: int) -> int:
        """Return the id of the page before one on its path; -1 if it begins a prompt."""
        at = bisect_right(self._starts, page) - 1
        return self._parents[at] if at >= 0 and self._starts[at] == page else page - 1

    def forget_all_but(self, kept: Iterable[Extent]) -> int:
        """Forget all ids but these and those of the pages before them. Returns how many were forgotten."""
        starts, ends = self._starts, self._ends_of_segments(kept)
        kept_segments = [at for at, end in enumerate(ends) if end > starts[at]]
        self._starts = [starts[at] for at in kept_segments]
        self._parents = [self._parents[at] for at in kept_segments]
        self._keys = [self._keys[at][: ends[at] - starts[at]] for at in kept_segments]
        before = len(self._ids)
        self._ids = {
            key: page for start, keys in zip(self._starts, self._keys, strict=True) for page, key in enumerate(keys, start)
        }
        forgotten = before - len(self._ids)
        self.forgotten += forgotten
        return forgotten

    def _ends_of_segments(self, kept: Iterable[Extent]) -> list[int]:
        """Return, for each segment, the id after the last one that is kept; its first id if none is."""
        starts = self._starts
        ends = starts.copy()
        for first, pages in kept:
            stop, at = first + pages, bisect_right(starts, first) - 1
            while at < len(starts) and (at < 0 or starts[at] < stop):
                if at >= 0:
                    ends[at] = max(ends[at], min(stop, starts[at] + len(self._keys[at])))
                at += 1
        for at in range(len(starts) - 1, -1, -1):
            parent = self._parents[at]
            if ends[at] > starts[at] and parent >= 0:
                above = bisect_right(starts, parent) - 1
                ends[above] = max(ends[above], parent + 1)
        return ends

    def check(self) -> None:
        """Raise AssertionError unless the ids ascend in the order of their keys, and each known page follows a known one."""
        ids = list(self._ids.values())
        assert ids == sorted(set(ids)), "ids do not ascend"
        assert [self.key_of(page) for page in ids] == list(self._ids), "keys of ids"
        known = set(ids)
        assert self._starts == sorted(set(self._starts)), "segments do not ascend"
        assert all(parent in known for parent in self._parents if parent >= 0), "the page before a segment was forgotten"
        assert all(page in self._starts or page - 1 in known for page in ids), "the page before a page was forgotten"
