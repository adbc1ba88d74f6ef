"""Selective write-through."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.placement.base import PlacementPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WriteThroughSelective(PlacementPolicy):
    """Writes a page down once it has proved popular, so that pages used once cost no link time and no room below.

    after use        copy down from the ``hits``-th use on, parent first; the request that computed the page is the first
    from above       the same for pages that come to a tier that has another one below
    after eviction   nothing: what was not copied is dropped
    """

    hits: int = 2

    def __post_init__(self) -> None:
        if self.hits < 1:
            raise ValueError(f"hits must be at least 1, not {self.hits}")

    def after_use(self, node: Node, now: float) -> bool:
        return node.hits >= self.hits

    def after_eviction(self, node: Node, now: float) -> bool:
        return False
