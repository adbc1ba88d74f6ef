"""What LFU-DA and GDSF have in common: a node's worth counts from the level that victims had reached when it was last used."""

from abc import abstractmethod
from collections.abc import Iterator

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


class AgingEviction(RankedEviction):
    """Evicts by ``H = L + worth``; L is the H of the last victim, and a node keeps the L of its last use until the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0

    @abstractmethod
    def worth(self, node: Node) -> float:
        """What the node is worth by itself; never less after a hit."""

    def on_insert(self, node: Node, now: float) -> None:
        node.notes[self.tier] = self.level

    def on_hit(self, node: Node, now: float) -> None:
        node.notes[self.tier] = self.level

    def rank(self, node: Node) -> tuple[float, float]:
        return node.notes[self.tier] + self.worth(node), node.last_used

    def victims(self, now: float) -> Iterator[Node]:
        tier = self.tier
        for node in super().victims(now):
            pages, rank = node.pages, self.rank(node)
            try:
                yield node
            finally:
                if not node.is_evictable(tier):
                    self.level = rank[0]
                elif node.pages < pages:
                    self.level = rank[0]
                    self.on_evictable(node)
