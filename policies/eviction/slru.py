"""Segmented LRU (Karedla, Love and Wherry: Caching strategies to improve disk system performance, IEEE Computer 27(3), 1994)."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class SegmentedLRU(RankedEviction):
    """LRU in two classes, so that pages used once never push out pages used again. SGLang's ``slru``.

    hits < protected_hits   leave first, least recently used first
    the others              leave after them, least recently used first
    """

    protected_hits: int = 2

    def __post_init__(self) -> None:
        super().__init__()
        if self.protected_hits < 1:
            raise ValueError(f"protected_hits must be at least 1, not {self.protected_hits}")

    def rank(self, node: Node) -> tuple[bool, float]:
        return node.hits >= self.protected_hits, node.last_used
