"""Least recently used."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction
from kvsim.policies.eviction.offload_order import LruOffload, OffloadOrder


@dataclass(kw_only=True, eq=False)
class LRU(RankedEviction):
    """Keeps what was used last: the default of every engine, and hard to beat when reuse follows soon after use.

    last used earlier   leaves first
    """

    def rank(self, node: Node) -> float:
        return node.last_used

    def offload_order(self, capacity_pages: int) -> OffloadOrder:
        return LruOffload()
