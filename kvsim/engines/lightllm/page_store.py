"""LightLLM's CPU cache: single pages, which are evicted in the order in which they were last given back."""

from collections.abc import Iterable
from typing import Final

from kvsim.core.tier import Edge
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, count_pages, every_last, split_extents

IDLE: Final = 0
TAKEN: Final = 1
MISSING: Final = 2
"""States of a page: stored and evictable; stored and taken by a look-up; not stored."""


class PageStore:
    """The CPU tier. Pages have no parents. A prompt gives its pages back from page 0 on, so it is lost from its front.

    find    the leading pages that are stored; they cannot be evicted before the request that found them is admitted
    store   page by page from page 0: a stored page is kept, and a missing one replaces the oldest page that is neither kept nor
            taken by a look-up, perhaps a later page of the same prompt; without one, this page and all after it are not stored

    A page is ``tier.unit_pages`` pages of the GPU. In these methods, it is identified by the last of them (``named``).
    """

    def __init__(self, edge: Edge) -> None:
        tier = edge.lower
        self.tier = tier
        self.no_room_pages = 0
        """GPU pages that were not stored because every page was taken."""
        self._idle = ExtentOrder()
        """Stored pages that are not taken, oldest first."""
        self._taken = ExtentOrder()
        """Stored pages that a look-up has taken."""
        self._slots = tier.store(0)
        """Slots of all stored pages together."""

    def named(self, extents: tuple[Extent, ...], pages: int) -> tuple[Extent, ...]:
        """Return the CPU pages that lie within the first ``pages`` GPU pages of a path."""
        unit = self.tier.unit_pages
        whole = split_extents(extents, pages - pages % unit)[0]
        return whole if unit == 1 else tuple(every_last(whole, unit))

    def find(self, extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
        """Return the leading pages that are stored. Call ``take`` or ``refresh`` with them at once."""
        return split_extents(extents, self._idle.leading_pages(extents))[0]

    def take(self, found: tuple[Extent, ...]) -> None:
        """Keep the pages of a look-up from being evicted. Only one look-up may have taken pages at a time."""
        self._idle.remove(found)
        self._taken.append(found, tail_first=False)

    def give_back(self, found: tuple[Extent, ...]) -> None:
        """Give back taken pages and refresh them."""
        self._taken.remove(found)
        self.refresh(found)

    def refresh(self, found: tuple[Extent, ...]) -> None:
        """Make stored pages the most recent, page 0 the oldest of them."""
        self._idle.append(found, tail_first=False)

    def store(self, extents: tuple[Extent, ...]) -> None:
        """Store as many leading pages of a prompt as fit. They become the most recent, page 0 the oldest of them."""
        idle, tier, unit = self._idle, self.tier, self.tier.unit_pages
        pool = tier.pool
        at, kept, pieces = 0, 0, self._pieces(extents)
        while at < len(pieces):
            (start, pages), state = pieces[at]
            at += 1
            if state == TAKEN:
                continue
            if state == MISSING:
                free = pool.free // unit
                fitting = min(pages, free + idle.pages - kept)
                if fitting > free:
                    self._evict(fitting - free)
                self._slots = pool.join(self._slots, tier.store(fitting * unit))
                if fitting < pages:
                    if fitting:
                        idle.append(((start, fitting),), tail_first=False)
                    self.no_room_pages += unit * (pages - fitting + count_pages([extent for extent, _ in pieces[at:]]))
                    return
                if fitting > free:
                    at, pieces = 0, self._pieces([extent for extent, _ in pieces[at:]])
            idle.append(((start, pages),), tail_first=False)
            kept += pages

    def _pieces(self, extents: Iterable[Extent]) -> list[tuple[Extent, int]]:
        """Cut a path into pieces that are idle, taken or missing."""
        if not self._taken.pages:
            return [(extent, MISSING if here is None else IDLE) for extent, here in self._idle.pieces(extents)]
        pieces: list[tuple[Extent, int]] = []
        for extent, here in self._idle.pieces(extents):
            if here is None:
                pieces += [(part, MISSING if taken is None else TAKEN) for part, taken in self._taken.pieces((extent,))]
            else:
                pieces.append((extent, IDLE))
        return pieces

    def _evict(self, pages: int) -> None:
        self._idle.pop_oldest(pages)
        pages *= self.tier.unit_pages
        freed, self._slots = self.tier.pool.split(self._slots, pages)
        self.tier.drop(freed)
