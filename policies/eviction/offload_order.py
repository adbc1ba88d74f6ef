"""Orders of single chunks for vLLM's CPU offloading tier, where they take the place of eviction policies.

A chunk is a page or, with larger ones, several pages of the GPU. Chunks have no parents in that tier: any may be stored or
evicted. A request's chunks are handled as runs.
"""

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from math import frexp, ldexp, ulp
from typing import Final

from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, count_pages, parts_by

Seen = list[tuple[Extent, bool]]
"""A part of a path, head to tail: chunks that were stored (True) or are to be stored (False)."""
Placed = list[tuple[Extent, int]]
"""Chunks with the position of the first of each run in its request's path."""

WANTED: Final = 1
REUSED: Final = 2
STORED: Final = 3
"""What a chunk has been to a request: to be stored, though it may have found no room; ready when the request loaded it or was
offered it; stored by the request. The highest counts."""


class OffloadUse:
    """One request's use of the tier, from its first admission until it has finished. ``path`` names its chunks, head to tail."""

    __slots__ = ("adapted", "number", "path", "seen")

    def __init__(self, path: tuple[Extent, ...]) -> None:
        self.path = path
        self.number = 0
        """When it first used a chunk, by the order's counter; 0: it has not."""
        self.seen = ExtentOrder()
        """The chunks that it has used, with WANTED, REUSED or STORED."""
        self.adapted = ExtentOrder()
        """Chunks to be stored that have adapted the order to the workload."""

    def note(self, run: Extent, what: int) -> list[Extent]:
        """Note what chunks have been to the request. Returns those that it has not used before."""
        new: list[Extent] = []
        for part, known in self.seen.pieces((run,)):
            if known is None:
                new.append(part)
            if known is None or known < what:
                self.seen.append((part,), tail_first=False, value=what)
        return new

    def used(self) -> list[tuple[Extent, int, int]]:
        """Return its chunks, head to tail, as (run, position in the path, WANTED, REUSED or STORED)."""
        used, place = [], 0
        for run, what in self.seen.pieces(self.path):
            if what is not None:
                used.append((run, place, what))
            place += run[1]
        return used


class OffloadOrder(metaclass=ABCMeta):
    """Tracks which chunks the tier has and which leave first. It is told of all that happens to them, whatever moves its chunks.

    by request  an order goes by what ``OffloadUse`` says of a request until it has finished: touch, want, finish
    by use      or by each use: look_up, begin_read, end_read, end_write (``offload_order_by_use``)
    """

    @property
    @abstractmethod
    def pages(self) -> int:
        """Number of stored chunks."""

    @abstractmethod
    def held(self) -> list[Extent]:
        """Return the stored chunks, in any order."""

    @abstractmethod
    def find(self, runs: Iterable[Extent]) -> Seen:
        """Cut the whole path into stored (True) and missing (False) pieces."""

    @abstractmethod
    def leading(self, runs: Iterable[Extent]) -> list[Extent]:
        """Return the pieces of the path that are stored, up to the first that is missing."""

    def may_evict(self, pages: int, keep: list[Extent]) -> bool:
        """Whether ``pages`` chunks can be evicted, none of ``keep``, which are stored."""
        return pages <= self.pages - count_pages(keep)

    @abstractmethod
    def evict(self, pages: int, keep: list[Extent]) -> list[Extent]:
        """Evict exactly ``pages`` chunks, none of ``keep``; the caller has asked ``may_evict``. Returns them.

        ``keep`` is in the order of the chunks' ids, each once, as ``union`` returns it.
        """

    @abstractmethod
    def store(self, use: OffloadUse, chunks: Placed) -> None:
        """Add the chunks that a request stores; it has wanted them."""

    def touch(self, use: OffloadUse, chunks: Placed) -> None:
        """Record that a request loads chunks, or is offered chunks that are ready."""

    def want(self, use: OffloadUse, chunks: Placed) -> None:
        """Record that a request wants to store chunks; whether they find room is not known yet."""

    def finish(self, use: OffloadUse) -> None:
        """Record that a request has finished; some of its chunks may have left."""

    def look_up(self, path: Sequence[Extent]) -> None:
        """Record that a request has been looked up, or has just begun to store chunks; ``path`` are its chunks, head to tail."""

    def begin_read(self, chunks: Sequence[Extent]) -> None:
        """Record that chunks which nobody read are being loaded."""

    def end_read(self, chunks: Sequence[Extent]) -> None:
        """Record that chunks have been loaded, and nobody else loads them."""

    def end_write(self, chunks: Sequence[Extent]) -> None:
        """Record that chunks have been stored and are ready."""


