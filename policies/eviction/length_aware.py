"""Length-aware eviction (Qin et al.: Mooncake, FAST 2025, ``LengthAwareCache``)."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class LengthAware(RankedEviction):
    """LFU that gives up the ends of long prompts first: fewer requests get so far than share the beginning.

    fewer hits                        leaves first
    as many hits, ends later          leaves first
    as many hits, ends at one place   least recently used first
    """

    def rank(self, node: Node) -> tuple[int, int, float]:
        return node.hits, -(node.depth + node.pages), node.last_used

    def pages_before(self, node: Node, next_rank: tuple[int, int, float]) -> int:
        hits, next_end, last_used = next_rank
        if node.hits < hits:
            return node.pages
        return max(1, node.depth + node.pages + next_end + (node.last_used < last_used))
