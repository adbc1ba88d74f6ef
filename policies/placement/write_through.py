"""Write-through."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.placement.base import PlacementPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WriteThrough(PlacementPolicy):
    """Writes every page down as soon as it is computed: eviction then frees slots at once, but the tiers hold the same pages.

    after use        copy down, parents first; retried at every later use until there is room
    from above       the same for pages that arrive in a tier with another tier below
    after eviction   nothing: pages that were not copied are dropped
    """

    def after_use(self, node: Node, now: float) -> bool:
        return True

    def after_eviction(self, node: Node, now: float) -> bool:
        return False
