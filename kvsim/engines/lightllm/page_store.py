"""LightLLM's CPU cache: single pages, which are evicted in the order in which they were last given back."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from kvsim.core.tier import Edge
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, count_pages, every_last, pages_named, split_extents


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

    find    the leading pages that are ready, which are then held
    store   page by page from page 0: a stored page is held, and a missing one replaces the oldest page that nobody holds,
            perhaps a later page of the same prompt; without one, this page and all after it are not stored. What is not ready
            is copied, even if another request copies it too
    evict   pages that nobody holds, those given back longest ago first

    A page is ``tier.unit_pages`` pages of the GPU. In these methods, it is identified by the last of them (``named``).
    """

    def __init__(self, edge: Edge) -> None:
        tier = edge.lower
        self.tier = tier
        self.no_room_pages = 0
        """GPU pages that were not stored because every page was held."""
        self._pages = ExtentOrder()
        """Stored pages, each with its ``Holding``; those that nobody holds in the order in which they leave."""
        self._held_pages = 0
        self._places = tier.pool.places(tier.unit_pages)
        """The slots of all stored pages."""

    def named(self, extents: tuple[Extent, ...], pages: int) -> tuple[Extent, ...]:
        """Return the CPU pages that lie within the first ``pages`` GPU pages of a path."""
        unit = self.tier.unit_pages
        whole = split_extents(extents, pages - pages % unit)[0]
        return whole if unit == 1 else tuple(every_last(whole, unit))

    # --- look-ups ------------------------------------------------------------------------------------------------------------

    def find(self, extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
        """Return the leading pages that are ready, held from now on until they are given back."""
        found = list[Extent]()
        for extent, holding in self._pieces(extents):
            if not holding[1]:
                break
            self._hold(extent, holding)
            found.append(extent)
        return tuple(found)

    def give_back(self, held: Iterable[Extent], *, are_ready: bool = False) -> None:
        """Give back pages. With ``are_ready``, all of them are from now on: what was missing has been copied.

        Those that nobody else holds become the most recent, page 0 the oldest of them; one that is not ready is dropped.
        """
        for extent, (holders, is_ready) in self._pages.pieces(held):
            is_ready |= are_ready
            if holders > 1:
                self._pages.mark((extent,), (holders - 1, is_ready))
                continue
            self._held_pages -= extent[1]
            if is_ready:
                self._pages.append((extent,), tail_first=False, value=IDLE)
            else:
                self._pages.remove((extent,))
                self._drop(extent)

    # --- stores --------------------------------------------------------------------------------------------------------------

    def store(self, extents: tuple[Extent, ...]) -> Stored:
        """Hold as many leading pages of a prompt as fit, those that are missing in slots of their own."""
        unit, pool = self.tier.unit_pages, self.tier.pool
        held, copied = list[Extent](), list[Extent]()
        at, pieces = 0, self._pieces(extents)
        while at < len(pieces):
            extent, holding = pieces[at]
            start, pages = extent
            at += 1
            fitting = pages
            if holding == MISSING:
                free = pool.free // unit
                fitting = min(pages, free + self.idle_pages)
                if fitting > free:
                    self._evict(fitting - free)
                    at, pieces = 0, self._pieces([later for later, _ in pieces[at:]])
                extent = start, fitting
            if fitting:
                self._hold(extent, holding)
                held.append(extent)
                if not holding[1]:
                    copied.append(extent)
            if fitting < pages:
                self.no_room_pages += unit * (pages - fitting + count_pages([later for later, _ in pieces[at:]]))
                break
        return Stored(tuple(held), tuple(copied))

    def clear(self) -> None:
        """Drop every page, held or not. What look-ups and stores hold is not to be given back any more."""
        self._pages, self._held_pages = ExtentOrder(), 0
        self.tier.drop(self._places.pop_all())

    # --- pages ---------------------------------------------------------------------------------------------------------------

    @property
    def idle_pages(self) -> int:
        """Number of stored pages that nobody holds."""
        return self._pages.pages - self._held_pages

    def held(self) -> list[Extent]:
        """Return the GPU pages that identify the stored pages, in any order."""
        return list(pages_named([extent for extent, _, _ in self._pages.oldest_first()], self.tier.unit_pages))

    def idle(self) -> list[Extent]:
        """Return the pages that nobody holds, the next to leave first."""
        return [extent for extent, _, (holders, _) in self._pages.oldest_first() if not holders]

    def slots_of(self, held: Iterable[Extent]) -> Any:
        """Return the slots of pages that are held, page by page."""
        return self._places.at(held)

    def _pieces(self, extents: Iterable[Extent]) -> list[tuple[Extent, Holding]]:
        """Cut a path into pieces that are held alike."""
        return [(extent, holding or MISSING) for extent, holding in self._pages.pieces(extents)]

    def _hold(self, extent: Extent, holding: Holding) -> None:
        """Hold pages once more; those that are missing get slots, which are free."""
        holders, is_ready = holding
        if not holders:
            self._held_pages += extent[1]
        if holding == MISSING:
            self._places.put(extent, self.tier.store(extent[1] * self.tier.unit_pages))
            self._pages.append((extent,), tail_first=False, value=(1, False))
        else:
            self._pages.mark((extent,), (holders + 1, is_ready))

    def _evict(self, pages: int) -> None:
        """Evict the oldest pages that nobody holds; the caller has checked that there are as many."""
        while pages:
            extent, _, holding = next(self._pages.oldest_first())
            if holding[0]:
                self._pages.append((extent,), tail_first=False, value=holding)
            else:
                for leaving in self._pages.pop_oldest(min(pages, extent[1])):
                    self._drop(leaving)
                    pages -= leaving[1]

    def _drop(self, extent: Extent) -> None:
        """Free the slots of pages that are not stored any more."""
        self.tier.drop(self._places.pop(extent))

    def check(self, holds: Iterable[tuple[Extent, ...]]) -> None:
        """Raise AssertionError unless exactly these sets of pages are held, and every stored page has its slots."""
        held: dict[int, int] = {}
        for extents in holds:
            for start, pages in extents:
                for page in range(start, start + pages):
                    held[page] = held.get(page, 0) + 1
        for extent, _, (holders, is_ready) in self._pages.oldest_first():
            assert holders or is_ready, f"the CPU keeps {extent}, which is not ready"
            for page in range(extent[0], extent[0] + extent[1]):
                assert held.pop(page, 0) == holders, f"page {page} of the CPU is held by {holders}"
        assert not held, f"pages {list(held)} of the CPU are held and not stored"
        stored, pool = self._pages.pages * self.tier.unit_pages, self.tier.pool
        assert pool.capacity - pool.free == stored == self._places.slots == self.tier.held_pages, "slots of the CPU are lost"
