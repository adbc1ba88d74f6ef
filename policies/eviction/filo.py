"""First in, last out."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class FILO(RankedEviction):
    """Keeps what was computed first, such as early system prompts, however rarely it is used. SGLang's ``filo``.

    computed later   leaves first
    """

    def rank(self, node: Node) -> float:
        return -node.created_in(self.tier)
