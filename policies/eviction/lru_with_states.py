"""Least recently used prefixes: the eviction of the baselines in Marconi's paper (Pan et al., MLSys 2025, section 5.1).

vLLM+ keeps a state with each block of tokens, SGLang+ with each node of a radix tree. Both evict leaves, and what belongs to one
leaves together; a request refreshes all of its path (the authors' code, github.com/ruipeterpan/marconi).
"""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class LRUWithStates(RankedEviction):
    """LRU over the pages of a hybrid model, whose recurrent states in the same room leave with the pages before them.

    pages    last used earlier leave first, with the state after them
    states   alone only when no pages can leave: last used earlier first

    Without states it is ``lru``, which ranks each state by its own last use.
    """

    def rank(self, node: Node) -> tuple[bool, float]:
        return node.is_state, node.last_used