class LruOffload(OffloadOrder):
    """LRU over requests: chunks rank by a number, then tail before head.

    A request draws its number when it first uses a chunk, and a later one when it finishes. Chunks take the number of the last
    request that has used them, if it is higher than theirs. So chunks of requests that still run rank by when these began.
    """

    def __init__(self) -> None:
        self._drawn = 0
        self._numbers = ExtentOrder()
        """The chunks with their numbers."""
        self._by_number: dict[int, Placed] = {}
        """Chunks that were given a number; those that have another one now no longer count."""
        self._lowest: list[int] = []
        """A heap of the numbers."""

    @property
    def pages(self) -> int:
        return self._numbers.pages

    def held(self) -> list[Extent]:
        return [run for run, _, _ in self._numbers.oldest_first()]

    def find(self, runs: Iterable[Extent]) -> Seen:
        return [(run, here is not None) for run, here in self._numbers.pieces(runs)]

    def leading(self, runs: Iterable[Extent]) -> list[Extent]:
        return self._numbers.leading(runs)

    def touch(self, use: OffloadUse, chunks: Placed) -> None:
        number = self._number_of(use)
        for run, place in chunks:
            for new in use.note(run, REUSED):
                for part, older in self._numbers.pieces((new,)):
                    if older is not None and older < number:
                        self._put(part, place + part[0] - run[0], number)

    def want(self, use: OffloadUse, chunks: Placed) -> None:
        self._number_of(use)
        for run, _ in chunks:
            use.note(run, WANTED)

    def store(self, use: OffloadUse, chunks: Placed) -> None:
        for run, place in chunks:
            self._put(run, place, use.number)

    def finish(self, use: OffloadUse) -> None:
        self._drawn += 1
        for run, place, _ in use.used():
            for part, here in self.find((run,)):
                if here:
                    self._put(part, place + part[0] - run[0], self._drawn)

    def evict(self, pages: int, keep: list[Extent]) -> list[Extent]:
        evicted: list[Extent] = []
        passed: list[int] = []
        while pages > 0:
            number = self._lowest[0]
            chunks = self._by_number[number]
            chunks.sort(key=_place)
            left: Placed = []
            while chunks and pages > 0:
                run, place = chunks.pop()
                for part, other in self._numbers.pieces((run,))[::-1]:
                    for piece, is_kept in parts_by(part, keep)[::-1] if other == number else ():
                        taken = 0 if is_kept else min(pages, piece[1])
                        pages -= taken
                        if taken:
                            evicted.append((piece[0] + piece[1] - taken, taken))
                            self._numbers.remove(evicted[-1:])
                        if taken < piece[1]:
                            left.append(((piece[0], piece[1] - taken), place + piece[0] - run[0]))
            chunks += left
            if pages > 0:
                heappop(self._lowest)
                if chunks:
                    passed.append(number)
                else:
                    del self._by_number[number]
        for number in passed:
            heappush(self._lowest, number)
        return evicted

    def _number_of(self, use: OffloadUse) -> int:
        if not use.number:
            self._drawn += 1
            use.number = self._drawn
        return use.number

    def _put(self, run: Extent, place: int, number: int) -> None:
        """Give chunks a number."""
        self._numbers.append((run,), tail_first=False, value=number)
        if number not in self._by_number:
            self._by_number[number] = []
            heappush(self._lowest, number)
        self._by_number[number].append((run, place))


def _place(chunks: tuple[Extent, int]) -> int:
    return chunks[1]


