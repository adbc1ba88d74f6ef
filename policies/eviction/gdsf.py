"""GreedyDual-Size with frequency (Cherkasova: Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy,
HPL-98-69, 1998)."""

from dataclasses import dataclass
from functools import cache

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.aging import AgingEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class GDSF(AgingEviction):
    """Keeps what saves most compute per byte: pages deep in a prompt cost more attention to recompute.

    H = L + hits * cost / size   lowest leaves first, then least recently used; L: the H of the last page evicted
    cost                         seconds to recompute the node's last page, at its depth
    size                         bytes of that page

    A node's last page leaves first; the pages before it cost less, so they follow. A trailing partial page counts as full.
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        tokens = context.page_tokens
        if context.model is None:
            raise ValueError("needs a model")
        size = context.model.page_bytes(tokens)
        self._s_per_byte = cache(lambda pages: context.recompute_s((pages - 1) * tokens, pages * tokens) / size)

    def worth(self, node: Node, end: int) -> float:
        return node.hits_in(self.tier) * self._s_per_byte(end)
