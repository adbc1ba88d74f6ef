"""What LFU-DA and GDSF have in common: a node's worth counts from the level that victims had reached when it was last used."""

from abc import abstractmethod
from collections.abc import Iterator

from kvsim.core.tree import READY, Node
from kvsim.policies.eviction.base import RankedEviction


class AgingEviction(RankedEviction):
    """Evicts by ``H = L + worth``; L is the H of the last victim, and a node notes the L of its last use until the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0
        """L: the H of the last victim."""

    @abstractmethod
    def rank(self, node: Node) -> tuple[float, float]:
        """The node's H: what it has noted and its worth. Then its last use, to decide among equals."""

    def on_insert(self, node: Node, now: float) -> None:
        node.note(self.tier, self.level)

    on_hit = on_insert

    def victims(self, now: float) -> Iterator[Node]:
        heap, tier = self.heap, self.tier
        node, level = None, 0.0
        try:
            for node in super().victims(now):
                pages, level = node.pages, heap[0][0][0]
                yield node
                if node.state[tier] != READY:
                    self.level = level
        finally:
            if node is not None and (node.state[tier] != READY or node.pages < pages):
                self.level = level
                if node.is_evictable(tier):
                    self.on_evictable(node)
