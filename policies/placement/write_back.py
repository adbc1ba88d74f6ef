"""Write-back."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.placement.base import PlacementPolicy


@dataclass(kw_only=True, eq=False)
class WriteBack(PlacementPolicy):
    """Writes a page down only when it is evicted: the tiers hold different pages, but room is there only when the bytes are out.

    after use        nothing
    after eviction   copy down, unless another tier has the page
    """

    def after_eviction(self, node: Node, now: float) -> bool:
        return True
