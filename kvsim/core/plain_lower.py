"""What lies below a GPU whose engine keeps its CPU pages in a structure of its own: copies of pages, which run as they are."""

from typing import Any

from kvsim.core.lease import Lease
from kvsim.core.serving import Fetch, Load, Lower
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, RUN, Begin, Transfer
from kvsim.core.tree import Node, RadixTree
from kvsim.core.view import View
from kvsim.core.watch import Watch


def copy_of_pages(
    edge: Edge, pages: int, tree: RadixTree, *, goes_down: bool, upper_slots: Any = None, lower_slots: Any = None
) -> Transfer:
    """Return a transfer of pages that the tree of a cache does not have; whoever decides on it knows which they are.

    Real memory needs their slots. If there are more in one tier than in the other, the last ones belong together, and the copy
    begins inside a larger page.
    """
    node = Node((), pages, 0, None, tree, 0.0)
    node.place(edge.upper.index, upper_slots)
    node.place(edge.lower.index, lower_slots)
    return Transfer(edge, [node], goes_down=goes_down)


class PlainLower(Lower):
    """Copies of whole pages between one GPU tier and what lies below. Their slots are taken before they begin."""

    def __init__(self, gpu: Tier, watches: list[Watch]) -> None:
        self.views = {gpu.index: View(gpu)}
        self._in_flight: dict[Transfer, None] = {}
        self._watches = watches

    @property
    def in_flight(self) -> dict[Transfer, None]:
        return self._in_flight

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        raise AssertionError("the engine's schedule decides about reads itself")

    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        raise AssertionError("the engine's schedule decides about loads itself")

    def begin(self, transfer: Transfer, now: float) -> Begin:
        self._in_flight[transfer] = None
        transfer.begun = True
        for watch in self._watches:
            watch.began(transfer)
        return RUN

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        return self.abort(transfer, transfer.pages, now)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        self._in_flight.pop(transfer, None)
        transfer.done, transfer.arrived_pages = True, pages_arrived
        for watch in self._watches:
            watch.ended(transfer)
        return NO_TRANSFERS
