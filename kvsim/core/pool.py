"""Page slots of one tier."""

from typing import Any, Final

import numpy as np

UNLIMITED: Final = 1 << 60
"""Capacity, in pages, of a tier without limit."""


class Pool:
    """Counts slots. Slots that are taken are represented by their number alone, which is all a simulation needs."""

    def __init__(self, capacity_pages: int | None) -> None:
        self.capacity = UNLIMITED if capacity_pages is None else capacity_pages
        self.free = self.capacity
        self.least_free = self.capacity

    @property
    def peak_pages(self) -> int:
        """The most slots that were in use at once."""
        return self.capacity - self.least_free

    def take(self, pages: int) -> Any:
        """Take ``pages`` slots; there must be as many."""
        self.free -= pages
        if self.free < self.least_free:
            self.least_free = self.free
        return pages

    def give(self, slots: Any) -> None:
        """Give slots back."""
        self.free += slots

    @staticmethod
    def split(slots: Any, pages: int) -> tuple[Any, Any]:
        """The first ``pages`` slots and the rest."""
        return pages, slots - pages

    @staticmethod
    def join(first: Any, second: Any) -> Any:
        """All slots of both."""
        return first + second

    @staticmethod
    def count(slots: Any) -> int:
        """How many slots these are."""
        return int(slots)


class SlotPool(Pool):
    """Numbers every slot, for tiers that hold real bytes: slots are int64 arrays, one entry a page."""

    def __init__(self, capacity_pages: int | None) -> None:
        if capacity_pages is None:
            raise ValueError("a tier with real memory needs a capacity: unlimited is for simulation")
        super().__init__(capacity_pages)
        self._stack = np.arange(self.capacity - 1, -1, -1, dtype=np.int64)

    def take(self, pages: int) -> np.ndarray:
        super().take(pages)
        return self._stack[self.free : self.free + pages][::-1].copy()

    def take_these(self, slots: np.ndarray) -> None:
        """Take just these slots. Raises ValueError, and takes none, if one of them is not free or is named twice."""
        left = self.free_slots()
        left = left[~np.isin(left, slots)]
        if len(left) + len(slots) != self.free:
            raise ValueError(f"of {len(slots)} slots to take, only {self.free - len(left)} are free")
        self.free = len(left)
        self._stack[: self.free] = left
        self.least_free = min(self.least_free, self.free)

    def give(self, slots: np.ndarray) -> None:
        self._stack[self.free : self.free + len(slots)] = slots
        self.free += len(slots)

    def free_slots(self) -> np.ndarray:
        """The slots that nobody has."""
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
