"""Write-back."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.placement.base import PlacementPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WriteBack(PlacementPolicy):
    """Writes a page down only when it is evicted: the tiers hold different pages, but slots become free only after the write.

    after use        nothing
    after eviction   copy down, unless another tier has the page
    watermark > 0    when a request ends: copy leaves down, in order of eviction, until 1 - watermark of the upper tier is free
                     or can be freed at once; again after half as much has been inserted
    """

    watermark: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0, below=1), "watermark")

    def after_eviction(self, node: Node, now: float) -> bool:
        return True
