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
        """Keep the prompt of a request that ends on its GPU, if it is persistent.

        A request that is retracted or fails keeps nothing: its pages may be what the others need.
        """
        if lease.request.persistent and lease.epoch == self.residency.epoch and (lease.node, lease.gpu) not in self.paths:
            self.paths[lease.node, lease.gpu] = None
            self.residency.pin(lease.node, lease.gpu)

    def pages_beside(self, lease: Lease) -> int:
        """Return how many pages of its GPU are kept that a request does not reuse; its lease is fresh from ``match``."""
        kept: set[Node] = set()
        for last, gpu in self.paths:
            node: Node | None = last if gpu is lease.gpu else None
            while node is not None and node not in kept:
                kept.add(node)
                node = node.parent
        kept.difference_update(lease.path[: lease.gpu_nodes])
        return sum([node.pages for node in kept])

    def let_go(self, gpu: Tier | None) -> None:
        """Keep nothing in a GPU tier any more, or in none."""
        for node, tier in list(self.paths):
            if gpu is None or tier is gpu:
                self.residency.unpin(node, tier)
                del self.paths[node, tier]
