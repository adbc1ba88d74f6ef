"""Write-through."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.placement.base import PlacementPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WriteThrough(PlacementPolicy):
    """Writes every page to the tier below as soon as it is computed: eviction then frees at once, but the tiers hold the same.

    after use        copy down, parent first; tried again at every later use until there is room
    from above       the same for pages that come to a tier that has another one below
    after eviction   nothing: what was not copied is dropped
    """

    def after_use(self, node: Node, now: float) -> bool:
        return True

    def after_eviction(self, node: Node, now: float) -> bool:
        return False
