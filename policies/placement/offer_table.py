"""How often pages have been offered to vLLM's CPU offloading tier."""

from collections.abc import Iterable

from kvsim.core.run_order import RunOrder
from kvsim.core.runs import Run, count_pages, split_runs


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
