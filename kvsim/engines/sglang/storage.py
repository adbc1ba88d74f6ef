"""The storage below SGLang's host memory: single pages, found from the first one on until one is missing."""

from collections.abc import Iterable

from kvsim.core.tier import Tier
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, count_pages, split_extents


class Storage:
    """The pages of a disk tier. They are not nodes of the tree: what is only here is found by its page id alone.

    SGLang leaves it to the storage what it drops. Here, with a capacity, the pages stored or read least recently leave first,
    the last of a path before those above it. Pages with an id below 0 are never looked up, so they are not stored.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._order = ExtentOrder()
        self._slots = tier.store(0)
        """Slots of all pages together."""

    def leading_pages(self, runs: tuple[Extent, ...]) -> int:
        """Return how many pages of a path, from its first on, are here."""
        return self._order.leading_pages([run for run in runs if run[0] >= 0])

    def missing_pages(self, runs: tuple[Extent, ...]) -> int:
        """Return how many pages of a path ``store`` would store."""
        known = self._kept(runs)
        return count_pages(known) - self._order.count(known)

    def _kept(self, runs: Iterable[Extent]) -> tuple[Extent, ...]:
        """Return the pages of a path that can be here at all."""
        return split_extents(tuple(run for run in runs if run[0] >= 0), self.tier.pool.capacity)[0]

    def held(self) -> list[Extent]:
        """Return all pages, in any order."""
        return [run for run, _, _ in self._order.oldest_first()]

    def touch(self, runs: tuple[Extent, ...]) -> None:
        """Mark pages that are read as the most recent."""
        self._order.touch(runs)

    def store(self, runs: Iterable[Extent]) -> None:
        """Store the pages of a path that are not here yet, as far as they fit, and mark all of them as the most recent."""
        order, tier = self._order, self.tier
        pool = tier.pool
        known = self._kept(runs)
        order.touch(known)
        new = count_pages(known) - order.count(known)
        lacking = new - pool.free
        if lacking > 0:
            dropped = order.pop_oldest(lacking)
            for watch in tier.watches:
                watch.dropped(tier, tuple(dropped))
            freed, self._slots = pool.split(self._slots, lacking)
            tier.drop(freed)
        if new:
            self._slots = pool.join(self._slots, tier.store(new))
            missing = tuple([run for run, here in order.pieces(known) if here is None]) if tier.watches else ()
            order.append(known)
            for watch in tier.watches:
                watch.stored(tier, missing)

    def clear(self) -> None:
        """Drop everything."""
        dropped = tuple([run for run, _, _ in self._order.oldest_first()])
        for watch in self.tier.watches:
            watch.dropped(self.tier, dropped)
        self._order = ExtentOrder()
        self.tier.drop(self._slots)
        self._slots = self.tier.store(0)

    def check(self) -> None:
        """Recount the slots. Raises AssertionError."""
        pool = self.tier.pool
        taken = pool.capacity - pool.free
        assert self._order.pages == taken == pool.count(self._slots), f"pages of {self.tier.name} are lost"
