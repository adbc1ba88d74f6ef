"""LightLLM's CPU cache: single pages, which are evicted in the order in which they were last given back."""

from kvsim.core.edge import Edge
from kvsim.core.runs import Run, count_pages, every_last, split_runs


class PageStore:
    """The CPU tier. Pages have no parents. A prompt gives its pages back from page 0 on, so it is lost from its front.

    find    takes the leading pages that are stored; they cannot be evicted until they are given back
    store   page by page from page 0: a stored page is taken, a missing one replaces the oldest page that is not taken, which may
            be a later page of the same prompt; if every page is taken, this page and all after it are not stored

    A page is ``tier.unit_pages`` pages of the GPU. In these methods, it is identified by the last of them (``named``).
    The tier's eviction policy provides the order (``page_order``); it raises ValueError if it has none.
    """

    def __init__(self, edge: Edge) -> None:
        tier = edge.lower
        self.tier = tier
        self.no_room_pages = 0
        """GPU pages that were not stored because every page was taken."""
        self._idle = tier.eviction.page_order()
        """Stored pages that are not taken, oldest first."""
        self._taken = tier.eviction.page_order()
        """Stored pages that a look-up has taken."""
        self._slots = tier.pool.take(0)
        """Slots of all stored pages together."""

    def named(self, runs: tuple[Run, ...], pages: int) -> tuple[Run, ...]:
        """Return the CPU pages that lie within the first ``pages`` GPU pages of a path."""
        unit = self.tier.unit_pages
        whole = split_runs(runs, pages - pages % unit)[0]
        return whole if unit == 1 else tuple(every_last(whole, unit))

    def find(self, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """Take the leading pages that are stored and return them. Only one look-up may have taken pages at a time."""
        found = split_runs(runs, self._idle.leading_pages(runs))[0]
        self._idle.remove(found)
        self._taken.append(found, tail_first=False)
        return found

    def give_back(self, found: tuple[Run, ...]) -> None:
        """Give back the pages of a look-up. They become the most recent, page 0 the oldest of them."""
        self._taken.remove(found)
        self._idle.append(found, tail_first=False)

    def store(self, runs: tuple[Run, ...]) -> None:
        """Store a prompt's pages as far as there is room. They become the most recent, page 0 the oldest of them."""
        idle, pool, unit = self._idle, self.tier.pool, self.tier.unit_pages
        stored, pieces = 0, self._pieces(runs)
        while pieces:
            run, is_stored = pieces.pop(0)
            pages = run[1]
            if is_stored:
                idle.remove((run,))
                stored += pages
                continue
            free = pool.free // unit
            fitting = min(pages, free + idle.pages)
            if fitting > free:
                self._evict(fitting - free)
            self._slots = pool.join(self._slots, pool.take(fitting * unit))
            self.tier.inserted_pages += fitting * unit
            stored += fitting
            if fitting < pages:
                self.no_room_pages += unit * (count_pages(runs) - stored)
                break
            if fitting > free:
                pieces = self._pieces(split_runs(runs, stored)[1])
        mine = split_runs(runs, stored)[0]
        if self._taken.pages:
            mine = tuple([run for run, taken in self._taken.pieces(mine) if taken is None])
        idle.append(mine, tail_first=False)

    def _pieces(self, runs: tuple[Run, ...]) -> list[tuple[Run, bool]]:
        """Cut a path into pieces that are stored (True) or missing."""
        pieces: list[tuple[Run, bool]] = []
        for run, idle in self._idle.pieces(runs):
            if idle is None and self._taken.pages:
                pieces += [(part, taken is not None) for part, taken in self._taken.pieces((run,))]
            else:
                pieces.append((run, idle is not None))
        return pieces

    def _evict(self, pages: int) -> None:
        self._idle.pop_oldest(pages)
        pages *= self.tier.unit_pages
        freed, self._slots = self.tier.pool.split(self._slots, pages)
        self.tier.pool.give(freed)
        self.tier.evicted_pages += pages
