"""The page slots of one tier."""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from kvsim.pages.extents import Extent, count_pages

UNLIMITED: Final = 1 << 60
"""The capacity in pages of an unlimited tier, and a limit that is none: more pages than any path has."""


class Places:
    """Counts the slots of stored pages that are found by their ids, not by a node: all that a simulation needs."""

    def __init__(self, unit: int) -> None:
        """A stored page takes ``unit`` slots."""
        self.unit = unit
        self.slots = 0

    def put(self, extent: Extent, slots: Any) -> None:
        """Note that pages are stored in these slots."""
        self.slots += extent[1] * self.unit

    def at(self, extents: Iterable[Extent]) -> Any:
        """Return the slots of stored pages, page by page."""
        return count_pages(extents) * self.unit

    def pop(self, extent: Extent) -> Any:
        """Return the slots of pages that are no longer stored."""
        self.slots -= extent[1] * self.unit
        return extent[1] * self.unit

    def pop_all(self) -> Any:
        """Return the slots of all pages, none of which is stored any more."""
        slots, self.slots = self.slots, 0
        return slots


class NumberedPlaces(Places):
    """Knows the slots of every page; those of a page are neighbours."""

    def __init__(self, unit: int) -> None:
        super().__init__(unit)
        self._first: dict[int, int] = {}
        """The first slot of each page."""

    def put(self, extent: Extent, slots: np.ndarray) -> None:
        super().put(extent, slots)
        start, pages = extent
        self._first.update(zip(range(start, start + pages), slots[:: self.unit].tolist(), strict=True))

    def at(self, extents: Iterable[Extent]) -> np.ndarray:
        return self._whole([self._first[page] for start, pages in extents for page in range(start, start + pages)])

    def pop(self, extent: Extent) -> np.ndarray:
        super().pop(extent)
        start, pages = extent
        return self._whole([self._first.pop(page) for page in range(start, start + pages)])

    def pop_all(self) -> np.ndarray:
        super().pop_all()
        slots = self._whole(list(self._first.values()))
        self._first.clear()
        return slots

    def _whole(self, first: list[int]) -> np.ndarray:
        return (np.array(first, dtype=np.int64)[:, None] + np.arange(self.unit)).ravel()


class Pool:
    """Counts slots without numbering them: taken slots are represented by their count, which is all a simulation needs."""

    def __init__(self, capacity_pages: int | None) -> None:
        self.capacity = UNLIMITED if capacity_pages is None else capacity_pages
        self.free = self.capacity
        self.least_free = self.capacity

    @property
    def peak_pages(self) -> int:
        """The largest number of slots in use at once."""
        return self.capacity - self.least_free

    def take(self, pages: int) -> Any:
        """Take ``pages`` slots; at least that many must be free."""
        self.free -= pages
        if self.free < self.least_free:
            self.least_free = self.free
        return pages

    def give(self, slots: Any) -> None:
        """Give slots back."""
        pages: int = slots
        self.free += pages

    @staticmethod
    def split(slots: Any, pages: int) -> tuple[Any, Any]:
        """Split slots into the first ``pages`` and the rest."""
        return pages, slots - pages

    @staticmethod
    def join(first: Any, second: Any) -> Any:
        """Return the slots of both."""
        return first + second

    @staticmethod
    def count(slots: Any) -> int:
        """Return the number of slots."""
        return int(slots)

    @staticmethod
    def places(unit: int) -> Places:
        """Return what finds the slots of stored pages by their ids. A page takes ``unit`` slots, which are taken and given back
        together, page by page: where slots have numbers, they are then neighbours, the first at a multiple of ``unit``."""
        return Places(unit)


class SlotPool(Pool):
    """Numbers every slot, for tiers that hold real bytes: slots are int64 arrays with one entry per page.

    Those given back last are taken first, and in the order in which they were given back: neighbours stay neighbours, which a
    disk reads and writes at once.
    """

    def __init__(self, capacity_pages: int | None) -> None:
        if capacity_pages is None:
            raise ValueError("a tier with real memory needs a capacity; only simulated tiers can be unlimited")
        super().__init__(capacity_pages)
        self._stack = np.arange(self.capacity - 1, -1, -1, dtype=np.int64)

    def take(self, pages: int) -> np.ndarray:
        super().take(pages)
        return self._stack[self.free : self.free + pages][::-1].copy()

    def take_these(self, slots: np.ndarray) -> None:
        """Take exactly these slots. Raises ValueError and takes none if one of them is not free or is listed twice."""
        left = self.free_slots()
        left = left[~np.isin(left, slots)]
        if len(left) + len(slots) != self.free:
            raise ValueError(f"only {self.free - len(left)} of the {len(slots)} slots to take are free")
        self.free = len(left)
        self._stack[: self.free] = left
        self.least_free = min(self.least_free, self.free)

    def give(self, slots: np.ndarray) -> None:
        self._stack[self.free : self.free + len(slots)] = slots[::-1]
        self.free += len(slots)

    def free_slots(self) -> np.ndarray:
        """Return the free slots."""
        return self._stack[: self.free]

    @staticmethod
    def split(slots: np.ndarray, pages: int) -> tuple[np.ndarray, np.ndarray]:
        return slots[:pages], slots[pages:]

    @staticmethod
    def join(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.concatenate((first, second))

    @staticmethod
    def count(slots: np.ndarray) -> int:
        return len(slots)

    @staticmethod
    def places(unit: int) -> Places:
        return NumberedPlaces(unit)
