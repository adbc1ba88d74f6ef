"""The copies between vLLM's GPU blocks and its CPU pool: two lines, one a direction, each one copy after another."""

from collections import deque
from typing import Any

from simpy import Event

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.serving import Fetch, Load, Lower
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, RUN, Begin, Transfer
from kvsim.core.tree import Node, RadixTree
from kvsim.core.view import View
from kvsim.core.watch import Watch
from kvsim.engine.mover import Mover
from kvsim.pages.extents import Extent


class BlockCopy:
    """A load or a store of whole blocks. What it means takes effect when the engine hears of its end."""

    __slots__ = ("chunks", "is_load", "is_reported", "owner", "places", "transfer")

    def __init__(
        self, request: Request, edge: Edge, tree: RadixTree, chunks: list[Extent], pages: int, places: list[int] | None
    ) -> None:
        """``places`` are the positions in its request's path of the chunks that a store reads; None: this is a load."""
        self.owner: Any = None
        """Whoever decided it."""
        self.chunks = chunks
        self.places = places
        self.is_load = places is None
        """Whether it goes to the GPU."""
        self.transfer = Transfer(edge, [Node((), pages, 0, None, tree, 0.0)], goes_down=not self.is_load)
        self.transfer.request = request
        self.is_reported = False
        """Whether the end has been seen at the launch of a step."""


NO_COPIES: list[BlockCopy] = []


class BlockLower(Lower):
    """What lies below the GPU: copies run as they are; the CPU pool knows its chunks itself."""

    def __init__(self, gpu: Tier, watches: list[Watch]) -> None:
        self.views = {gpu.index: View(gpu)}
        self._in_flight: dict[Transfer, None] = {}
        self._watches = watches

    @property
    def in_flight(self) -> dict[Transfer, None]:
        return self._in_flight

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        raise AssertionError("vLLM's CPU offloading has nothing to fetch from")

    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        raise AssertionError("vLLM's schedule decides about loads itself")

    def begin(self, transfer: Transfer, now: float) -> Begin:
        self._in_flight[transfer] = None
        transfer.begun = True
        for watch in self._watches:
            watch.began(transfer)
        return RUN

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        return self.abort(transfer, transfer.pages, now)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        del self._in_flight[transfer]
        transfer.done, transfer.arrived_pages = True, pages_arrived
        for watch in self._watches:
            watch.ended(transfer)
        return NO_TRANSFERS


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
