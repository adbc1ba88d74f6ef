"""How pages move: eviction, copies to the tier below, reads from the tier below, and the transfers that carry them."""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node

if TYPE_CHECKING:
    from kvsim.core.rules import Rules

GPU, CPU, DISK = range(3)


@dataclass(slots=True)
class Counts:
    """What became of pages that were moved, or should have been."""

    written_pages: int = 0
    """Copied to the tier below."""
    loaded_pages: int = 0
    """Brought to the GPU."""
    fetched_pages: int = 0
    """Read from disk into the CPU tier."""
    revived_pages: int = 0
    """Used again while they were leaving the GPU, and kept."""
    no_room_pages: int = 0
    """Wanted below, but there was no room."""
    dropped_pages: int = 0
    """Evicted with no copy left anywhere."""
    unreadable_pages: int = 0
    """Copies given up because they could not be read."""


class Movement(Residency):
    """Residency, and the ways in which it changes. Nothing here waits: a transfer is made, begun and ended by calls."""

    def __init__(self, tiers: list[Tier], rules: "Rules") -> None:
        super().__init__(tiers)
        self.rules = rules
        self.gpu = tiers[GPU]
        self.counts = Counts()
        self.transfers: dict[Transfer, None] = {}
        """Not yet ended, in the order in which they were made."""
        self._departures: list[OrderedDict[Transfer, None]] = [OrderedDict() for _ in tiers]
        """Write-downs in flight, by source."""
        self._open: list[Transfer | None] = [None] * len(tiers)
        self._apart: list[Node] = []
        """Where answers are cached: evicted while a transfer pinned them below; joined to their children, if that can be, when
        one ends."""
        self._single = len(tiers) == 1
        self.early = [tier for tier in tiers if tier.lower is not None and tier.lower.placement.watermark > 0]  # type: ignore[union-attr]
        """Tiers from which pages are copied down before they have to leave."""
        self.is_offering = False
        """Nodes that nothing pins are being offered to a tier: they must not grow by a merge meanwhile."""

    # --- eviction ----------------------------------------------------------------------------------------------------

    def make_room(self, tier: Tier, pages: int, now: float) -> bool:
        """Evict until ``pages`` slots more than promised are free or will be. False, and nothing evicted, if it cannot be."""
        missing = pages - tier.pool.free - tier.coming_pages + tier.owed_pages
        if missing <= 0:
            return True
        if missing > tier.evictable_pages:
            return False
        for node in tier.eviction.victims(now):
            surplus = node.pages - missing
            if node.partner is not None or node.is_state:
                self._evict_with_state(node, tier, pages, now)
                missing = pages - tier.pool.free - tier.coming_pages + tier.owed_pages
                if missing <= 0:
                    break
                continue
            if surplus > 0:
                if self._can_trim(node, tier):
                    self.trim(node, tier, missing)
                    self.counts.dropped_pages += missing
                    missing = 0
                    break
                self.cut(node, surplus)
            missing -= node.pages
            self._evict(node, tier, now)
            if missing <= 0:
                break
        if tier.lower is not None:
            self._place(tier, tier.lower, now)
            return tier.pool.free + tier.coming_pages >= tier.owed_pages + pages
        return missing <= 0

    def _evict_with_state(self, node: Node, tier: Tier, pages: int, now: float) -> None:
        """Evict a state, or the last pages of a node that ends at one, which leaves with them: as few as make the room."""
        if not node.is_state and (state := node.partner) is not None:
            missing = pages - tier.pool.free - tier.coming_pages + tier.owed_pages
            leaving = state.pages if state.is_evictable(tier.index) else 0
            surplus = node.pages - max(1, missing - leaving)
            if surplus > 0:
                self.cut(node, surplus)
        self._evict(node, tier, now)

    def _can_trim(self, node: Node, tier: Tier) -> bool:
        """Whether part of an evictable node can go without being a node of its own: it goes nowhere, and nobody needs to know."""
        if tier.lower is not None or tier.on_remove:
            return False
        return self._single or not node.children and not node.transfers and node.state.count(ABSENT) == len(self.tiers) - 1

    def evict(self, node: Node, tier: Tier, now: float) -> None:
        """Take one evictable node out of a tier, as if it were the next victim."""
        self._evict(node, tier, now)
        if tier.lower is not None:
            self._place(tier, tier.lower, now)

    def _evict(self, node: Node, tier: Tier, now: float) -> None:
        """Take an evictable node out of a tier: written to the tier below first, or freed at once with what is below it."""
        if not self._single:
            if node.state.count(ABSENT) < len(self.tiers) - 1:
                self.free(node, tier)
                if not any(node.pins):
                    if not self.is_offering:
                        self.merge(node)
                elif self.rules.cache_output and not (node.pins[GPU] or self.is_offering):
                    self._apart.append(node)
                return
            lower = tier.lower
            if lower is not None and lower.placement.after_eviction(node, now):  # type: ignore[union-attr]
                self._leave(node, tier, lower)
                return
            if node.children:
                self.drop_descendants(node)
        self.counts.dropped_pages += node.pages
        self.free(node, tier)

    def drop_descendants(self, node: Node) -> int:
        lost = super().drop_descendants(node)
        self.counts.dropped_pages += lost
        return lost

    def _place(self, tier: Tier, lower: Tier, now: float) -> None:
        """Make room below for all that was evicted in one pass; what finds none is dropped, the first victims first."""
        transfer = self._open[tier.index]
        while transfer is not None and transfer.nodes and not self.make_room(lower, 0, now):
            node = transfer.nodes[0]
            self.counts.no_room_pages += node.pages
            self._fail(transfer, node)

    def _leave(self, node: Node, tier: Tier, lower: Tier) -> None:
        """The copy is written to the tier below and then given up."""
        node.state[tier.index] = LEAVING
        tier.evictable_pages -= node.pages
        tier.coming_pages += node.pages
        if tier.on_remove:
            tier.on_remove(node)
        self.write_down(node, tier, lower)
        self.lose_kid(node, tier)

    def stay(self, node: Node, tier: Tier, now: float) -> None:
        """A leaving copy becomes an ordinary one again; if it is being written down, that goes on."""
        tier.coming_pages -= node.pages
        node.parent.kids[tier.index] += 1  # type: ignore[union-attr]
        self.set_ready(node, tier, now)
        for transfer in node.transfers:
            if transfer.source is tier:
                self.keep(transfer, node, tier)

    # --- copies to the tier below ------------------------------------------------------------------------------------

    def offer_path(self, node: Node, tier: Tier, now: float, prompt: Request | None = None) -> None:
        """Offer the nodes from the root down to ``node``, which a request has just used, to the tier below.

        Policies that decide about whole prompts are asked if it is the end of one.
        """
        lower = tier.lower
        if lower is None or lower.after_use is None:
            return
        if lower.wanted_pages:
            if prompt is not None:
                self._offer_prompt(node, prompt, tier, lower, now)
            return
        index, path = lower.index, []
        while node.parent is not None:
            if not node.state[index]:
                path.append(node)
            node = node.parent
        for node in reversed(path):
            self._offer(node, tier, lower, now)

    def _offer(self, node: Node, tier: Tier, lower: Tier, now: float) -> None:
        """Copy a node to the tier below if the policy wants that, no parent has to go first and there is room."""
        assert lower.after_use is not None
        if not self.may_follow(node, tier, lower) or not lower.after_use(node, now):
            return
        if not self.make_room(lower, node.pages, now):
            self.counts.no_room_pages += node.pages
        elif node.state[tier.index] == READY:  # the room can have cost what is above the node, and it with that
            self.write_down(node, tier, lower)

    @staticmethod
    def may_follow(node: Node, tier: Tier, lower: Tier) -> bool:
        """Whether a node can be copied to the tier below, which lacks it, without overtaking its parent.

        A parent that is in the same tier goes first. One that is elsewhere comes in its turn, if it ever does.
        """
        upper, index, parent = tier.index, lower.index, node.parent
        assert parent is not None
        return node.state[upper] == READY and not node.state[index] and (parent.state[upper] != READY or parent.state[index] > 0)

    @staticmethod
    def parents_first(nodes: list[Node]) -> list[Node]:
        """The order in which nodes are offered to the next tier: pages from the first of a path on, then states."""
        return sorted(nodes, key=lambda node: inf if node.is_state else node.depth) if len(nodes) > 1 else nodes

    def _offer_prompt(self, node: Node, prompt: Request, tier: Tier, lower: Tier, now: float) -> None:
        """Copy what the policy wants of a prompt, which ends with ``node``, to the tier below: all of it or nothing."""
        if not (nodes := self.wanted_nodes(node, prompt, tier, lower, now)):
            return
        pages, above = sum([node.pages for node in nodes]), nodes[-1].parent
        assert above is not None
        self.pin(above, lower.index)
        if self.make_room(lower, pages, now):
            for node in nodes:
                self.write_down(node, tier, lower)
        else:
            self.counts.no_room_pages += pages
        self.unpin(above, lower.index)

    def wanted_nodes(self, node: Node, prompt: Request, tier: Tier, lower: Tier, now: float) -> list[Node]:
        """The nodes of a prompt that the tier has and that the policy wants below, up to the first that is only on its way to
        the tier. The last one is cut if need be.
        """
        path: list[Node] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        assert lower.wanted_pages is not None
        wanted = lower.wanted_pages(prompt, path, now)
        nodes = []
        for node in path:
            if node.depth >= wanted or node.state[tier.index] not in (ABSENT, READY) and not node.state[lower.index]:
                break
            if node.state[tier.index] and not node.state[lower.index]:
                nodes.append(node if node.depth + node.pages <= wanted else self.cut(node, wanted - node.depth))
        return nodes

    def write_early(self, now: float) -> None:
        """Copy pages down before they have to leave, where a policy's watermark says so."""
        for tier in self.early:
            nodes, lower = self.early_victims(tier, now), tier.lower
            self.is_offering = True
            for node in nodes:
                above = node.parent
                assert above is not None and lower is not None
                if node.state[tier.index] != READY:
                    continue  # the room for another one cost what is above it
                self.pin(above, lower.index)
                fits = self.make_room(lower, node.pages, now)
                if fits:
                    self.write_down(node, tier, lower)
                self.unpin(above, lower.index)
                if not fits:
                    self.counts.no_room_pages += node.pages
                    break
            self.is_offering = False

    def early_victims(self, tier: Tier, now: float) -> list[Node]:
        """The leaves to copy down now so that the pages above the watermark are free, or free at once when they leave.

        Looking at all leaves that are copied already is worth it only now and then: when half of those pages are new.
        """
        lower = tier.lower
        assert lower is not None and lower.placement is not None
        wanted, ready = (1 - lower.placement.watermark) * tier.pool.capacity, tier.spare_pages
        if ready >= wanted or tier.inserted_pages - tier.early_mark < wanted / 2:
            return []
        tier.early_mark = tier.inserted_pages
        nodes: list[Node] = []
        seen: set[Node] = set()
        for node in tier.eviction.victims(now):
            if node in seen:
                continue
            seen.add(node)
            if node.state.count(ABSENT) == len(self.tiers) - 1 and lower.placement.after_eviction(node, now):
                nodes.append(node)
            ready += node.pages
            if ready >= wanted:
                break
        return nodes

    def write_down(self, node: Node, tier: Tier, lower: Tier) -> None:
        """Add the node to the open transfer between two tiers; room for it below is there, or made at the end of the pass."""
        transfer = self._open[tier.index]
        if transfer is None:
            transfer = self._open[tier.index] = Transfer(tier, lower, [])
        self.add_incoming(node, lower)
        transfer.nodes.append(node)
        node.transfers += (transfer,)
        self._keep_ends(transfer, node)

    def add_incoming(self, node: Node, tier: Tier) -> None:
        """A copy to be filled, in slots that are promised."""
        self.add_copy(node, tier, INCOMING, None)
        tier.owed_pages += node.pages

    # --- transfers ---------------------------------------------------------------------------------------------------

    def flush(self) -> list[Transfer]:
        """The write-downs decided on since the last call, the lowest edge first: each frees what the next one needs."""
        if not any(self._open):
            return []
        opened = [transfer for transfer in reversed(self._open) if transfer is not None and transfer.nodes]
        self._open = [None] * len(self.tiers)
        for transfer in opened:
            self.transfers[transfer] = None
            self._departures[transfer.source.index][transfer] = None
        return opened

    def start(self, transfer: Transfer) -> Transfer:
        """Register a transfer along one path whose target copies exist."""
        for node in transfer.nodes:
            node.transfers += (transfer,)
        self._keep_ends(transfer, transfer.nodes[-1])
        self.transfers[transfer] = None
        return transfer

    def _keep_ends(self, transfer: Transfer, node: Node) -> None:
        """Pin the target's copy, and the source's unless it is leaving anyway."""
        self.keep(transfer, node, transfer.target)
        if node.state[transfer.source.index] != LEAVING:
            self.keep(transfer, node, transfer.source)

    def keep(self, transfer: Transfer, node: Node, tier: Tier) -> None:
        """Pin a node in a tier until the transfer ends."""
        transfer.pins.append((node, tier.index))
        self.pin(node, tier.index)

    def departing(self, tier: Tier) -> list[Transfer]:
        """What has to be waited for until slots of the tier are free: write-downs just decided on, and last the first that
        is in flight from this tier. Empty if none is."""
        transfers = self.flush()
        departures = self._departures[tier.index]
        return [*transfers, next(iter(departures))] if departures else transfers

    def begin(self, transfer: Transfer, now: float) -> list[Transfer]:
        """Give the transfer its target slots. Returns [] when it can run, or the transfers that it has to wait for."""
        if transfer.begun:
            return []
        if waits := [earlier for earlier in transfer.after if not earlier.done]:
            return waits
        if transfer.after:
            self._cut_short(transfer)
        target, index = transfer.target, transfer.target.index
        while True:
            if self.doomed:
                self._leave_out_doomed(transfer)
            unplaced = [node for node in transfer.nodes if node.slots[index] is None]
            pages = sum([node.pages for node in unplaced])
            if target.pool.free >= pages:
                break
            if target.coming_pages or self.make_room(target, 0, now):
                if waits := self.departing(target):
                    return waits
                continue
            self.counts.no_room_pages += pages
            for node in unplaced:
                self._fail(transfer, node)
        target.owed_pages -= pages
        for node in unplaced:
            node.slots[index] = target.pool.take(node.pages)
        transfer.begun = True
        return []

    def _leave_out_doomed(self, transfer: Transfer) -> None:
        """Pages that were given up before they had slots in the target are not copied."""
        index, pool = transfer.target.index, transfer.target.pool
        for node in transfer.nodes.copy():
            if node.state[index] == DOOMED and not pool.count(node.slots[index]):
                self._fail(transfer, node)

    def _cut_short(self, transfer: Transfer) -> None:
        """Keep of a load what it can read: the pages before the first that did not arrive in its source."""
        for at, node in enumerate(transfer.nodes):
            if node.state[transfer.source.index] != READY:
                for lost in transfer.nodes[at:]:
                    self._fail(transfer, lost)
                return

    def _fail(self, transfer: Transfer, node: Node) -> None:
        """The transfer does not bring this node.

        A load's GPU copy stays as room for pages that the request has to compute now. Any other incoming copy is given
        back; what was leaving its source for it is dropped.
        """
        transfer.nodes.remove(node)
        node.transfers = tuple(other for other in node.transfers if other is not transfer)
        target, source = transfer.target, transfer.source
        if target is self.gpu:
            return
        if target.index > source.index:
            for pin in [pin for pin in transfer.pins if pin[0] is node]:
                transfer.pins.remove(pin)
                self.unpin(*pin)
        if node.state[target.index] == INCOMING:
            self.drop_copy(node, target)
        if node.state[source.index] == LEAVING:
            if node not in self.doomed:
                self.counts.dropped_pages += node.pages
            self.drop_copy(node, source)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        """Everything in the transfer has arrived. Returns the write-downs that follow from it."""
        source, target = transfer.source, transfer.target
        transfer.done = True
        transfer.arrived_pages = transfer.pages
        del self.transfers[transfer]
        self._departures[source.index].pop(transfer, None)
        self._count(transfer)
        for node in transfer.nodes:
            self._arrive(node, transfer, now)
        for node, tier in transfer.pins:
            self.unpin(node, tier)
        if target.index < source.index:
            if not source.placement.keeps_loaded:  # type: ignore[union-attr]
                self._drop_copies(transfer, source)
        elif not target.placement.keeps_loaded:  # type: ignore[union-attr]
            self._drop_copies(transfer, target)
        if target.index > source.index and target.lower is not None and target.lower.after_use:
            self.is_offering = True
            if not target.lower.wanted_pages:
                for node in self.parents_first(transfer.nodes):
                    self._offer(node, target, target.lower, now)
            elif transfer.request is not None and transfer.nodes:
                self._offer_prompt(transfer.nodes[-1], transfer.request, target, target.lower, now)
            self.is_offering = False
        for node in transfer.nodes:
            self.merge(node)
        if self._apart:
            nodes, self._apart = self._apart, []
            for node in nodes:
                self.merge(node)
        return self.flush()

    def _count(self, transfer: Transfer) -> None:
        counts, pages = self.counts, transfer.arrived_pages
        transfer.target.inserted_pages += pages
        if transfer.target.index > transfer.source.index:
            counts.written_pages += pages
        elif transfer.target is self.gpu:
            counts.loaded_pages += pages
        else:
            counts.fetched_pages += pages

    def _arrive(self, node: Node, transfer: Transfer, now: float) -> None:
        if len(node.transfers) == 1:
            node.transfers = ()
        else:
            node.transfers = tuple([other for other in node.transfers if other is not transfer])
        if node.state[transfer.target.index] == INCOMING:
            self.set_ready(node, transfer.target, now)
        if node.state[transfer.source.index] == LEAVING:
            self.drop_copy(node, transfer.source)

    def _drop_copies(self, transfer: Transfer, lower: Tier) -> None:
        """Pages that moved up, or were used again before they had moved down, leave the lower tier if nothing needs them."""
        index, upper = lower.index, lower.index - 1
        for node in reversed(transfer.nodes):
            if node.state[upper] == READY and node.state[index] == READY and not node.pins[index]:
                self.free(node, lower)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """Only the first ``pages_arrived`` pages arrived, in the order of ``transfer.nodes``; the rest is given up.

        If the page after them cannot be read (``transfer.has_fault``), its copy in the source is given up, too.
        """
        left = pages_arrived if transfer.begun else 0
        unreadable: Node | None = None
        for node in transfer.nodes.copy():
            if left >= node.pages:
                left -= node.pages
                continue
            if left:
                upper = self.cut(node, left)
                for tier in [tier for kept, tier in transfer.pins if kept is node]:
                    self.keep(transfer, upper, self.tiers[tier])
                left = 0
            if transfer.has_fault and unreadable is None and not self.is_doomed(node):
                unreadable = self.cut(node, 1) if node.pages > 1 else node
                if unreadable is not node:
                    self._fail(transfer, unreadable)
            self._fail(transfer, node)
        follow_ups = self.finish(transfer, now)
        if unreadable is None:
            return follow_ups
        self._give_up_copy(unreadable, transfer.source)
        return follow_ups + self.flush()

    def _give_up_copy(self, node: Node, tier: Tier) -> None:
        """Drop a copy that cannot be read, with what is below it if it was the last one.

        If somebody keeps it in place it stays: whoever reads it next finds the same.
        """
        index = tier.index
        if node.state[index] != READY or node.pins[index]:
            return
        self.counts.unreadable_pages += node.pages
        if node.children and node.state.count(ABSENT) == len(self.tiers) - 1:
            self.drop_descendants(node)
        self.free(node, tier)

    def is_arriving(self, node: Node) -> bool:
        """Whether a load is filling the node's GPU copy."""
        return any(transfer.target is self.gpu for transfer in node.transfers)

    def reset(self) -> None:
        """Forget every page (the model's weights changed). Slots in use by requests and transfers return when these end."""
        self.clear()

    def is_doomed(self, node: Node) -> bool:
        """Whether the node belongs to a tree that was given up."""
        return DOOMED in node.state
