"""Least frequently used."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class LFU(RankedEviction):
    """Keeps what many requests share, such as system prompts; what was popular once stays for ever.

    fewer hits                      leaves first
    as many hits, used earlier      leaves first
    """

    def rank(self, node: Node) -> tuple[int, float]:
        return node.hits, node.last_used
