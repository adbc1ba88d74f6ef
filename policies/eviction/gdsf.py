"""GreedyDual-Size with frequency (Cherkasova: Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy,
HPL-98-69, 1998)."""

from dataclasses import dataclass
from functools import cache

from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.aging import AgingEviction


@dataclass(kw_only=True, eq=False)
class GDSF(AgingEviction):
    """Keeps what saves most compute for its bytes: pages deep in a prompt cost more attention to compute again.

    H = L + hits * cost / size   least leaves first, then least recently used; L: H of the last page evicted
    cost                         seconds to compute the node's last page again, at its depth
    size                         bytes of that page

    The last page leaves first; those before it cost less, hence follow it. A trailing partial page counts as full.
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        tokens = context.page_tokens
        if context.model is None:
            raise ValueError("needs a model")
        size = context.model.page_bytes(tokens)
        self._s_per_byte = cache(lambda pages: context.recompute_s((pages - 1) * tokens, pages * tokens) / size)

    def worth(self, node: Node, end: int) -> float:
        return node.hits * self._s_per_byte(end)
