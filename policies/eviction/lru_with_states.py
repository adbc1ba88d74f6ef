"""LRU over prefixes: the eviction of the baselines in Marconi's paper (Pan et al., MLSys 2025, section 5.1).

vLLM+ saves a state with each block of tokens, SGLang+ with each node of a radix tree. Both evict a leaf together with all that
belongs to it; a request refreshes its whole path (the authors' code, github.com/ruipeterpan/marconi).
"""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LRUWithStates(RankedEviction):
    """LRU over the pages of a hybrid model; recurrent states in the same memory leave with the pages before them.

    pages    least recently used first, each with the state after it
    states   on their own only when no pages can leave, least recently used first

    Without states it equals ``lru``, which ranks each state by its own last use.
    """

    def rank(self, node: Node) -> tuple[bool, float]:
        return node.is_state, node.last_used_in(self.tier)
