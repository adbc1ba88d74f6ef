"""Exclusive tiers."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.placement.base import PlacementPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Exclusive(PlacementPolicy):
    """Keeps one copy only, so that the tiers' capacities add up; pages that go back and forth are written each time.

    after use        nothing
    after eviction   move down
    after a load     the lower copy is freed as soon as nothing else reads it
    """

    @property
    def keeps_loaded(self) -> bool:
        return False

    def after_eviction(self, node: Node, now: float) -> bool:
        return True
