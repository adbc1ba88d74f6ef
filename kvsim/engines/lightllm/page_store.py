"""LightLLM's CPU cache: single pages, which are evicted in the order in which they were last given back."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvsim.core.tier import Edge
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, count_pages, every_last, split_extents


class Stored(NamedTuple):
    """The CPU pages that a request holds while its prompt is stored, and those of them that are copied, both from page 0 on."""

    held: tuple[Extent, ...]
    copied: tuple[Extent, ...]


NOT_STORED = Stored((), ())

Holding = tuple[int, bool]
"""How many look-ups and stores hold a page, and whether it is ready: copied, so that a look-up can find it."""
IDLE: Final[Holding] = (0, True)
MISSING: Final[Holding] = (0, False)


class PageStore:
    """The CPU tier. Pages have no parents. A prompt gives its pages back from page 0 on, so it is lost from its front.

    find    the leading pages that are ready; whoever holds them keeps them from being evicted
    store   page by page from page 0: a stored page is held, and a missing one replaces the oldest page that nobody holds,
            perhaps a later page of the same prompt; without one, this page and all after it are not stored. What is not ready
            is copied, even if another request copies it too
    idle    stored pages that nobody holds can be evicted, those given back longest ago first

    A page is ``tier.unit_pages`` pages of the GPU. In these methods, it is identified by the last of them (``named``).
    """

    def __init__(self, edge: Edge) -> None:
        tier = edge.lower
        self.tier = tier
        self.no_room_pages = 0
        """GPU pages that were not stored because every page was held."""
        self._idle = ExtentOrder()
        """Ready pages that nobody holds, oldest first."""
        self._taken = ExtentOrder()
        """Pages that are held, each with its ``Holding``."""
        self._slots = tier.store(0)
        """Slots of all stored pages together."""

    def named(self, extents: tuple[Extent, ...], pages: int) -> tuple[Extent, ...]:
        """Return the CPU pages that lie within the first ``pages`` GPU pages of a path."""
        unit = self.tier.unit_pages
        whole = split_extents(extents, pages - pages % unit)[0]
        return whole if unit == 1 else tuple(every_last(whole, unit))

    # --- look-ups ------------------------------------------------------------------------------------------------------------

    def find(self, extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
        """Return the leading pages that are ready."""
        if not self._taken.pages:
            return split_extents(extents, self._idle.leading_pages(extents))[0]
        found = 0
        for (_, pages), holding in self._pieces(extents):
            if not holding[1]:
                break
            found += pages
        return split_extents(extents, found)[0]

    def hold(self, found: tuple[Extent, ...]) -> None:
        """Keep the pages of a look-up from being evicted until they are given back."""
        for extent, holding in self._pieces(found):
            self._hold(extent, holding)

    def give_back(self, held: Iterable[Extent]) -> None:
        """Give back pages: those that nobody else holds become the most recent, page 0 the oldest of them, if they are ready.

        A page that is not ready, since its copy has failed, is dropped.
        """
        for extent, (holders, is_ready) in self._taken.pieces(held):
            if holders > 1:
                self._taken.append((extent,), value=(holders - 1, is_ready))
                continue
            self._taken.remove((extent,))
            if is_ready:
                self._idle.append((extent,), tail_first=False)
            else:
                self._drop(extent[1])

    # --- stores --------------------------------------------------------------------------------------------------------------

    def store(self, extents: tuple[Extent, ...]) -> Stored:
        """Hold as many leading pages of a prompt as fit, those that are missing in slots of their own."""
        idle, unit, pool = self._idle, self.tier.unit_pages, self.tier.pool
        held, copied = list[Extent](), list[Extent]()
        at, pieces = 0, self._pieces(extents)
        while at < len(pieces):
            extent, holding = pieces[at]
            start, pages = extent
            at += 1
            fitting = pages
            if holding == MISSING:
                free = pool.free // unit
                fitting = min(pages, free + idle.pages)
                if fitting > free:
                    self._evict(fitting - free)
                    at, pieces = 0, self._pieces([later for later, _ in pieces[at:]])
                extent = start, fitting
                self._slots = pool.join(self._slots, self.tier.store(fitting * unit))
            if fitting:
                self._hold(extent, holding)
                held.append(extent)
                if not holding[1]:
                    copied.append(extent)
            if fitting < pages:
                self.no_room_pages += unit * (pages - fitting + count_pages([later for later, _ in pieces[at:]]))
                break
        return Stored(tuple(held), tuple(copied))

    def end_store(self, stored: Stored, pages: int) -> None:
        """End a store of which the first ``pages`` pages to copy have been copied: others can find them from now on."""
        for extent, (holders, is_ready) in self._taken.pieces(split_extents(stored.copied, pages)[0]):
            if not is_ready:
                self._taken.append((extent,), value=(holders, True))
        self.give_back(stored.held)

    def clear(self) -> None:
        """Drop every page, held or not. What look-ups and stores hold is not to be given back any more."""
        self._idle, self._taken = ExtentOrder(), ExtentOrder()
        self.tier.drop(self._slots)
        self._slots = self.tier.store(0)

    # --- pages ---------------------------------------------------------------------------------------------------------------

    def _pieces(self, extents: Iterable[Extent]) -> list[tuple[Extent, Holding]]:
        """Cut a path into pieces that are held alike; idle pages are held by none and ready."""
        pieces: list[tuple[Extent, Holding]] = []
        for extent, is_idle in self._idle.pieces(extents):
            if is_idle is not None:
                pieces.append((extent, IDLE))
            elif self._taken.pages:
                pieces += [(part, holding or MISSING) for part, holding in self._taken.pieces((extent,))]
            else:
                pieces.append((extent, MISSING))
        return pieces

    def _hold(self, extent: Extent, holding: Holding) -> None:
        """Hold pages once more."""
        holders, is_ready = holding
        if holding == IDLE:
            self._idle.remove((extent,))
        self._taken.append((extent,), tail_first=False, value=(holders + 1, is_ready))

    def _evict(self, pages: int) -> None:
        self._idle.pop_oldest(pages)
        self._drop(pages)

    def _drop(self, pages: int) -> None:
        """Free the slots of pages that are not stored any more."""
        freed, self._slots = self.tier.pool.split(self._slots, pages * self.tier.unit_pages)
        self.tier.drop(freed)

    def check(self, holds: Iterable[tuple[Extent, ...]]) -> None:
        """Raise AssertionError unless exactly these sets of pages are held, and every stored page has its slots."""
        held: dict[int, int] = {}
        for extents in holds:
            for start, pages in extents:
                for page in range(start, start + pages):
                    held[page] = held.get(page, 0) + 1
        for extent, _, (holders, _) in self._taken.oldest_first():
            for page in range(extent[0], extent[0] + extent[1]):
                assert held.pop(page, 0) == holders, f"page {page} of the CPU is held by {holders}"
                assert page not in self._idle, f"page {page} of the CPU is held and idle"
        assert not held, f"pages {list(held)} of the CPU are held and not stored"
        stored, pool = (self._idle.pages + self._taken.pages) * self.tier.unit_pages, self.tier.pool
        assert pool.capacity - pool.free == stored == pool.count(self._slots) == self.tier.held_pages, "slots of the CPU are lost"
