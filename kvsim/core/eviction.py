"""Eviction: makes room in a tier, by the order of its policy."""

from kvsim.core.pool import UNLIMITED
from kvsim.core.residency import Residency
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.transfer import transfers_of
from kvsim.core.tree import INCOMING, READY, Node
from kvsim.core.under_way import UnderWay
from kvsim.core.victims import check_enough, most_pages, victim, victims


class Eviction:
    """Evicts pages: they are freed, marked for writing down, or dropped; the residency does the bookkeeping."""

    def __init__(self, residency: Residency, under_way: UnderWay) -> None:
        self.residency = residency
        self.under_way = under_way
        self.counts = residency.counts
        self._is_single = len(residency.tiers) == 1
        gpus = [tier for tier in residency.tiers if tier.level == GPU]
        self._seen_together: dict[int, list[int]] = tiers_seen_together(gpus) if len(gpus) > 1 else {}
        self.is_offering = False
        """Set while unpinned nodes are offered to a tier: they must not be merged meanwhile."""

    def make_room(self, tier: Tier, pages: int, now: float) -> bool:
        """Evict until ``pages`` slots beyond those reserved are free, or will be once write-downs end.

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
            leaving = missing
            if tier.eviction.most_pages != UNLIMITED:
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
        return self._is_single or self.residency.is_last_copy(node)

    def evict(self, node: Node, tier: Tier, now: float) -> None:
        """Evict one evictable node from a tier, as if it were the next victim."""
        self._evict(node, tier, now)
        for edge in tier.below:
            if edge.leaving:
                self._place(edge, now)

    def offload(self, nodes: list[Node], edge: Edge, now: float) -> None:
        """Let evictable nodes leave, each as soon as those before it have: freed if another tier has them, else written down over
        an edge whose lower tier has room for them, whatever its placement policy would say."""
        for node in nodes:
            if self.is_elsewhere(node, edge.upper):
                self._free(node, edge.upper)
            else:
                self._leave(node, edge)
        self._place(edge, now)

    def _free(self, node: Node, tier: Tier) -> None:
        """Free a node that another tier has."""
        self.residency.free(node, tier)
        if not (self.is_offering or any(pins for pins in node.pins)):
            self.residency.merge(node)

    def _leave(self, node: Node, edge: Edge) -> None:
        """Mark a node for writing down at the end of the pass."""
        self.residency.leave(node, edge.upper)
        self.residency.reserve_copy(node, edge.lower)
        edge.leaving.append(node)

    def _evict(self, node: Node, tier: Tier, now: float) -> None:
        """Evict a node: free it if another tier has it, else mark it for writing down, else drop it with everything below it.

        The GPU of another engine does not count: a page that only it has besides is written down, but does not take along
        what is below it.
        """
        residency = self.residency
        if not self._is_single:
            if self.is_elsewhere(node, tier):
                self._free(node, tier)
                return
            for edge in tier.below:
                if edge.wants_evicted(node, now):
                    self._leave(node, edge)
                    return
            if self._seen_together and not residency.is_last_copy(node):
                residency.free(node, tier)
                return
            residency.drop_descendants(node)
            if node.state[tier.index] != READY:
                return  # a state that left with the pages below it needed room here, and took that of this node
        self.counts.dropped_pages += node.pages
        residency.free(node, tier)

    def is_elsewhere(self, node: Node, tier: Tier) -> bool:
        """Whether a GPU that can use the tier's copy of a node could also use a copy elsewhere."""
        if not self._seen_together:
            return node.copies > 1
        return sum([node.state[index] for index in self._seen_together[tier.index]]) > 0

    def _place(self, edge: Edge, now: float) -> None:
        """Make room below for the victims of the upper tier; if it is not enough, drop the first victims."""
        leaving, edge.leaving = edge.leaving, []
        lower, residency = edge.lower, self.residency
        doomed = residency.doomed
        for node in leaving:
            if not (doomed and node in doomed):
                residency.pin(node, lower)
        first = 0
        while first < len(leaving):
            node = leaving[first]
            if doomed and node in doomed:  # lost with pages above it that found no room elsewhere
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
                self._drop_victim(node, edge)
            else:
                first += 1
                self._drop_victim(node, edge)
        self.make_room(lower, 0, now)
        if first:
            del leaving[:first]
        if leaving:
            leaving.reverse()
            transfer = self.under_way.open(edge)
            transfer.nodes = leaving + transfer.nodes if transfer.nodes else leaving
            self.under_way.carry(transfer, leaving)

    def _drop_victim(self, node: Node, edge: Edge) -> None:
        """Drop a victim that finds no room below, with everything below it in the tree."""
        residency, pages = self.residency, node.pages
        self.counts.no_room_pages += pages
        self.counts.dropped_pages += pages
        residency.unpin(node, edge.lower)
        if node.state[edge.lower.index] == INCOMING:
            residency.drop_copy(node, edge.lower)
        residency.drop_copy(node, edge.upper)

    def revive(self, node: Node, tier: Tier, now: float) -> None:
        """Make a leaving copy ready again; a write-down under way continues."""
        self.residency.revive(node, tier, now)
        for transfer in transfers_of(node):
            if transfer.source is tier:
                self.under_way.keep(transfer, node, tier)


def tiers_seen_together(gpus: list[Tier]) -> dict[int, list[int]]:
    """Return, by the index of each tier, the other tiers that some GPU sees together with it; GPUs do not see each other."""
    together: dict[int, list[int]] = {}
    for gpu in gpus:
        view = [gpu.index, *[tier.index for tier in gpu.all_below()]]
        for index in view:
            known = together.setdefault(index, [])
            known += [other for other in view if other != index and other not in known]
    return together
