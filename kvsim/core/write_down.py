"""Copies to the tier below: after a use, or before an eviction, as the placement policy of the edge decides."""

from math import ceil

from kvsim.core.eviction import Eviction
from kvsim.core.request import Request
from kvsim.core.tier import Edge
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, READY, Node
from kvsim.core.victims import victim, victims


class WriteDown:
    """Offers pages to the tier below, and copies those that the policy wants."""

    def __init__(self, eviction: Eviction, edges: list[Edge]) -> None:
        self.eviction = eviction
        self.residency = eviction.residency
        self.under_way = eviction.under_way
        self.counts = eviction.counts
        self.early_edges = [edge for edge in edges if edge.watermark() > 0]
        """Edges over which pages are copied before they are evicted."""

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
        if self.eviction.make_room(lower, pages, now):
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
        transfer = self.under_way.open(edge)
        self.residency.reserve_copy(node, edge.lower)
        self.residency.pin(node, edge.lower)
        transfer.nodes.append(node)
        self.under_way.carry(transfer, [node])

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

    def offer_arrived(self, transfer: Transfer, now: float) -> None:
        """Offer what has arrived from above to the tiers below: pages in path order, then recurrent states."""
        self.eviction.is_offering = True
        for edge in transfer.target.below:
            if edge.copies_nodes:
                pages = [node for node in transfer.nodes if not node.is_state]
                nodes = pages + [node for node in transfer.nodes if node.is_state]
                self._offer(nodes, edge, now, nodes)
            elif edge.copies_prompts and transfer.request is not None:
                self._offer_prompt(transfer.nodes[-1], transfer.request, edge, now)
        self.eviction.is_offering = False

    def write_early(self, now: float) -> None:
        """Copy pages down before they are evicted, over each edge whose watermark the upper tier exceeds."""
        for edge in self.early_edges:
            nodes = self._early_victims(edge, now)
            if nodes:
                self.eviction.is_offering = True
                self._copy_early(nodes, edge, now)
                self.eviction.is_offering = False

    def _copy_early(self, nodes: list[Node], edge: Edge, now: float) -> None:
        """Copy as many pages of ``nodes`` down as fit; nodes are in order of eviction."""
        lower, residency = edge.lower, self.residency
        pinned: list[Node] = []
        fits: list[Node] = []
        pages = wanted = 0
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
        self.eviction.make_room(lower, pages, now)
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
        if ready >= wanted or tier.inserted_pages - edge.inserted_at_early_write < wanted / 2:
            return []
        edge.inserted_at_early_write = tier.inserted_pages
        nodes: list[Node] = []
        passed: list[Node] = []
        for offered in victims(tier, now):
            node = victim(offered, self.residency.tree, tier)
            tier.eviction.cut_offered(node)
            missing = ceil(wanted - ready)
            if node.pages > missing and not node.is_state:
                self.residency.cut(node, node.pages - missing)
            ready += node.pages
            if not self.eviction.is_elsewhere(node, tier) and edge.wants_evicted(node, now):
                nodes.append(node)
            passed.append(node)
            self.residency.pass_over(node, tier)
            if ready >= wanted:
                break
        self.residency.take_back(passed, tier)
        return nodes


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
