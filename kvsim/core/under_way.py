"""The transfers of a cache: those decided on, and those handed out and not yet ended."""

from typing import cast

from kvsim.core.residency import Residency
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.tree import LEAVING, Node


class UnderWay:
    """Collects write-downs until they are handed out, and lists all transfers until they end."""

    def __init__(self, residency: Residency, edges: list[Edge]) -> None:
        self.residency = residency
        self._edges = edges[::-1]
        """From the bottom up: an edge comes after the edges below its lower tier."""
        self.in_flight: dict[Transfer, None] = {}
        """Transfers handed out but not yet ended, in order of creation."""

    def open(self, edge: Edge) -> Transfer:
        """Return the transfer that collects write-downs over an edge, creating it if need be."""
        if edge.open is None:
            edge.open = Transfer(edge, [], goes_down=True)
        return cast(Transfer, edge.open)

    def carry(self, transfer: Transfer, node: Node) -> None:
        """Record that a transfer carries a node. The target copy, pinned already, stays until the end, as does a source copy that
        is not leaving."""
        node.transfers += (transfer,)
        transfer.pins.append((node, transfer.target.index))
        if node.state[transfer.source.index] != LEAVING:
            self.keep(transfer, node, transfer.source)

    def flush(self) -> list[Transfer]:
        """Return the write-downs decided on since the last call, the lowest edge first: each frees room for the next."""
        opened = NO_TRANSFERS
        for edge in self._edges:
            if edge.open is not None:
                transfer, edge.open = cast(Transfer, edge.open), None
                if transfer.nodes:
                    opened = [*opened, transfer]
                    self.in_flight[transfer] = None
                    edge.in_flight[transfer] = None
        return opened

    def start(self, transfer: Transfer) -> Transfer:
        """Register an upward transfer of nodes on one path; their incoming copies in the target must exist."""
        self.residency.version += 1
        for node in transfer.nodes:
            node.transfers += (transfer,)
        last = transfer.nodes[-1]
        self.keep(transfer, last, transfer.target)
        if last.state[transfer.source.index] != LEAVING:
            self.keep(transfer, last, transfer.source)
        self.in_flight[transfer] = None
        return transfer

    def keep(self, transfer: Transfer, node: Node, tier: Tier) -> None:
        """Pin a node in a tier until the transfer ends."""
        transfer.pins.append((node, tier.index))
        self.residency.pin(node, tier)

    def departing(self, tier: Tier) -> list[Transfer]:
        """Return transfers that must end before slots of the tier become free: the write-downs just decided on, then the oldest
        one in flight from this tier. Empty if there is none."""
        transfers = self.flush()
        for edge in tier.below:
            if edge.in_flight:
                return [*transfers, cast(Transfer, next(iter(edge.in_flight)))]
        return transfers

    def end(self, transfer: Transfer) -> None:
        """Take out a transfer that has ended."""
        del self.in_flight[transfer]
        if transfer.goes_down:
            del transfer.edge.in_flight[transfer]
