"""MyPolicy: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class MyPolicy(RankedEviction):
    """State the purpose of the policy in one sentence, then the rule.

    rank = last use + seconds_per_hit for each hit; the smallest rank is evicted first
    """

    seconds_per_hit: float = 60.0

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "seconds_per_hit")

    def rank(self, node: Node) -> float:
        """Called again after each use of the node; the rank must not change in between."""
        return node.last_used + self.seconds_per_hit * node.hits
