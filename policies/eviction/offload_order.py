"""Orders of single pages for vLLM's CPU offloading tier, where they take the place of eviction policies.

Pages have no parents in that tier: any page may be stored or evicted. A request's pages are handled as extents.
"""

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable
from math import frexp, ldexp, ulp

from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent

Seen = list[tuple[Extent, bool]]
"""The part of a path that concerns the tier, head to tail: pages that were stored (True) or are to be stored (False)."""


class OffloadOrder(metaclass=ABCMeta):
    """Tracks which pages the tier has and which leave first. Each request calls offer, evict and store, and later finish."""

    @property
    @abstractmethod
    def pages(self) -> int:
        """Number of stored pages."""

    @abstractmethod
    def find(self, extents: Iterable[Extent]) -> Seen:
        """Cut the whole path into stored (True) and missing (False) pieces."""

    @abstractmethod
    def offer(self, seen: Seen) -> None:
        """Record the pages that a request uses and wants to store; whether these find room is not known yet."""

    @abstractmethod
    def evict(self, pages: int, keep: list[Extent]) -> None:
        """Evict exactly ``pages`` pages, none of ``keep``; the caller has checked that they exist."""

    @abstractmethod
    def store(self, seen: Seen) -> None:
        """Add the pages to be stored."""

    @abstractmethod
    def finish(self, seen: Seen, is_stored: bool) -> None:
        """Record that the request has finished. ``is_stored`` says whether its pages found room; some may have left since."""


class LruOffload(OffloadOrder):
    """LRU. A request's pages become the most recent when they are offered and again when it finishes, tail before head."""

    def __init__(self) -> None:
        self.order = ExtentOrder()

    @property
    def pages(self) -> int:
        return self.order.pages

    def find(self, extents: Iterable[Extent]) -> Seen:
        return [(extent, here is not None) for extent, here in self.order.pieces(extents)]

    def offer(self, seen: Seen) -> None:
        self.order.touch([extent for extent, was_here in seen if was_here])

    def evict(self, pages: int, keep: list[Extent]) -> None:
        self.order.pop_oldest(pages)  # ``offer`` has made ``keep`` the most recent

    def store(self, seen: Seen) -> None:
        self.order.append([extent for extent, _ in seen])

    def finish(self, seen: Seen, is_stored: bool) -> None:
        self.order.touch([extent for extent, _ in seen])


class ArcOffload(OffloadOrder):
    """ARC over single pages (Megiddo and Modha, FAST 2003), as vLLM adapts it to requests.

    once, again     pages that one request brought; pages that a later request reused, moved here when it finishes
    ghosts of each  pages evicted from it, up to the capacity; a ghost is removed when its page is stored again
    target          pages that ``once`` should have. A page to be stored adds max(1, ghosts of again / ghosts of once) if it
                    is a ghost of ``once``, and subtracts max(1, the inverse) if it is a ghost of ``again``
    evict           from ``once`` while it has at least int(target) pages, else from ``again``; from the other list if only
                    pages that must be kept are left
    """

    def __init__(self, capacity_pages: int) -> None:
        self.target = 0.0
        self._capacity = capacity_pages
        self.once, self.again = ExtentOrder(), ExtentOrder()
        self.once_ghosts, self.again_ghosts = ExtentOrder(), ExtentOrder()

    @property
    def pages(self) -> int:
        return self.once.pages + self.again.pages

    def find(self, extents: Iterable[Extent]) -> Seen:
        return [(extent, here is not None) for extent, here, _ in _pieces_of_two(self.once, self.again, extents)]

    def offer(self, seen: Seen) -> None:
        wanted = [extent for extent, was_here in seen if not was_here]
        once, again = self.once_ghosts.pages, self.again_ghosts.pages
        for (_, pages), ghost, is_once in reversed(_pieces_of_two(self.once_ghosts, self.again_ghosts, wanted)):
            if ghost and is_once:
                self.target = add_repeatedly(self.target, max(1.0, again / once), pages, most=self._capacity)
            elif ghost:
                self.target = add_repeatedly(self.target, -max(1.0, once / again), pages, most=self._capacity)
        self.once_ghosts.touch(wanted)
        self.again_ghosts.touch(wanted)

    def evict(self, pages: int, keep: list[Extent]) -> None:
        once, again = self.once, self.again
        surplus = max(0, once.pages - int(self.target) + 1)
        from_once = min(pages, surplus, once.pages - once.count(keep))
        from_again = min(pages - from_once, again.pages - again.count(keep))
        once.move_oldest(pages - from_again, self.once_ghosts, keep=keep)
        again.move_oldest(from_again, self.again_ghosts, keep=keep)
        for ghosts in (self.once_ghosts, self.again_ghosts):
            ghosts.pop_oldest(ghosts.pages - self._capacity)

    def store(self, seen: Seen) -> None:
        stored = [extent for extent, was_here in seen if not was_here]
        self.once.append(stored, tail_first=False)
        self.once_ghosts.remove(stored)
        self.again_ghosts.remove(stored)

    def finish(self, seen: Seen, is_stored: bool) -> None:
        for extent, was_here in reversed(seen):
            if was_here:
                still_here = [part for part, here in self.find((extent,)) if here]
                self.once.remove(still_here)
                self.again.append(still_here)
            elif is_stored:
                self.once.touch((extent,))
                self.again.touch((extent,))


def _pieces_of_two(one: ExtentOrder, other: ExtentOrder, extents: Iterable[Extent]) -> list[tuple[Extent, object, bool]]:
    """Cut a path into (extent, value or None if neither order has it, whether ``one`` has it). No page is in both orders."""
    pieces: list[tuple[Extent, object, bool]] = []
    for extent, here in one.pieces(extents):
        if here is not None:
            pieces.append((extent, here, True))
        else:
            pieces += [(part, there, False) for part, there in other.pieces((extent,))]
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
