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
        self._bottom_up = edges[::-1]
        """An edge comes after the edges below its lower tier."""
        self.in_flight: dict[Transfer, None] = {}
        """Transfers handed out but not yet ended, in order of creation."""
        self._has_opened = False
        """Whether an edge may have a write-down that is not yet handed out."""

    def open(self, edge: Edge) -> Transfer:
        """Return the transfer that collects write-downs over an edge, creating it if need be."""
        if edge.opened is None:
            edge.opened = Transfer(edge, [], goes_down=True)
            self._has_opened = True
        return cast(Transfer, edge.opened)

    def carry(self, transfer: Transfer, nodes: list[Node]) -> None:
        """Record that a transfer carries nodes. Target copies, pinned already, stay until the end, as do source copies that are
        not leaving."""
        source, target = transfer.source, transfer.target
        alone: tuple[Transfer, ...] = (transfer,)
        for node in nodes:
            node.transfers = node.transfers + alone if node.transfers else alone
            transfer.pins.append((node, target.index))
            if node.state[source.index] != LEAVING:
                self.keep(transfer, node, source)

    def flush(self) -> list[Transfer]:
        """Return the write-downs decided on since the last call, the lowest edge first: each frees room for the next."""
        if not self._has_opened:
            return NO_TRANSFERS
        flushed: list[Transfer] = []
        for edge in self._bottom_up:
            if edge.opened is not None:
                transfer = cast(Transfer, edge.opened)
                edge.opened = None
                if transfer.nodes:
                    flushed.append(transfer)
                    self.in_flight[transfer] = None
                    edge.departing.append(transfer)
        self._has_opened = False
        return flushed

    def start(self, transfer: Transfer) -> Transfer:
        """Register an upward transfer of nodes on one path; their incoming copies in the target must exist."""
        residency = self.residency
        residency.version += 1
        alone: tuple[Transfer, ...] = (transfer,)
        for node in transfer.nodes:
            if residency.prompts is not None:
                residency.prompts.changed(node.runs)
            node.transfers = node.transfers + alone if node.transfers else alone
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
            if edge.departing:
                return [*transfers, cast(Transfer, edge.departing[0])]
        return transfers

    def end(self, transfer: Transfer) -> None:
        """Take out a transfer that has ended."""
        del self.in_flight[transfer]
        if transfer.goes_down:
            transfer.edge.departing.remove(transfer)  # nearly always the first
