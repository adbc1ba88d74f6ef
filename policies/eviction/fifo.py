"""First in, first out."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class FIFO(RankedEviction):
    """Keeps what was computed last, however often the rest is used: the cheapest order to maintain, as a baseline.

    computed earlier   leaves first
    """

    def rank(self, node: Node) -> float:
        return node.created_in(self.tier)
