"""Least recently used."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction
from kvsim.policies.eviction.offload_order import LruOffload, OffloadOrder
from kvsim.policies.eviction.offload_order_by_use import LruByUse


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LRU(RankedEviction):
    """Keeps what was used most recently: the default of every engine, and hard to beat when reuse soon follows use.

    last used earlier   leaves first
    """

    def rank(self, node: Node) -> float:
        return node.last_used_in(self.tier)

    def orders_by_last_use(self) -> bool:
        return True

    def offload_order(self, capacity_pages: int) -> OffloadOrder:
        return LruOffload()

    def offload_order_by_use(self, capacity_pages: int) -> OffloadOrder:
        return LruByUse()
