"""The page ids of prompts that keep coming: what nobody can find any more is forgotten."""

from collections.abc import Callable, Hashable, Iterable, Sequence, Set

from kvsim.cluster.held_pages import HeldPages
from kvsim.core.tier import Tier
from kvsim.pages.extents import Extent, count_pages
from kvsim.trace.page_index import PageIndex

LEAST_PAGES = 1 << 16
"""Forgetting begins with this many pages."""


class LivePages(PageIndex):
    """Assigns page ids as a ``PageIndex`` does, and keeps those that matter.

    A page is forgotten if no tier has it, no request under way has it, and no request has asked for it since pages were last
    forgotten, which is done when there are as many new ones as pages that matter. If it comes again, it has a new id. So results
    are those of an index that forgets nothing, but for policies that remember pages which have left for longer than that.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        super().__init__()
        self._held = [(tier, HeldPages()) for tier in tiers]
        for tier, held in self._held:
            tier.watches.append(held)
        self._parents: dict[int, int] = {}
        """The page before a page on its path, where that is not the one with the id before; -1: none."""
        self._asked: set[Extent] = set()
        """Pages that have been asked for since pages were last forgotten."""
        self._limit = LEAST_PAGES
        self.on_forget: list[Callable[[Set[int]], None]] = []
        """Are called with the pages that are still known when others have been forgotten."""

    @property
    def is_full(self) -> bool:
        """Whether it is time for ``forget``."""
        return len(self._ids) > self._limit or len(self._asked) > self._limit

    def lookup(self, keys: Sequence[Hashable]) -> tuple[Extent, ...]:
        new = self.next_id
        extents = super().lookup(keys)
        self._asked.update(extents)
        if self.next_id > new:
            before = -1
            for start, pages in extents:
                if start <= new < start + pages:
                    before = new - 1 if start < new else before
                    break
                before = start + pages - 1
            if before != new - 1:
                self._parents[new] = before
        return extents

    def forget(self, under_way: Iterable[Extent]) -> None:
        """Forget the pages that do not matter; ``under_way`` has those of requests that have not ended."""
        if any(tier.held_pages and not held.pages for tier, held in self._held):
            self._limit *= 2  # a tier that tells nobody what it has
            return
        needed = [*under_way, *[extent for _, held in self._held for extent in held.extents()]]
        extents = [*needed, *self._asked]
        kept = {page for start, pages in extents for page in range(start, start + pages)}
        for page in reversed(self._ids.values()):
            if page in kept:
                kept.add(self._parents.get(page, page - 1))
        self._ids = {key: page for key, page in self._ids.items() if page in kept}
        self._parents = {page: before for page, before in self._parents.items() if page in kept}
        for tell in self.on_forget:
            tell(kept)
        self._asked.clear()
        self._limit = len(self._ids) + max(LEAST_PAGES, count_pages(needed))
