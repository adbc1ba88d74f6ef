"""Randomized leaf token eviction (Wu, Silwal and Zhang: Randomization boosts KV caching, learning balances query load: a joint
perspective, arXiv:2601.18999, 2026)."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaves import Draws, Pool


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class RandomLeaf(EvictionPolicy):
    """RLT: marking with a random choice. Never far worse than the best possible, whatever the traffic, unlike any fixed order.

    used or inserted in this phase   marked
    victim                           the last page of an unmarked leaf, each equally likely; then another one is drawn
    no unmarked leaf left            a new phase begins: nothing is marked

    With room for n tokens, the authors prove O(log n) times the misses of the best that could be done, where LRU can have n times
    as many. They draw tokens; here pages are drawn, and a prefix is marked with what was used of it. Their code also ends a phase
    when marked tokens fill the cache; here pages in use cannot leave, so a phase ends when all that could leave is marked.
    """

    def __post_init__(self) -> None:
        self._phase = 0
        self._unmarked, self._marked = Pool(), Pool()

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._draws = Draws(context.rng)

    def on_insert(self, node: Node, now: float) -> None:
        node.note(self.tier, self._phase)

    def on_hit(self, node: Node, now: float) -> None:
        node.note(self.tier, self._phase)
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def on_evictable(self, node: Node) -> None:
        (self._marked if self._phase_of(node) == self._phase else self._unmarked).add(node)

    def _phase_of(self, node: Node) -> int:
        """Return the phase in which a node was used last; -1 if it was never announced."""
        phase: int | None = node.notes[self.tier]
        return -1 if phase is None else phase

    def victims(self, now: float) -> Iterator[Node]:
        while (node := self._draw()) is not None:
            self.most_pages = 1
            yield node

    def _draw(self) -> Node | None:
        """Remove and return a random unmarked leaf, in a new phase if need be; None if there is no leaf at all."""
        tier = self.tier
        while True:
            if not self._unmarked.nodes:
                if not self._marked.nodes:
                    return None
                self._phase += 1
                self._unmarked, self._marked = self._marked, self._unmarked
            node = self._unmarked.take(self._draws.place(len(self._unmarked.nodes)))
            if node.is_evictable(tier) and self._phase_of(node) != self._phase:
                return node
