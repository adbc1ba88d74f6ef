"""vLLM's CPU offloading tier: pages one by one, offered by every request, in an order that the eviction policy chooses.

Pages here have no parents: any page may be stored or evicted. A request's pages are handled in runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import frexp, ldexp, ulp
from typing import NamedTuple

from kvsim.core.pages import Run, count_pages, split_runs
from kvsim.core.run_order import RunOrder
from kvsim.core.tier import Tier

Seen = list[tuple[Run, bool]]
"""The part of a path that matters to the tier, from head to tail: pages that were there (True) and pages to be stored (False)."""


class OffloadOrder(ABC):
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


class OfferTable:
    """How often pages have been offered: a table of limited size whose least recently offered pages go first.

    threshold  a page is admitted from its ``threshold``-th offer on; 0 and 1 admit all pages, and none is counted
    capacity   new pages of an offer that exceed it, less the known ones of the offer, are not counted
    """

    def __init__(self, threshold: int, capacity_pages: int) -> None:
        self.threshold = threshold
        self.capacity = capacity_pages
        self.known = RunOrder()
        """Pages with the number of their offers, the threshold at most."""

    def proven_pages(self, runs: tuple[Run, ...]) -> int:
        """How many pages from the first on the offers that are counted have brought to the threshold."""
        if self.threshold < 2:
            return count_pages(runs)
        proven = 0
        for (_, pages), offers in self.known.pieces(runs):
            if offers is None or offers < self.threshold:
                break
            proven += pages
        return proven

    def count(self, runs: tuple[Run, ...]) -> None:
        """Count an offer. Its known pages become the most recent, and then the new ones; counts end at the threshold."""
        if self.threshold < 2:
            return
        pieces = self.known.pieces(runs)
        known_pages = 0
        for run, offers in pieces:
            if offers is not None:
                known_pages += run[1]
                self.known.append((run,), tail_first=False, value=min(offers + 1, self.threshold))
        new = tuple([run for run, offers in pieces if offers is None])
        self.known.append(split_runs(new, self.capacity - known_pages)[0], tail_first=False, value=1)
        self.known.pop_oldest(self.known.pages - self.capacity)

    def pieces(self, runs: Iterable[Run]) -> list[tuple[Run, bool]]:
        """A path that has been counted, cut into pieces that have been offered often enough or not."""
        if self.threshold < 2:
            return [(run, True) for run in runs]
        return [(run, offers == self.threshold) for run, offers in self.known.pieces(runs)]


@dataclass(slots=True)
class OffloadCounts:
    """What became of pages that were loaded or offered."""

    loaded_pages: int = 0
    """Brought to the GPU."""
    written_pages: int = 0
    """Stored in CPU memory."""
    below_threshold_pages: int = 0
    """Offered, and not stored since they had not been offered often enough."""
    no_room_pages: int = 0
    """To be stored, but others could not be evicted for all pages of the store."""


class OffloadUse(NamedTuple):
    """What one request has been to the tier."""

    loaded_pages: int
    seen: Seen
    is_stored: bool


class OffloadTier:
    """The CPU tier: loads what follows the GPU's hit and stores what is offered. A store that does not fit is dropped whole.

    The tier's eviction policy provides the order (``offload_order``), its placement policy the table of offers
    (``offer_table``); both raise ValueError if they have none.
    """

    def __init__(self, tier: Tier, counts: OffloadCounts) -> None:
        assert tier.placement is not None
        self.tier = tier
        self.counts = counts
        self.order: OffloadOrder = tier.eviction.offload_order(tier.pool.capacity)
        self.offers: OfferTable = tier.placement.offer_table()
        self._slots = tier.pool.take(0)
        """Of all pages together."""

    def use(self, runs: tuple[Run, ...], hit_pages: int, usable_pages: int) -> OffloadUse:
        """Serve an admitted prompt. Its first ``hit_pages`` pages are on the GPU, and ``usable_pages`` at most may be reused.

        Loads end at the first page that is not here. With a load, the pages after it are offered; without one, all are.
        """
        head, offered = split_runs(runs, hit_pages)
        pieces = self.order.find(offered)
        loaded_pages = 0
        for (_, pages), here in pieces:
            if not here:
                break
            loaded_pages += pages
        loaded_pages = min(loaded_pages, usable_pages - hit_pages)
        if loaded_pages:
            offered = split_runs(offered, loaded_pages)[1]
        else:
            pieces, offered = self.order.find(head) + pieces, runs
        self.counts.loaded_pages += loaded_pages
        self.offers.count(offered)
        seen = self._admit(pieces)
        return OffloadUse(loaded_pages, seen, self._store(seen))

    def finish(self, use: OffloadUse) -> None:
        """A request has finished: what it used becomes the most recent."""
        self.order.finish(use.seen, use.is_stored)

    def _admit(self, pieces: Seen) -> Seen:
        """The pieces without what is missing and has not been offered often enough."""
        if self.offers.threshold < 2:
            return pieces
        seen: Seen = []
        for run, here in pieces:
            if here:
                seen.append((run, True))
                continue
            admitted = [part for part, is_admitted in self.offers.pieces((run,)) if is_admitted]
            seen += [(part, False) for part in admitted]
            self.counts.below_threshold_pages += run[1] - count_pages(admitted)
        return seen

    def _store(self, seen: Seen) -> bool:
        """Make room for all missing pages and store them. False, and nothing is stored, if there is not enough to evict."""
        order, tier, pool = self.order, self.tier, self.tier.pool
        order.offer(seen)
        keep = [run for run, was_here in seen if was_here]
        pages = sum([run[1] for run, was_here in seen if not was_here])
        missing = pages - pool.free
        if missing > order.pages - count_pages(keep):
            self.counts.no_room_pages += pages
            return False
        if missing > 0:
            order.evict(missing, keep)
            freed, self._slots = pool.split(self._slots, missing)
            pool.give(freed)
            tier.evicted_pages += missing
        self._slots = pool.join(self._slots, pool.take(pages))
        order.store(seen)
        tier.inserted_pages += pages
        self.counts.written_pages += pages
        return True
