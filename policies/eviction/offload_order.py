"""Orders of single pages, for vLLM's CPU offloading tier: what an eviction policy is there.

Pages have no parents in that tier: any page may be stored or evicted. A request's pages are handled in runs.
"""

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable
from math import frexp, ldexp, ulp

from kvsim.core.run_order import RunOrder
from kvsim.core.runs import Run

Seen = list[tuple[Run, bool]]
"""The part of a path that matters to the tier, from head to tail: pages that were there (True) and pages to be stored (False)."""


class OffloadOrder(metaclass=ABCMeta):
    """Which pages the tier has, and which leave first. One request's calls, in this order: offer, evict, store; later finish."""

    @property
    @abstractmethod
    def pages(self) -> int:
        """How many pages are here."""

    @abstractmethod
    def find(self, runs: Iterable[Run]) -> Seen:
        """The whole path, cut into pieces that are here or not."""

    @abstractmethod
    def offer(self, seen: Seen) -> None:
        """A request has come. It is not known yet whether there is room for what it wants to store."""

    @abstractmethod
    def evict(self, pages: int, keep: list[Run]) -> None:
        """Take out so many pages, none of ``keep``. There are as many."""

    @abstractmethod
    def store(self, seen: Seen) -> None:
        """The pages to be stored are here now."""

    @abstractmethod
    def finish(self, seen: Seen, is_stored: bool) -> None:
        """The request has finished; ``is_stored`` says whether its pages found room. Some of ``seen`` may have left."""


class LruOffload(OffloadOrder):
    """LRU. A request's pages become the most recent when it comes and again when it finishes, its tail before its head."""

    def __init__(self) -> None:
        self.order = RunOrder()

    @property
    def pages(self) -> int:
        return self.order.pages

    def find(self, runs: Iterable[Run]) -> Seen:
        return [(run, here is not None) for run, here in self.order.pieces(runs)]

    def offer(self, seen: Seen) -> None:
        self.order.touch([run for run, was_here in seen if was_here])

    def evict(self, pages: int, keep: list[Run]) -> None:
        self.order.pop_oldest(pages)  # what is kept is the most recent, by ``offer``

    def store(self, seen: Seen) -> None:
        self.order.append([run for run, _ in seen])

    def finish(self, seen: Seen, is_stored: bool) -> None:
        self.order.touch([run for run, _ in seen])


class ArcOffload(OffloadOrder):
    """ARC over single pages (Megiddo and Modha, FAST 2003), as vLLM adapts it to requests.

    once, again     pages that one request brought; pages that a later one reused: moved there when that one finishes
    ghosts of each  what was evicted from it, up to the capacity; kept until they are stored again
    target          pages that ``once`` should have: a page to be stored that is a ghost of ``once`` adds
                    max(1, ghosts of again / ghosts of once), one of ``again`` takes max(1, the inverse)
    evict           from ``once`` while it has int(target) pages or more, else from ``again``; from the other if only pages
                    that must be kept are left
    """

    def __init__(self, capacity_pages: int) -> None:
        self.target = 0.0
        self._capacity = capacity_pages
        self.once, self.again = RunOrder(), RunOrder()
        self.once_ghosts, self.again_ghosts = RunOrder(), RunOrder()

    @property
    def pages(self) -> int:
        return self.once.pages + self.again.pages

    def find(self, runs: Iterable[Run]) -> Seen:
        return [(run, here is not None) for run, here, _ in _pieces_of_two(self.once, self.again, runs)]

    def offer(self, seen: Seen) -> None:
        wanted = [run for run, was_here in seen if not was_here]
        once, again = self.once_ghosts.pages, self.again_ghosts.pages
        for (_, pages), ghost, is_once in reversed(_pieces_of_two(self.once_ghosts, self.again_ghosts, wanted)):
            if ghost and is_once:
                self.target = add_repeatedly(self.target, max(1.0, again / once), pages, most=self._capacity)
            elif ghost:
                self.target = add_repeatedly(self.target, -max(1.0, once / again), pages, most=self._capacity)
        self.once_ghosts.touch(wanted)
        self.again_ghosts.touch(wanted)

    def evict(self, pages: int, keep: list[Run]) -> None:
        once, again = self.once, self.again
        surplus = max(0, once.pages - int(self.target) + 1)
        from_once = min(pages, surplus, once.pages - once.count(keep))
        from_again = min(pages - from_once, again.pages - again.count(keep))
        once.move_oldest(pages - from_again, self.once_ghosts, keep=keep)
        again.move_oldest(from_again, self.again_ghosts, keep=keep)
        for ghosts in (self.once_ghosts, self.again_ghosts):
            ghosts.pop_oldest(ghosts.pages - self._capacity)

    def store(self, seen: Seen) -> None:
        stored = [run for run, was_here in seen if not was_here]
        self.once.append(stored, tail_first=False)
        self.once_ghosts.remove(stored)
        self.again_ghosts.remove(stored)

    def finish(self, seen: Seen, is_stored: bool) -> None:
        for run, was_here in reversed(seen):
            if was_here:
                still_here = [part for part, here in self.find((run,)) if here]
                self.once.remove(still_here)
                self.again.append(still_here)
            elif is_stored:
                self.once.touch((run,))
                self.again.touch((run,))


def _pieces_of_two(one: RunOrder, other: RunOrder, runs: Iterable[Run]) -> list[tuple[Run, object, bool]]:
    """A path in pieces: (run, None if neither has it, whether ``one`` has it). No page is in both."""
    pieces: list[tuple[Run, object, bool]] = []
    for run, here in one.pieces(runs):
        if here is not None:
            pieces.append((run, here, True))
        else:
            pieces += [(part, there, False) for part, there in other.pieces((run,))]
    return pieces


def add_repeatedly(value: float, step: float, times: int, *, most: float) -> float:
    """``value += step``, so many times, kept in 0 ... ``most``, with the rounding of each sum: what a loop gives, without one.

    Between two powers of two floats are equally spaced. There every sum but the first is rounded alike (a tie goes to an even
    number, and stays with even ones), so all steps on the way to the next power of two have the same length.
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
