"""Counts of how often pages have been offered to vLLM's CPU offloading tier."""

from collections.abc import Iterable

from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, count_pages, split_extents


class OfferTable:
    """Counts offers per page, in a table of limited size that forgets the least recently offered pages first.

    threshold  a page is admitted from its ``threshold``-th offer on; 0 and 1 admit all pages without counting
    capacity   pages in the table; of one offer no more are counted, known pages before new ones
    """

    def __init__(self, threshold: int, capacity_pages: int) -> None:
        self.threshold = threshold
        self.capacity = capacity_pages
        self.known = ExtentOrder()
        """Pages with their number of offers, at most the threshold."""

    def proven_pages(self, extents: tuple[Extent, ...]) -> int:
        """Return how many leading pages have reached the threshold by the offers counted so far."""
        if self.threshold < 2:
            return count_pages(extents)
        proven = 0
        for (_, pages), offers in self.known.pieces(extents):
            if offers is None or offers < self.threshold:
                break
            proven += pages
        return proven

    def count(self, extents: tuple[Extent, ...]) -> None:
        """Count an offer. Its known pages become the most recent, then its new pages; counts stop at the threshold."""
        if self.threshold < 2:
            return
        pieces = self.known.pieces(extents)
        known_pages = 0
        for extent, offers in pieces:
            if offers is not None:
                known_pages += extent[1]
                self.known.append((extent,), tail_first=False, value=min(offers + 1, self.threshold))
        new = tuple([extent for extent, offers in pieces if offers is None])
        self.known.append(split_extents(new, self.capacity - known_pages)[0], tail_first=False, value=1)
        self.known.pop_oldest(self.known.pages - self.capacity)

    def pieces(self, extents: Iterable[Extent]) -> list[tuple[Extent, bool]]:
        """Cut a path that has been counted into pieces that have been offered often enough (True) or not."""
        if self.threshold < 2:
            return [(extent, True) for extent in extents]
        return [(extent, offers == self.threshold) for extent, offers in self.known.pieces(extents)]
