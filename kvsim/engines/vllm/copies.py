"""The copies between vLLM's GPU blocks and its CPU pool: two lines, one a direction, each one copy after another."""

from collections import deque
from typing import Any

from simpy import Event

from kvsim.core.request import Request
from kvsim.core.tier import Edge
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node, RadixTree
from kvsim.engine.mover import Mover
from kvsim.pages.extents import Extent


class BlockCopy:
    """A load or a store of whole blocks. What it means takes effect when the engine hears of its end."""

    __slots__ = ("chunks", "is_reported", "owner", "slots", "transfer")

    def __init__(self, request: Request, edge: Edge, tree: RadixTree, chunks: list[Extent], pages: int, slots: Any) -> None:
        """``slots`` are the GPU's that a store reads, an array; None: this is a load."""
        self.owner: Any = None
        """Whoever decided it."""
        self.chunks = chunks
        self.slots = slots
        self.transfer = Transfer(edge, [Node((), pages, 0, None, tree, 0.0)], goes_down=slots is not None)
        self.transfer.request = request
        self.is_reported = False
        """Whether the end has been seen at the launch of a step."""

    @property
    def is_load(self) -> bool:
        """Whether it goes to the GPU."""
        return not self.transfer.goes_down


class CopyLines:
    """A copy begins when the one before it in its line has ended, and the step that it follows."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._lines: dict[bool, deque[tuple[BlockCopy, Event | None]]] = {True: deque(), False: deque()}
        """Copies that have not ended, with the end of the step that they follow, by whether they load."""

    def submit(self, copy: BlockCopy, after: Event | None) -> None:
        """Let a copy begin after all others of its direction and, unless that is None, after an event."""
        line = self._lines[copy.is_load]
        line.append((copy, after))
        if len(line) == 1:
            self._begin_first(copy.is_load)

    def _begin_first(self, is_load: bool) -> None:
        copy, after = self._lines[is_load][0]
        if after is None or after.processed:
            self._begin(copy)
        else:
            after.callbacks.append(lambda _: self._begin(copy))

    def _begin(self, copy: BlockCopy) -> None:
        self._mover.end_of(copy.transfer).callbacks.append(lambda _: self._ended(copy.is_load))
        self._mover.submit([copy.transfer])

    def _ended(self, is_load: bool) -> None:
        line = self._lines[is_load]
        if line:
            line.popleft()
        if line:
            self._begin_first(is_load)

    def clear(self) -> None:
        """Begin no further copies."""
        for line in self._lines.values():
            line.clear()
