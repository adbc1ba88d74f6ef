"""Base class of policies that score a few leaves drawn at random: for scores that change with time, so that no order lasts."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaves import Draws, Leaves


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
        self._draws = Draws(context.rng)
        self._is_drawing = False
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
        """Return the candidate of the lowest score; None if there is no leaf."""
        lowest: Node | None = None
        least, tier, count = 0.0, self.tier, self._count_candidates()
        nodes: list[Node] = []
        scores: list[float] = []
        if self._scores_at_once:
            for at in range(count):
                if (candidate := self._candidate(at)) is not None:
                    nodes.append(candidate)
            scores, count = self.scores(nodes, now), len(nodes)
        for at in range(count):
            node = nodes[at] if nodes else self._candidate(at)
            if node is None:
                continue
            score = scores[at] if nodes else self.score(node, now)
            if lowest is None or score < least or score == least and node.last_used_in(tier) < lowest.last_used_in(tier):
                lowest, least = node, score
        return lowest

    def _count_candidates(self) -> int:
        """Return how many leaves to compare, and say whether they are to be drawn."""
        leaves, tier = self._leaves, self.tier
        self._is_drawing = len(leaves.nodes) > self.samples
        if self._is_drawing:
            return self.samples
        for node in [node for node in leaves.nodes if not node.is_evictable(tier)]:
            leaves.remove(node)
        return len(leaves.nodes)

    def _candidate(self, at: int) -> Node | None:
        """Return the candidate of this place, or the one that is drawn next. Drops what is no leaf any more where it is met.

        None if that leaves nothing.
        """
        nodes = self._leaves.nodes
        if not self._is_drawing:
            return nodes[at]
        fraction, tier = self._draws.next(), self.tier
        while nodes:
            node = nodes[int(fraction * float(len(nodes)))]
            if node.state[tier] == READY and not node.pins[tier] and not node.children_in[tier]:
                return node
            self._leaves.remove(node)
        return None


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
