"""Exclusive tiers."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.placement.base import PlacementPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Exclusive(PlacementPolicy):
    """Keeps a single copy of each page, so that the tiers' capacities add up; a page is written each time it moves down.

    after use        nothing
    after eviction   move down
    after a load     free the lower copy, once nothing else uses it
    """

    @property
    def keeps_loaded(self) -> bool:
        return False

    def after_eviction(self, node: Node, now: float) -> bool:
        return True
