"""An eviction policy that knows which nodes are evictable by what it is told alone."""

from kvsim.core.tier import Tier
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU


class Knowing(LRU):
    """LRU; a node that is told to be evictable no longer must have been so until then."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.evictable: set[Node] = set()

    def on_evictable(self, node: Node) -> None:
        super().on_evictable(node)
        assert node.is_evictable(self.tier)
        self.evictable.add(node)

    def on_unevictable(self, node: Node) -> None:
        self.evictable.remove(node)

    def check(self, tier: Tier, nodes: list[Node]) -> None:
        """Compare with all nodes of the tree."""
        assert self.evictable == {node for node in nodes if node.is_evictable(tier.index)}
