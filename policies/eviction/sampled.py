"""Base class of policies that score a few leaves drawn at random: for scores that change with time, so that no order lasts."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaves import Leaves


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SampledEviction(EvictionPolicy):
    """Evicts the leaf of the lowest score among ``samples`` leaves, drawn with replacement; among all if there are no more.

    Of equal scores, the least recently used leaf goes, and of these the one drawn first.
    """

    samples: int = 32

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "samples")
        self._leaves = Leaves()

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._rng: np.random.Generator = context.rng
        self._scores_at_once = type(self).scores is not SampledEviction.scores

    @abstractmethod
    def score(self, node: Node, now: float) -> float:
        """Return what the node's last page is worth at ``now``, in seconds of the run; the lowest leaves first."""

    def scores(self, nodes: list[Node], now: float) -> list[float]:
        """Return the scores of several leaves; for policies that compute them all at once."""
        return [self.score(node, now) for node in nodes]

    def on_evictable(self, node: Node) -> None:
        self._leaves.add(node)

    def victims(self, now: float) -> Iterator[Node]:
        while (node := self._lowest(now)) is not None:
            self._leaves.remove(node)
            self.limit(node)
            yield node

    def limit(self, node: Node) -> None:
        """Called for each victim, to limit ``most_pages``."""

    def _lowest(self, now: float) -> Node | None:
        """Return the drawn leaf of the lowest score; None if there is no leaf."""
        lowest: Node | None = None
        least, tier = 0.0, self.tier
        nodes = self._candidates()
        scores = self.scores(nodes, now) if self._scores_at_once else None
        for at, node in enumerate(nodes):
            score = self.score(node, now) if scores is None else scores[at]
            if lowest is None or score < least or score == least and node.last_used_in(tier) < lowest.last_used_in(tier):
                lowest, least = node, score
        return lowest

    def _candidates(self) -> list[Node]:
        """Return the leaves to compare, and drop what is no leaf any more where it is met."""
        leaves, tier = self._leaves, self.tier
        nodes = leaves.nodes
        if len(nodes) <= self.samples:
            for node in [node for node in nodes if not node.is_evictable(tier)]:
                leaves.remove(node)
            return nodes
        drawn: list[Node] = []
        fractions: list[float] = self._rng.random(self.samples).tolist()
        count = float(len(nodes))
        for fraction in fractions:
            while count:
                node = nodes[int(fraction * count)]
                if node.state[tier] == READY and not node.pins[tier] and not node.children_in[tier]:
                    drawn.append(node)
                    break
                leaves.remove(node)
                count -= 1.0
        return drawn


class PageFlops:
    """The FLOPs that a page saves if all pages before it are cached, by the depth at which it ends, in pages.

    Raises ValueError without a model.
    """

    __slots__ = ("_context", "_known")

    def __init__(self, context: PolicyContext) -> None:
        if context.model is None:
            raise ValueError("needs a model")
        self._context = context
        self._known: list[float] = []
        """By depth; negative where not computed yet."""

    def at(self, end: int) -> float:
        known = self._known
        if end >= len(known):
            known += [-1.0] * (end + 1 - len(known))
        flops = known[end]
        if flops < 0:
            tokens = self._context.page_tokens
            flops = known[end] = self._context.saved_flops((end - 1) * tokens, end * tokens)
        return flops
