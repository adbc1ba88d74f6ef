"""First in, last out."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class FILO(RankedEviction):
    """Keeps what was computed first, such as system prompts that came early, however rarely it is used. SGLang's ``filo``.

    computed later   leaves first
    """

    def rank(self, node: Node) -> float:
        return -node.created
