"""MyPolicy: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.placement.base import PlacementPolicy


@dataclass(kw_only=True, eq=False)
class MyPolicy(PlacementPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    after use        copy down from the ``hits``-th use on; computing the page is the first use
    after eviction   copy down, unless another tier has the page
    """

    hits: int = 3

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "hits")

    def after_use(self, node: Node, now: float) -> bool:
        return node.hits >= self.hits

    def after_eviction(self, node: Node, now: float) -> bool:
        return True
