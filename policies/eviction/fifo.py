"""First in, first out."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class FIFO(RankedEviction):
    """Keeps what was computed last, however often the rest is used: the cheapest order to maintain, for comparison.

    computed earlier   leaves first
    """

    def rank(self, node: Node) -> float:
        return node.created
