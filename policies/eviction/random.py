"""Random eviction."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaves import Draws, Pool


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Random(EvictionPolicy):
    """Evicts any leaf with equal probability: what a policy must beat to be worth its state.

    every evictable leaf   equally likely to be drawn; it leaves, last page first, before the next one is drawn
    """

    def __post_init__(self) -> None:
        self._leaves = Pool()
        self._drawn: Node | None = None

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._draws = Draws(context.rng)

    def on_evictable(self, node: Node) -> None:
        if node is not self._drawn:
            self._leaves.add(node)

    def victims(self, now: float) -> Iterator[Node]:
        while True:
            if self._drawn is None:
                if not self._leaves.nodes:
                    break
                self._drawn = self._leaves.take(self._draws.place(len(self._leaves.nodes)))
            node = self._drawn
            if node.is_evictable(self.tier):
                yield node
            if not node.is_evictable(self.tier):
                self._drawn = None
