"""Most recently used."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class MRU(RankedEviction):
    """Keeps what was used long ago: right where pages come back in turn and their cycle exceeds the cache. SGLang's ``mru``.

    last used later   leaves first
    """

    def on_hit(self, node: Node, now: float) -> None:
        """A use lowers the rank; where nothing pins the node (in lower tiers) its place changes at once."""
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def rank(self, node: Node) -> float:
        return -node.last_used
