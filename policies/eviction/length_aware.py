"""Length-aware eviction (Qin et al.: Mooncake, FAST 2025, ``LengthAwareCache``)."""

from dataclasses import dataclass
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.graded import GradedEviction

MOST_END: Final = 2.0**28
"""Longer than any path, in pages. Ranks are exact up to 2**25 hits."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LengthAware(GradedEviction):
    """LFU that evicts the ends of long prompts first, since fewer requests reach them than share the beginning.

    fewer hits               leaves first
    equal hits, ends later   leaves first
    equal hits and end       least recently used first
    """

    def rank(self, node: Node) -> float:
        """Return the rank: fewer hits first, then the later end."""
        return float(node.hits_in(self.tier)) * MOST_END - float(node.depth + node.pages)

    def pages_before(self, node: Node, next_rank: float, is_earlier: bool) -> int:
        pages = int(next_rank - self.rank(node))
        return pages + 1 if is_earlier else pages
