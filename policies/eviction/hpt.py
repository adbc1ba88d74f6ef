"""Hits per token, as SGLang's ``--radix-eviction-policy hpt`` (github.com/sgl-project/sglang, pull request 30300, July 2026)."""

from dataclasses import dataclass
from typing import Any

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import DEPTH, RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class HitsPerToken(RankedEviction):
    """Lets long pieces of prompts go that few requests share, so that many short ones stay.

    hits / tokens of the leaf's node   lowest leaves first, then the least recently used

    Hits include the request that computed the node; SGLang adds 1 for it. There is no aging: what was popular stays.

    Unlike other policies' orders, this one depends on how prompts are cut into nodes: where they part, and where something of
    them has left. SGLang evicts whole nodes; here what is left of a victim is shorter, so it ranks higher than before, and may
    have to wait.
    """

    def rank(self, node: Node) -> tuple[float, float]:
        return node.hits_in(self.tier) / node.pages, node.last_used_in(self.tier)

    def pages_before(self, node: Node, next_rank: Any) -> int:
        """Page by page, until what is left ranks as high as the next leaf."""
        hits, used_s = node.hits_in(self.tier), node.last_used_in(self.tier)
        least = next_rank[0]
        left = min(node.pages - 1, int(hits / least) + 1 if least else node.pages)
        while left and (hits / left, used_s) < next_rank:
            left -= 1
        return node.pages - left

    def on_merge(self, upper: Node, lower: Node) -> None:
        """The whole ranks lower than its lower part did."""
        if lower.is_evictable(self.tier):
            self._entries += 1
            rank = lower.hits_in(self.tier) / (upper.pages + lower.pages), lower.last_used_in(self.tier)
            self._enter(rank, self._entries - upper.depth * DEPTH, lower)
