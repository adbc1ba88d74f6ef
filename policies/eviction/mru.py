"""Most recently used."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class MRU(RankedEviction):
    """Keeps what was used longest ago: best when pages recur in a cycle larger than the cache. SGLang's ``mru``.

    last used later   leaves first
    """

    def on_hit(self, node: Node, now: float) -> None:
        """A use lowers the rank, so a node that is not pinned (in a lower tier) is entered again at once."""
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def rank(self, node: Node) -> float:
        return -node.last_used_in(self.tier)
