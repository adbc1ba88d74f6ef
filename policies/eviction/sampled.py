"""Base class of policies that score a few leaves drawn at random: for scores that change with time, so that no order lasts."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaves import Leaf, Leaves


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SampledEviction(EvictionPolicy):
    """Evicts the leaf of the lowest score among ``samples`` leaves, drawn with replacement; among all if there are no more.

    Of equal scores, the least recently used leaf goes, and of these the one drawn first.
    A subclass with an ``on_`` method of its own calls that of ``super()``, too: by these the leaves stay true.
    """

    samples: int = 32

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "samples")

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._leaves = Leaves(self.tier, context.rng)
        self._scores_at_once = type(self).scores is not SampledEviction.scores

    @abstractmethod
    def score(self, node: Node, now: float) -> float:
        """Return what the node's last page is worth at ``now``, in seconds of the run; the lowest leaves first."""

    def scores(self, nodes: list[Node], now: float) -> list[float]:
        """Return the scores of several leaves; for policies that compute them all at once."""
        return [self.score(node, now) for node in nodes]

    def scores_of(self, leaves: list[Leaf], now: float) -> list[float]:
        """Return the ``scores`` of leaves; for policies that note with a leaf what it takes to compute them."""
        return self.scores([leaf.node for leaf in leaves], now)

    def lowest(self, leaves: list[Leaf], now: float) -> Leaf:
        """Return the leaf of the lowest score; for policies that find it without asking for each score.

        Those ask for each where a subclass has a score of its own (``scores_as``).
        """
        tier, lowest, least = self.tier, leaves[0], inf
        scores = self.scores_of(leaves, now) if self._scores_at_once else None
        for at, leaf in enumerate(leaves):
            score = self.score(leaf.node, now) if scores is None else scores[at]
            if score < least or score == least and leaf.node.last_used_in(tier) < lowest.node.last_used_in(tier):
                lowest, least = leaf, score
        return lowest

    def scores_as(self, kind: type[EvictionPolicy], *names: str) -> bool:
        """Whether these methods are those of a class, not of a subclass that scores otherwise."""
        return all(getattr(type(self), name) is getattr(kind, name) for name in names)

    def on_evictable(self, node: Node) -> None:
        self._leaves.add(node)

    def on_unevictable(self, node: Node) -> None:
        self._leaves.lose(node)

    def victims(self, now: float) -> Iterator[Node]:
        while leaves := self._leaves.sample(self.samples):
            leaf = self.lowest(leaves, now)
            self._leaves.remove(leaf)
            self.limit(leaf.node)
            yield leaf.node

    def limit(self, node: Node) -> None:
        """Called for each victim, to limit ``most_pages``."""


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
