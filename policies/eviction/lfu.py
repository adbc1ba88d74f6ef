"""Least frequently used."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LFU(RankedEviction):
    """Keeps what many requests share, such as system prompts; what was once popular stays forever.

    fewer hits                 leaves first
    equal hits, used earlier   leaves first
    """

    def rank(self, node: Node) -> tuple[int, float]:
        return node.hits_in(self.tier), node.last_used_in(self.tier)
