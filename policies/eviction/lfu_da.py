"""LFU with dynamic aging (Arlitt, Cherkasova, Dilley, Friedrich and Jin: Evaluating content management techniques for web proxy
caches, ACM SIGMETRICS Performance Evaluation Review 27(4), 2000)."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.aging import AgingEviction


@dataclass(kw_only=True, eq=False)
class LFUDynamicAging(AgingEviction):
    """LFU that forgets: what was popular once loses to what is used now, without a setting to tune.

    H = hits + L   least leaves first, then least recently used; L: H of the last victim, as it was at the node's last use
    """

    def worth(self, node: Node, end: int) -> float:
        return node.hits
