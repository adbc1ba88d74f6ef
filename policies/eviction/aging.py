"""Base class of LFU-DA and GDSF: a node's worth is added to the level that victims had reached at its last use."""

from abc import abstractmethod

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
class AgingEviction(RankedEviction):
    """Evicts by ``H = L + worth``, lowest first. L is the H of the last victim; each node notes the L at its last use."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.level = 0.0
        """L: the H of the last page evicted."""

    @abstractmethod
    def worth(self, node: Node, end: int) -> float:
        """Return the worth of the node's page that ends at a depth of ``end`` pages."""

    def rank(self, node: Node) -> tuple[float, float]:
        """Return the H of the node's last page and, to break ties, its last use."""
        return node.notes[self.tier] + self.worth(node, node.depth + node.pages), node.last_used_in(self.tier)

    def on_insert(self, node: Node, now: float) -> None:
        node.note(self.tier, self.level)

    def on_hit(self, node: Node, now: float) -> None:
        """L, and with it the rank, may have fallen since the last use, so a node that is not pinned is entered again."""
        self.on_insert(node, now)
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def on_remove(self, node: Node) -> None:
        """Set L. A victim's pages leave deepest first, so the last one to leave is the node's first page."""
        if node is self._offered:
            self.level = node.notes[self.tier] + self.worth(node, node.depth + 1)
            self._offered = None

    def on_shorten(self, node: Node, pages: int) -> None:
        self.level = node.notes[self.tier] + self.worth(node, node.depth + node.pages - pages + 1)
