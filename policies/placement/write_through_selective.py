"""Selective write-through."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.base import PlacementPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WriteThroughSelective(PlacementPolicy):
    """Writes a page down once it has proved popular, so that pages used once cost no link time and no room below.

    after use        copy down from the ``hits``-th use on, parents first; the request that computes a page is its first use
    from above       the same for pages that arrive in a tier with another tier below
    after eviction   nothing: pages that were not copied are dropped
    """

    hits: int = 2

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "hits")
        self._upper = -1

    def bind(self, context: PolicyContext) -> None:
        self._upper = context.upper_tier

    def after_use(self, node: Node, now: float) -> bool:
        return node.hits_in(self._upper) >= self.hits

    def after_eviction(self, node: Node, now: float) -> bool:
        return False
