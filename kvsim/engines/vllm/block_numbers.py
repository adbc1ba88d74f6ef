"""The numbers of vLLM's GPU blocks, where it matters which block a request gets."""

from typing import Any

from kvsim.core.pool import Pool


class BlockNumbers(Pool):
    """Numbers every slot like ``SlotPool``, in the same order, but as lists: a growing answer takes one at a time."""

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self._stack = list(range(capacity_pages - 1, -1, -1))

    def take(self, pages: int) -> Any:
        super().take(pages)
        stack = self._stack
        if pages == 1:
            return [stack.pop()]
        taken = stack[self.free :]
        del stack[self.free :]
        taken.reverse()
        return taken

    def give(self, slots: Any) -> None:
        self._stack += slots[::-1]
        self.free += len(slots)

    def free_slots(self) -> list[int]:
        """Return the free slots."""
        return self._stack

    @staticmethod
    def split(slots: Any, pages: int) -> tuple[Any, Any]:
        return slots[:pages], slots[pages:]

    @staticmethod
    def count(slots: Any) -> int:
        return len(slots)