class ArcOffload(OffloadOrder):
    """ARC over single chunks (Megiddo and Modha, FAST 2003), as vLLM adapts it to requests.

    once, again     chunks that one request brought; chunks that a later request reused, moved here when it finishes
    ghosts of each  chunks evicted from it, up to the capacity; a ghost is removed when its chunk is stored again
    target          chunks that ``once`` should have. A chunk to be stored adds max(1, ghosts of again / ghosts of once) if it
                    is a ghost of ``once``, and subtracts max(1, the inverse) if it is a ghost of ``again``, once a request
    evict           from ``once`` while it has at least int(target) chunks, else from ``again``; from the other list if only
                    chunks that must be kept are left
    """

    def __init__(self, capacity_pages: int) -> None:
        self.target = 0.0
        self._capacity = capacity_pages
        self.once, self.again = ExtentOrder(), ExtentOrder()
        self.once_ghosts, self.again_ghosts = ExtentOrder(), ExtentOrder()

    @property
    def pages(self) -> int:
        return self.once.pages + self.again.pages

    @property
    def surplus(self) -> int:
        """How many chunks leave ``once`` before one leaves ``again``."""
        return max(0, self.once.pages - int(self.target) + 1)

    def held(self) -> list[Extent]:
        return [run for order in (self.once, self.again) for run, _, _ in order.oldest_first()]

    def find(self, runs: Iterable[Extent]) -> Seen:
        return [(run, here is not None) for run, here, _ in pieces_of_two(self.once, self.again, runs)]

    def leading(self, runs: Iterable[Extent]) -> list[Extent]:
        return [run for run, _ in takewhile(lambda found: found[1], self.find(runs))]

    def touch(self, use: OffloadUse, chunks: Placed) -> None:
        for run, _ in chunks:
            use.note(run, REUSED)

    def want(self, use: OffloadUse, chunks: Placed) -> None:
        wanted: list[Extent] = []
        for run, _ in chunks:
            use.note(run, WANTED)
            wanted += [part for part, adapted in use.adapted.pieces((run,)) if adapted is None]
        use.adapted.append(wanted)
        once, again = self.once_ghosts.pages, self.again_ghosts.pages
        for (_, pages), ghost, is_once in reversed(pieces_of_two(self.once_ghosts, self.again_ghosts, wanted)):
            if ghost and is_once:
                self.target = add_repeatedly(self.target, max(1.0, again / once), pages, most=self._capacity)
            elif ghost:
                self.target = add_repeatedly(self.target, -max(1.0, once / again), pages, most=self._capacity)
        self.once_ghosts.touch(wanted)
        self.again_ghosts.touch(wanted)

    def evict(self, pages: int, keep: list[Extent]) -> list[Extent]:
        once, again = self.once, self.again
        from_once = min(pages, self.surplus, once.pages - once.count(keep))
        from_again = min(pages - from_once, again.pages - again.count(keep))
        evicted = once.move_oldest(pages - from_again, self.once_ghosts, keep=keep)
        evicted += again.move_oldest(from_again, self.again_ghosts, keep=keep)
        for ghosts in (self.once_ghosts, self.again_ghosts):
            ghosts.pop_oldest(ghosts.pages - self._capacity)
        return evicted

    def store(self, use: OffloadUse, chunks: Placed) -> None:
        stored = [run for run, _ in chunks]
        for run in stored:
            use.note(run, STORED)
        self.once.append(stored, tail_first=False)
        self.once_ghosts.remove(stored)
        self.again_ghosts.remove(stored)

    def finish(self, use: OffloadUse) -> None:
        for run, _, what in reversed(use.used()):
            if what == REUSED:
                still_here = [part for part, here in self.find((run,)) if here]
                self.once.remove(still_here)
                self.again.remove(still_here)
                self.again.append(still_here)
            elif what == STORED:
                self.once.touch((run,))
                self.again.touch((run,))


def pieces_of_two(one: ExtentOrder, other: ExtentOrder, runs: Iterable[Extent]) -> list[tuple[Extent, object, bool]]:
    """Cut a path into (run, value or None if neither order has it, whether ``one`` has it). No page is in both orders."""
    pieces: list[tuple[Extent, object, bool]] = []
    for run, here in one.pieces(runs):
        if here is not None:
            pieces.append((run, here, True))
        else:
            pieces += [(part, there, False) for part, there in other.pieces((run,))]
    return pieces


def add_repeatedly(value: float, step: float, times: int, *, most: float) -> float:
    """Return the result of ``times`` times ``value += step``, kept in 0 ... ``most``, rounded as a loop would, but without one.

    Floats between two powers of two are equally spaced. There, every sum but the first is rounded alike (a tie goes to an even
    number, and from then on to even ones), so all steps up to the next power of two have the same length.
    """
    alike = 0
    while times > 0 and 0.0 <= value + step <= most:
        following = value + step
        times -= 1
        alike = alike + 1 if frexp(following)[1] == frexp(value)[1] else 0
        length, value = following - value, following
        if alike < 2:
            continue
        top, spacing = ldexp(1.0, frexp(value)[1]), ulp(value)
        room = top - value if length > 0 else value - top / 2
        leap = min(times, max(0, int(room / spacing) - 1) // int(abs(length) / spacing))
        value += leap * length
        times -= leap
    if times > 0:
        value += step
    return min(max(value, 0.0), most)
