"""LFU with dynamic aging (Arlitt, Cherkasova, Dilley, Friedrich and Jin: Evaluating content management techniques for web proxy
caches, ACM SIGMETRICS Performance Evaluation Review 27(4), 2000)."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.aging import AgingEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LFUDynamicAging(AgingEviction):
    """LFU that forgets: what was once popular loses to what is used now, without a setting to tune.

    H = hits + L   lowest leaves first, then least recently used; L: the H of the last victim, as of the node's last use
    """

    def worth(self, node: Node, end: int) -> float:
        return node.hits_in(self.tier)
