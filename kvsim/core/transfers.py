"""Transfers of pages between tiers, from their beginning to their end. Nothing here waits: they are begun and ended by calls."""

from kvsim.core.eviction import Eviction
from kvsim.core.residency import Residency
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.transfer import RUN, Begin, FetchPin, Transfer, transfers_of
from kvsim.core.tree import DOOMED, INCOMING, LEAVING, READY, Node
from kvsim.core.under_way import UnderWay
from kvsim.core.watch import Watch
from kvsim.core.write_down import WriteDown


class Transfers:
    """Begins, finishes and aborts transfers: the part of ``Lower`` that is the same for pages and for recurrent states."""

    def __init__(self, residency: Residency, edges: list[Edge]) -> None:
        self.residency = residency
        self.edges = edges
        self.counts = residency.counts
        self.under_way = UnderWay(residency, edges)
        self.eviction = Eviction(residency, self.under_way)
        self.write_down = WriteDown(self.eviction, edges)
        self.watches: list[Watch] = []
        self.fetch_pins: dict[FetchPin, None] = {}
        """What is kept for requests that wait."""

    @property
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers handed out but not yet ended, oldest first."""
        return self.under_way.in_flight

    def begin(self, transfer: Transfer, now: float) -> Begin:
        if not transfer.begun:
            begun = self._take_slots(transfer, now)
            if not begun.can_run:
                return begun
        if self.watches and not transfer.is_announced:
            transfer.is_announced = True
            for watch in self.watches:
                watch.began(transfer)
        return RUN

    def _take_slots(self, transfer: Transfer, now: float) -> Begin:
        """Give the transfer its target slots, unless other transfers must end first."""
        if transfer.after:
            waits = [earlier for earlier in transfer.after if not earlier.done]
            if waits:
                return Begin(False, waits)
            self._cut_short(transfer)
        target, index = transfer.target, transfer.target.index
        while True:
            if self.residency.doomed:
                self._leave_out_doomed(transfer)
            pages = 0
            for node in transfer.nodes:
                if node.slots[index] is None:
                    pages += node.pages
            if target.pool.free >= pages:
                break
            if target.leaving_pages or self.eviction.make_room(target, 0, now):
                waits = self.under_way.departing(target)
                if waits:
                    return Begin(False, waits)
                continue
            self.counts.no_room_pages += pages
            for node in [node for node in transfer.nodes if node.slots[index] is None]:
                self._fail(transfer, node)
        self.residency.place_copies(transfer.nodes, target, pages)
        transfer.begun = True
        return RUN

    def _leave_out_doomed(self, transfer: Transfer) -> None:
        """Remove pages from the transfer that were given up before they had slots in the target."""
        index, pool = transfer.target.index, transfer.target.pool
        for node in transfer.nodes.copy():
            if node.state[index] == DOOMED and not pool.count(node.slots[index]):
                self._fail(transfer, node)

    def _cut_short(self, transfer: Transfer) -> None:
        """Shorten a load to the pages before the first one that did not arrive in its source."""
        for at, node in enumerate(transfer.nodes):
            if node.state[transfer.source.index] != READY:
                for lost in transfer.nodes[at:]:
                    self._fail(transfer, lost)
                return

    def _fail(self, transfer: Transfer, node: Node) -> None:
        """Remove a node that will not arrive from its transfer.

        In a load, the node keeps its GPU slots, since the request will compute the pages there. Any other incoming copy is
        dropped, and so is a source copy that was leaving.
        """
        residency = self.residency
        residency.version += 1
        if residency.prompts is not None:
            residency.prompts.changed(node.runs)
        transfer.nodes.remove(node)
        node.transfers = tuple([other for other in node.transfers if other is not transfer])
        target, source = transfer.target, transfer.source
        if target.level == GPU:
            return
        if transfer.goes_down:
            for pin in [pin for pin in transfer.pins if pin[0] is node]:
                transfer.pins.remove(pin)
                residency.unpin(node, residency.tiers[pin[1]])
        if node.state[target.index] == INCOMING:
            residency.drop_copy(node, target)
        if node.state[source.index] == LEAVING:
            if node not in residency.doomed:
                self.counts.dropped_pages += node.pages
            residency.drop_copy(node, source)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        follow_ups = self._end(transfer, now)
        for watch in self.watches:
            watch.ended(transfer)
        return follow_ups

    def _end(self, transfer: Transfer, now: float) -> list[Transfer]:
        """End a transfer all of whose nodes have arrived. Returns the write-downs that follow."""
        residency, edge = self.residency, transfer.edge
        transfer.done = True
        transfer.arrived_pages = transfer.pages
        self.under_way.end(transfer)
        self._count(transfer)
        self._arrive(transfer, now)
        if transfer.fetch_pin is not None:
            if transfer.nodes:
                transfer.fetch_pin.keep(transfer.nodes[-1])
            else:
                transfer.fetch_pin.let_go()
        for node, index in transfer.pins:
            residency.unpin(node, residency.tiers[index])
        if not edge.keeps_loaded():
            self._drop_duplicates(transfer.nodes, edge)
        if transfer.goes_down and transfer.target.below and transfer.nodes:
            self.write_down.offer_arrived(transfer, now)
        for node in transfer.nodes:
            residency.merge(node)
        return self.under_way.flush()

    def _count(self, transfer: Transfer) -> None:
        counts, pages = self.counts, transfer.arrived_pages
        if transfer.goes_down:
            counts.written_pages += pages
        elif transfer.target.level == GPU:
            counts.loaded_pages += pages
        else:
            counts.fetched_pages += pages

    def _arrive(self, transfer: Transfer, now: float) -> None:
        """Make the copies ready that a transfer has brought, and free those that it has taken away."""
        residency, source, target = self.residency, transfer.source, transfer.target
        for node in transfer.nodes:
            if len(node.transfers) == 1:
                node.transfers = ()
            else:
                node.transfers = tuple([other for other in node.transfers if other is not transfer])
            if node.state[target.index] == INCOMING:
                residency.set_ready(node, target, now)
            if node.state[source.index] == LEAVING:
                residency.drop_copy(node, source)

    def _drop_duplicates(self, nodes: list[Node], edge: Edge) -> None:
        """Free the lower tier's copies of nodes that the upper tier has, unless they are pinned."""
        upper, lower = edge.upper.index, edge.lower.index
        for node in reversed(nodes):
            if node.state[upper] == READY and node.state[lower] == READY and not node.pins[lower]:
                self.residency.free(node, edge.lower)

    def lose(self, tier: Tier) -> None:
        """Drop all copies of a tier, none of which is in use, and everything below pages that no other tier has."""
        residency, index = self.residency, tier.index
        for node in reversed(list(residency.tree.root.descendants())):
            if node.state[index] == READY:
                if residency.is_last_copy(node):
                    residency.drop_descendants(node)
                    self.counts.dropped_pages += node.pages
                residency.free(node, tier)

    def unpin_fetches(self) -> None:
        """Keep nothing for waiting requests any more."""
        for fetch_pin in list(self.fetch_pins):
            fetch_pin.let_go()

    def drop_duplicates_below(self, nodes: list[Node], tier: Tier) -> None:
        """Free copies, in the tiers below, of pages that were computed in this tier, where placement is exclusive."""
        for edge in tier.below:
            if not edge.keeps_loaded():
                below = edge.lower
                index = below.index
                for node in reversed(nodes):
                    if node.state[index] == READY and not node.pins[index]:
                        self.residency.free(node, below)
                self.drop_duplicates_below(nodes, below)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        residency = self.residency
        left = pages_arrived if transfer.begun else 0
        unreadable: Node | None = None
        for node in transfer.nodes.copy():
            if left >= node.pages:
                left -= node.pages
                continue
            if left and not node.is_state:
                upper = residency.cut(node, left)
                for index in [index for kept, index in transfer.pins if kept is node]:
                    self.under_way.keep(transfer, upper, residency.tiers[index])
            left = 0
            if transfer.has_fault and unreadable is None and not residency.is_doomed(node):
                unreadable = residency.cut(node, 1) if node.pages > 1 and not node.is_state else node
                if unreadable is not node:
                    self._fail(transfer, unreadable)
            self._fail(transfer, node)
        follow_ups = self._end(transfer, now)
        if unreadable is not None:
            self._give_up_copy(unreadable, transfer.source)
            follow_ups = follow_ups + self.under_way.flush()
        for watch in self.watches:
            watch.ended(transfer)
        return follow_ups

    def _give_up_copy(self, node: Node, tier: Tier) -> None:
        """Drop a copy that cannot be read and, if it was the last one, everything below the node.

        A copy in use stays; the next transfer that reads it finds the same fault.
        """
        index = tier.index
        if node.state[index] != READY or node.pins[index]:
            return
        self.counts.unreadable_pages += node.pages
        if self.residency.is_last_copy(node):
            self.residency.drop_descendants(node)
            if node.state[index] != READY:
                return  # a state that left with the pages below it needed room here, and took that of this node
        self.residency.free(node, tier)


def is_gap(node: Node, gpu: Tier) -> bool:
    """Return whether a node has slots on the GPU whose content no load brings any more: a request computes it."""
    return node.state[gpu.index] == INCOMING and not is_arriving(node, gpu)


def is_arriving(node: Node, tier: Tier) -> bool:
    """Whether a load is filling the node's copy in a tier."""
    return any(transfer.target is tier for transfer in transfers_of(node))
