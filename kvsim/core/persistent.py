"""Prompts that stay on their GPU for good."""

from kvsim.core.lease import Lease
from kvsim.core.residency import Residency
from kvsim.core.tier import Tier
from kvsim.core.tree import Node


class PersistentPrompts:
    """Paths that are kept in a GPU tier, each from the end of a request that asks for it."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.paths: dict[tuple[Node, Tier], None] = {}
        """(last node, GPU tier)."""

    def keep(self, lease: Lease) -> None:
        """Keep the prompt of a request that ends on its GPU, if it is persistent; its path may go on behind the prompt.

        A request that is retracted or fails keeps nothing: its pages may be what the others need.
        """
        request = lease.request
        if not request.persistent or lease.epoch != self.residency.epoch:
            return
        end = lease.node
        while end.parent is not None and end.depth >= request.prompt_pages:
            end = end.parent
        if end.depth + end.pages > request.prompt_pages:
            end = self.residency.cut(end, request.prompt_pages - end.depth)
        if (end, lease.gpu) not in self.paths:
            self.paths[end, lease.gpu] = None
            self.residency.pin(end, lease.gpu)

    def pages_beside(self, lease: Lease) -> int:
        """Return how many pages of its GPU are kept that a request does not reuse; its lease is fresh from ``match``."""
        if not self.paths:
            return 0
        kept = self.nodes(lease.gpu)
        kept.difference_update(lease.path[: lease.gpu_nodes])
        return sum([node.pages for node in kept])

    def nodes(self, gpu: Tier) -> set[Node]:
        """Return the nodes that are kept in a GPU tier."""
        kept: set[Node] = set()
        for last, tier in self.paths:
            node: Node | None = last if tier is gpu else None
            while node is not None and node not in kept:
                kept.add(node)
                node = node.parent
        return kept

    def let_go(self, gpu: Tier | None) -> None:
        """Keep nothing in a GPU tier any more, or in none."""
        for node, tier in list(self.paths):
            if gpu is None or tier is gpu:
                self.residency.unpin(node, tier)
                del self.paths[node, tier]
