"""What LFU-DA and GDSF have in common: a node's worth counts from the level that victims had reached when it was last used."""

from abc import abstractmethod

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
class AgingEviction(RankedEviction):
    """Evicts by ``H = L + worth``; L is the H of the last victim, and a node notes the L of its last use until the next one."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
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

    def on_hit(self, node: Node, now: float) -> None:
        """L may have fallen since, and with it the rank, which takes effect at once where nothing pins the node."""
        self.on_insert(node, now)
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def on_remove(self, node: Node) -> None:
        """A victim's pages leave, the deepest first: the last of them is the one that the node begins with."""
        if node is self._offered:
            self.level = node.notes[self.tier] + self.worth(node, node.depth + 1)
            self._offered = None

    def on_shorten(self, node: Node, pages: int) -> None:
        self.level = node.notes[self.tier] + self.worth(node, node.depth + node.pages - pages + 1)
