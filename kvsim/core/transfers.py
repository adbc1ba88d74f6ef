"""How pages move: eviction, copies to the tier below, and transfers in both directions.

Nothing here waits: a transfer is created, begun and ended by calls.
"""

from math import ceil
from typing import NamedTuple, cast

from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.transfer import Hold, Transfer, transfers_of
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node
from kvsim.core.victims import check_enough, most_pages, victim, victims

NO_TRANSFERS: list[Transfer] = []


class Begin(NamedTuple):
    """Whether a transfer can run; if not, the transfers that must end first."""

    can_run: bool
    waits: list[Transfer]


RUN = Begin(True, NO_TRANSFERS)


class Transfers:
    """Makes room in tiers and moves pages along edges; the residency does the bookkeeping."""

    def __init__(self, residency: Residency, edges: list[Edge]) -> None:
        self.residency = residency
        self.edges = edges
        """From the top down: an edge comes before the edges below its lower tier."""
        self.counts = residency.counts
        self.in_flight: dict[Transfer, None] = {}
        """Transfers handed out but not yet ended, in order of creation."""
        self.holds: dict[Hold, None] = {}
        """What is kept for requests that wait."""
        self._is_single = len(residency.tiers) == 1
        self._absent_elsewhere = len(residency.tiers) - 1
        gpus = [tier for tier in residency.tiers if tier.level == GPU]
        self._in_line: dict[int, list[int]] = in_line(gpus) if len(gpus) > 1 else {}
        self._is_offering = False
        """Set while unpinned nodes are offered to a tier: they must not be merged meanwhile."""
        self.writes_early = [edge for edge in edges if edge.watermark() > 0]

    # --- eviction --------------------------------------------------------------------------------------------------------

    def make_room(self, tier: Tier, pages: int, now: float) -> bool:
        """Evict until ``pages`` slots beyond those promised are free, or will be once write-downs end.

        Returns False, without evicting anything, if that is impossible.
        """
        missing = pages - tier.spare_pages
        if missing <= 0:
            return True
        if missing > tier.evictable_pages:
            return False
        tree = self.residency.tree
        for offered in victims(tier, now):
            node = victim(offered, tree, tier)
            leaving = min(missing, most_pages(tier))
            if node.partner is not None or node.is_state:
                tier.eviction.cut_offered(node)
                self._cut_with_state(node, tier, missing)
            elif leaving < node.pages:
                if self._can_trim(node, tier):
                    self.residency.trim(node, tier, leaving)
                    missing -= leaving
                    if not missing:
                        break
                    continue
                self.residency.cut(node, node.pages - leaving)
            self._evict(node, tier, now)
            missing = pages - tier.spare_pages
            if missing <= 0:
                break
        check_enough(tier, missing)
        for edge in tier.below:
            if edge.leaving:
                self._place(edge, now)
        return True

    def _cut_with_state(self, node: Node, tier: Tier, missing: int) -> None:
        """Cut off the pages that may stay of a victim that ends at a recurrent state; the state leaves with its last page."""
        state = node.partner
        if not node.is_state and state is not None:
            leaving = state.pages if state.is_evictable(tier.index) else 0
            surplus = node.pages - max(1, missing - leaving)
            if surplus > 0:
                self.residency.cut(node, surplus)

    def _can_trim(self, node: Node, tier: Tier) -> bool:
        """Whether the last pages of a leaf can be freed without cutting it: it has no other copy and is not written down."""
        if tier.below or not tier.may_shorten or self.residency.on_leave is not None or node.children or node.transfers:
            return False
        return self._is_single or node.state.count(ABSENT) == self._absent_elsewhere

    def evict(self, node: Node, tier: Tier, now: float) -> None:
        """Evict one evictable node from a tier, as if it were the next victim."""
        self._evict(node, tier, now)
        for edge in tier.below:
            if edge.leaving:
                self._place(edge, now)

    def _evict(self, node: Node, tier: Tier, now: float) -> None:
        """Evict a node: free it if another tier has it, else mark it for writing down, else drop it with everything below it.

        The GPU of another engine does not count: a page that only it has besides is written down, but does not take along
        what is below it.
        """
        residency = self.residency
        if not self._is_single:
            if self._is_elsewhere(node, tier):
                residency.free(node, tier)
                if not self._is_offering and not any(node.pins):
                    residency.merge(node)
                return
            for edge in tier.below:
                if edge.wants_evicted(node, now):
                    residency.leave(node, tier)
                    residency.promise_copy(node, edge.lower)
                    edge.leaving.append(node)
                    return
            if node.state.count(ABSENT) < self._absent_elsewhere:
                residency.free(node, tier)
                return
            residency.drop_descendants(node)
        self.counts.dropped_pages += node.pages
        residency.free(node, tier)

    def _is_elsewhere(self, node: Node, tier: Tier) -> bool:
        """Whether a GPU that can use the tier's copy of a node could also use a copy elsewhere."""
        if not self._in_line:
            return node.state.count(ABSENT) < self._absent_elsewhere
        return sum([node.state[index] for index in self._in_line[tier.index]]) > 0

    def _place(self, edge: Edge, now: float) -> None:
        """Make room below for the victims of the upper tier; if it is not enough, drop the first victims."""
        leaving, edge.leaving = edge.leaving, []
        lower, residency = edge.lower, self.residency
        for node in leaving:
            if node not in residency.doomed:
                residency.pin(node, lower)
        first = 0
        while first < len(leaving):
            node = leaving[first]
            if node in residency.doomed:  # lost with pages above it that found no room elsewhere
                first += 1
                residency.drop_copy(node, edge.upper)
                continue
            missing = -lower.available_pages
            if missing <= 0:
                break
            if node.is_state:
                missing = node.pages
            elif node.children:
                missing = 1  # dropping its last page drops everything below it, which may make room
            if missing < node.pages:
                upper = leaving[first] = residency.cut(node, node.pages - missing)
                residency.pin(upper, lower)
                self._unpromise(node, edge)
            else:
                first += 1
                self._unpromise(node, edge)
        self.make_room(lower, 0, now)
        written = leaving[first:]
        written.reverse()
        if written:
            transfer = self._open(edge)
            transfer.nodes[0:0] = written
            for node in written:
                self._carry(transfer, node)

    def _unpromise(self, node: Node, edge: Edge) -> None:
        """Drop a victim that finds no room below, with everything below it in the tree."""
        residency, pages = self.residency, node.pages
        self.counts.no_room_pages += pages
        self.counts.dropped_pages += pages
        residency.unpin(node, edge.lower)
        if node.state[edge.lower.index] == INCOMING:
            residency.drop_copy(node, edge.lower)
        residency.drop_copy(node, edge.upper)

    def lose(self, tier: Tier) -> None:
        """Drop all copies of a tier, and everything below pages that no other tier has. No copy may be in use."""
        residency, index = self.residency, tier.index
        for node in reversed(list(residency.tree.root.descendants())):
            if node.state[index] == READY:
                if node.state.count(ABSENT) == self._absent_elsewhere:
                    residency.drop_descendants(node)
                    self.counts.dropped_pages += node.pages
                residency.free(node, tier)

    def stay(self, node: Node, tier: Tier, now: float) -> None:
        """Make a leaving copy ready again; a write-down under way continues."""
        self.residency.stay(node, tier, now)
        for transfer in transfers_of(node):
            if transfer.source is tier:
                self.keep(transfer, node, tier)

    # --- copies to the tier below ------------------------------------------------------------------------------------------

    def offer_path(self, node: Node, edge: Edge, now: float, prompt: Request | None = None) -> None:
        """Offer the path down to ``node``, which a request has just used, to the tier below.

        A policy that decides about whole prompts is asked only if ``prompt`` is given: the path is then that prompt.
        """
        if edge.copies_nodes:
            index, end = edge.lower.index, node
            path: list[Node] = []
            above = node.parent
            while above is not None:
                if not node.state[index]:
                    path.append(node)
                node = above
                above = node.parent
            if path:
                path.reverse()
                self._offer(path, edge, now, [end])
        elif edge.copies_prompts and prompt is not None:
            self._offer_prompt(node, prompt, edge, now)

    def _offer(self, nodes: list[Node], edge: Edge, now: float, pinned: list[Node]) -> None:
        """Copy those of ``nodes`` (parents first) that the policy wants to the tier below, keeping ``pinned`` there meanwhile.

        No page is copied before its parent. If there is not room for all, even by evicting, nothing is evicted and only the
        first pages that fit into spare slots are copied.
        """
        upper, lower = edge.upper.index, edge.lower.index
        wanted: list[Node] = []
        taken: set[Node] = set()
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if node.state[upper] != READY or node.state[lower]:
                continue
            if parent.state[upper] == READY and not parent.state[lower] and parent not in taken:
                continue
            if edge.wants_used(node, now):
                wanted.append(node)
                taken.add(node)
        if wanted:
            self._copy_down(wanted, edge, now, pinned)

    def _copy_down(self, nodes: list[Node], edge: Edge, now: float, pinned: list[Node], *, whole: bool = False) -> None:
        """Copy nodes (parents first) down. Without room for all, copy those that fit into spare slots or, if ``whole``, none."""
        lower, residency = edge.lower, self.residency
        pages = 0
        for node in nodes:
            pages += node.pages
        for node in pinned:
            residency.pin(node, lower)
        starts = [node.depth for node in nodes]
        if self.make_room(lower, pages, now):
            fits = [part for node, start in zip(nodes, starts, strict=True) for part in parts_from(node, start)]
        else:
            fits = [] if whole else residency.first_pages(nodes, lower.spare_pages)
        for node in fits:
            self.write_down(node, edge)
            pages -= node.pages
        self.counts.no_room_pages += pages
        for node in pinned:
            residency.unpin(node, lower)

    def _offer_prompt(self, node: Node, prompt: Request, edge: Edge, now: float) -> None:
        """Copy what the policy wants of a prompt, which ends with ``node``, to the tier below: all of that or nothing."""
        nodes = self._wanted_of_prompt(node, prompt, edge, now)
        if nodes:
            self._copy_down(nodes, edge, now, [node], whole=True)

    def write_down(self, node: Node, edge: Edge) -> None:
        """Add a node to the write-down over an edge; the caller has made room below."""
        transfer = self._open(edge)
        self.residency.promise_copy(node, edge.lower)
        self.residency.pin(node, edge.lower)
        transfer.nodes.append(node)
        self._carry(transfer, node)

    def _wanted_of_prompt(self, node: Node, prompt: Request, edge: Edge, now: float) -> list[Node]:
        """Return the nodes of a prompt that the policy wants below and only the upper tier has, cutting the last if need be.

        The list ends before the first node that is still on its way to the upper tier.
        """
        path = node.path()
        upper, lower = edge.upper.index, edge.lower.index
        wanted = edge.wanted_pages(prompt, path, now)
        nodes: list[Node] = []
        for node in path:
            if node.depth >= wanted or node.state[upper] not in (ABSENT, READY) and not node.state[lower]:
                break
            if node.state[upper] and not node.state[lower]:
                nodes.append(node if node.depth + node.pages <= wanted else self.residency.cut(node, wanted - node.depth))
        return nodes

    def write_early(self, now: float) -> None:
        """Copy pages down before they are evicted, over each edge whose watermark the upper tier exceeds."""
        for edge in self.writes_early:
            nodes = self._early_victims(edge, now)
            if nodes:
                self._is_offering = True
                self._copy_early(nodes, edge, now)
                self._is_offering = False

    def _copy_early(self, nodes: list[Node], edge: Edge, now: float) -> None:
        """Copy as many pages of ``nodes`` down as fit; nodes are in order of eviction."""
        lower, residency = edge.lower, self.residency
        pinned, fits, pages, wanted = list[Node](), list[Node](), 0, 0
        for node in nodes:
            wanted += node.pages
        for node in nodes:
            residency.pin(node, lower)
            pinned.append(node)
            room = lower.available_pages - pages
            if room < node.pages:
                if room > 0 and not node.is_state:
                    residency.cut(node, node.pages - room)  # its last pages leave first
                    fits.append(node)
                    pages += room
                else:
                    residency.unpin(pinned.pop(), lower)
                break
            fits.append(node)
            pages += node.pages
        self.counts.no_room_pages += wanted - pages
        self.make_room(lower, pages, now)
        fits.reverse()
        for node in fits:
            self.write_down(node, edge)
        for node in pinned:
            residency.unpin(node, lower)

    def _early_victims(self, edge: Edge, now: float) -> list[Node]:
        """Return the nodes to copy down so that the pages above the watermark are free or can be freed at once.

        These are the next victims without another copy, in order of eviction. Passing over victims that are copied already
        costs time, so the search runs only after new pages amount to half of the share above the watermark.
        """
        tier = edge.upper
        wanted, ready = (1 - edge.watermark()) * tier.pool.capacity, tier.spare_pages
        if ready >= wanted or tier.inserted_pages - edge.early_mark < wanted / 2:
            return []
        edge.early_mark = tier.inserted_pages
        nodes: list[Node] = []
        index, passed = tier.index, list[Node]()
        for offered in victims(tier, now):
            node = victim(offered, self.residency.tree, tier)
            tier.eviction.cut_offered(node)
            missing = ceil(wanted - ready)
            if node.pages > missing and not node.is_state:
                self.residency.cut(node, node.pages - missing)
            ready += node.pages
            if not self._is_elsewhere(node, tier) and edge.wants_evicted(node, now):
                nodes.append(node)
            passed.append(node)
            self._pass_over(node, tier)
            if ready >= wanted:
                break
        for node in passed:
            node.pins[index] -= 1
            node.parent.children_in[index] += 1  # type: ignore[union-attr]
        for node in passed:
            if not node.children_in[index]:
                tier.eviction.on_evictable(node)
        return nodes

    @staticmethod
    def _pass_over(node: Node, tier: Tier) -> None:
        """Pass over a victim as if it had been evicted, so that its parent can be offered next."""
        parent = node.parent
        assert parent is not None
        node.pins[tier.index] += 1
        parent.children_in[tier.index] -= 1
        if parent.is_evictable(tier.index):
            tier.eviction.on_evictable(parent)

    # --- transfers ---------------------------------------------------------------------------------------------------------

    def _open(self, edge: Edge) -> Transfer:
        """Return the transfer that collects write-downs over an edge, creating it if need be."""
        transfer = edge.open
        if transfer is None:
            transfer = edge.open = Transfer(edge, [], goes_down=True)
        return cast(Transfer, transfer)

    def _carry(self, transfer: Transfer, node: Node) -> None:
        """Record that a transfer carries a node. The target copy, pinned already, stays until the end, as does a source copy that
        is not leaving."""
        node.transfers += (transfer,)
        transfer.pins.append((node, transfer.target.index))
        if node.state[transfer.source.index] != LEAVING:
            self.keep(transfer, node, transfer.source)

    def flush(self) -> list[Transfer]:
        """Return the write-downs decided on since the last call, the lowest edge first: each frees room for the next."""
        opened = NO_TRANSFERS
        for edge in reversed(self.edges):
            if edge.open is not None:
                transfer = cast(Transfer, edge.open)
                edge.open = None
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

    def hold(self, fetch: Transfer) -> Hold:
        """Keep the pages of a fetch that has just been started, and the path above them, in its target until ``let_go``."""
        hold = fetch.hold = Hold(fetch.nodes[-1], fetch.target)
        self.residency.pin(fetch.nodes[-1], fetch.target)
        self.holds[hold] = None
        return hold

    def let_go(self, hold: Hold) -> None:
        """Release one ``hold``. Does nothing if it keeps no page any more."""
        self.holds.pop(hold, None)
        if hold.node is not None:
            self.residency.unpin(hold.node, hold.tier)
            hold.node = None

    def _hold_arrived(self, hold: Hold, fetch: Transfer) -> None:
        """Let a hold keep what has arrived, and nothing else."""
        if not fetch.nodes:
            self.let_go(hold)
        elif hold.node is not None and hold.node is not fetch.nodes[-1]:
            self.residency.pin(fetch.nodes[-1], hold.tier)
            self.residency.unpin(hold.node, hold.tier)
            hold.node = fetch.nodes[-1]

    def departing(self, tier: Tier) -> list[Transfer]:
        """Return transfers that must end before slots of the tier become free: the write-downs just decided on, then the oldest
        one in flight from this tier. Empty if there is none."""
        transfers = self.flush()
        for edge in tier.below:
            if edge.in_flight:
                return [*transfers, cast(Transfer, next(iter(edge.in_flight)))]
        return transfers

    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Give the transfer its target slots, unless other transfers must end first."""
        if transfer.begun:
            return RUN
        if transfer.after:
            waits = [earlier for earlier in transfer.after if not earlier.done]
            if waits:
                return Begin(False, waits)
            self._cut_short(transfer)
        target, index = transfer.target, transfer.target.index
        while True:
            if self.residency.doomed:
                self._leave_out_doomed(transfer)
            unplaced, pages = list[Node](), 0
            for node in transfer.nodes:
                if node.slots[index] is None:
                    unplaced.append(node)
                    pages += node.pages
            if target.pool.free >= pages:
                break
            if target.leaving_pages or self.make_room(target, 0, now):
                waits = self.departing(target)
                if waits:
                    return Begin(False, waits)
                continue
            self.counts.no_room_pages += pages
            for node in unplaced:
                self._fail(transfer, node)
        target.promised_pages -= pages
        for node in unplaced:
            node.slots[index] = target.pool.take(node.pages)
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
        """End a transfer whose pages have all arrived. Returns the write-downs that follow."""
        residency, target = self.residency, transfer.target
        transfer.done = True
        transfer.arrived_pages = transfer.pages
        del self.in_flight[transfer]
        edge = transfer.edge
        if transfer.goes_down:
            del edge.in_flight[transfer]
        self._count(transfer)
        for node in transfer.nodes:
            self._arrive(node, transfer, now)
        if transfer.hold is not None:
            self._hold_arrived(transfer.hold, transfer)
        for node, index in transfer.pins:
            residency.unpin(node, residency.tiers[index])
        if not edge.keeps_loaded():
            self._drop_duplicates(transfer.nodes, edge)
        if transfer.goes_down and target.below and transfer.nodes:
            self._is_offering = True
            for below in target.below:
                self._offer_arrived(transfer, below, now)
            self._is_offering = False
        for node in transfer.nodes:
            residency.merge(node)
        return self.flush()

    def _offer_arrived(self, transfer: Transfer, edge: Edge, now: float) -> None:
        """Offer what has arrived from above to the tier below: pages in path order, then recurrent states."""
        if edge.copies_nodes:
            pages = [node for node in transfer.nodes if not node.is_state]
            nodes = pages + [node for node in transfer.nodes if node.is_state]
            self._offer(nodes, edge, now, nodes)
        elif edge.copies_prompts and transfer.request is not None:
            self._offer_prompt(transfer.nodes[-1], transfer.request, edge, now)

    def _count(self, transfer: Transfer) -> None:
        counts, pages = self.counts, transfer.arrived_pages
        if transfer.goes_down:
            counts.written_pages += pages
        elif transfer.target.level == GPU:
            counts.loaded_pages += pages
        else:
            counts.fetched_pages += pages

    def _arrive(self, node: Node, transfer: Transfer, now: float) -> None:
        if len(node.transfers) == 1:
            node.transfers = ()
        else:
            node.transfers = tuple([other for other in node.transfers if other is not transfer])
        if node.state[transfer.target.index] == INCOMING:
            self.residency.set_ready(node, transfer.target, now)
        if node.state[transfer.source.index] == LEAVING:
            self.residency.drop_copy(node, transfer.source)

    def _drop_duplicates(self, nodes: list[Node], edge: Edge) -> None:
        """Free the lower tier's copies of nodes that the upper tier has, unless they are pinned."""
        upper, lower = edge.upper.index, edge.lower.index
        for node in reversed(nodes):
            if node.state[upper] == READY and node.state[lower] == READY and not node.pins[lower]:
                self.residency.free(node, edge.lower)

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
        """End a transfer after only its first ``pages_arrived`` pages arrived, in the order of ``transfer.nodes``.

        Of a recurrent state, all pages must have arrived. If the next page cannot be read (``transfer.has_fault``), its copy in
        the source is dropped too. Returns the write-downs that follow.
        """
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
                    self.keep(transfer, upper, residency.tiers[index])
            left = 0
            if transfer.has_fault and unreadable is None and not residency.is_doomed(node):
                unreadable = residency.cut(node, 1) if node.pages > 1 and not node.is_state else node
                if unreadable is not node:
                    self._fail(transfer, unreadable)
            self._fail(transfer, node)
        follow_ups = self.finish(transfer, now)
        if unreadable is None:
            return follow_ups
        self._give_up_copy(unreadable, transfer.source)
        return follow_ups + self.flush()

    def _give_up_copy(self, node: Node, tier: Tier) -> None:
        """Drop a copy that cannot be read and, if it was the last one, everything below the node.

        A copy in use stays; the next transfer that reads it finds the same fault.
        """
        index = tier.index
        if node.state[index] != READY or node.pins[index]:
            return
        self.counts.unreadable_pages += node.pages
        if node.state.count(ABSENT) == self._absent_elsewhere:
            self.residency.drop_descendants(node)
        self.residency.free(node, tier)


def parts_from(node: Node, start: int) -> list[Node]:
    """Return the nodes on the path to ``node`` that cover its pages from page ``start`` on, top to bottom: several if the node
    has been cut."""
    parts = [node]
    while node.depth > start:
        assert node.parent is not None
        node = node.parent
        parts.append(node)
    parts.reverse()
    return parts


def in_line(gpus: list[Tier]) -> dict[int, list[int]]:
    """Return, by the index of each tier, the other tiers that some GPU sees together with it; GPUs do not see each other."""
    together: dict[int, list[int]] = {}
    for gpu in gpus:
        view = [gpu.index, *[tier.index for tier in gpu.all_below()]]
        for index in view:
            known = together.setdefault(index, [])
            known += [other for other in view if other != index and other not in known]
    return together


def is_gap(node: Node, gpu: Tier) -> bool:
    """Return whether a node has slots on the GPU whose content no load brings any more: a request computes it."""
    return node.state[gpu.index] == INCOMING and not is_arriving(node, gpu)


def is_arriving(node: Node, tier: Tier) -> bool:
    """Whether a load is filling the node's copy in a tier."""
    return any(transfer.target is tier for transfer in transfers_of(node))
