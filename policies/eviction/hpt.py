"""Hits per token, as SGLang's ``--radix-eviction-policy hpt`` (github.com/sgl-project/sglang, pull request 30300, July 2026)."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.graded import GradedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class HitsPerToken(GradedEviction):
    """Lets long pieces of prompts go that few requests share, so that many short ones stay.

    hits / tokens of the leaf's node   lowest leaves first, then the least recently used

    Hits include the request that computed the node; SGLang adds 1 for it. There is no aging: what was popular stays.

    Unlike other policies' orders, this one depends on how prompts are cut into nodes: where they part, and where something of
    them has left. SGLang evicts whole nodes; here what is left of a victim is shorter, so it ranks higher than before, and may
    have to wait.
    """

    def rank(self, node: Node) -> float:
        return node.hits_in(self.tier) / node.pages

    def pages_before(self, node: Node, next_rank: float, is_earlier: bool) -> int:
        """Page by page, until what is left ranks as high as the next leaf."""
        hits = node.hits_in(self.tier)
        left = min(node.pages - 1, int(hits / next_rank) + 1 if next_rank else node.pages)
        while left and (hits / left < next_rank or is_earlier and hits / left == next_rank):
            left -= 1
        return node.pages - left

    def on_merge(self, upper: Node, lower: Node) -> None:
        """The whole ranks lower than its lower part did."""
        if lower.is_evictable(self.tier):
            self.enter(lower, lower.hits_in(self.tier) / (upper.pages + lower.pages), upper.depth)
