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
        """L: the H of the last page that was evicted."""

    @abstractmethod
    def worth(self, node: Node, end: int) -> float:
        """What the node's page that ends ``end`` pages deep is worth."""

    def rank(self, node: Node) -> tuple[float, float]:
        """The H of the node's last page. Then its last use, to decide among equals."""
        return node.notes[self.tier] + self.worth(node, node.depth + node.pages), node.last_used

    def on_insert(self, node: Node, now: float) -> None:
        node.note(self.tier, self.level)

    on_hit = on_insert

    def victims(self, now: float) -> Iterator[Node]:
        tier, node = self.tier, None
        try:
            for node in super().victims(now):
                pages = node.pages
                yield node
                if node.state[tier] != READY:
                    self._rise(node, node.depth)
        finally:
            if node is not None and (node.state[tier] != READY or node.pages < pages):
                self._rise(node, node.depth if node.state[tier] != READY else node.depth + node.pages)
                if node.is_evictable(tier):
                    self.on_evictable(node)

    def _rise(self, node: Node, left: int) -> None:
        """All pages of a node that are deeper than ``left`` pages have left, the last of them the one that follows these."""
        self.level = node.notes[self.tier] + self.worth(node, left + 1)
