"""BeladyCompute (Liu, Yu and Yang: When fancy eviction fails: rethinking cache replacement for LLM prefix reuse,
arXiv:2609.28870, 2026)."""

from dataclasses import dataclass
from math import inf
from typing import Final

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.foresight import NEVER, Foresight
from kvsim.policies.eviction.leaves import UNKNOWN, Leaf
from kvsim.policies.eviction.sampled import PageFlops, SampledEviction


class Use:
    """The last request, of those before the next one, that has a page, and the first one after that; NEVER if there is none."""

    __slots__ = ("end", "flops", "following", "user")

    def __init__(self, user: int, end: int, flops: float) -> None:
        self.user = user
        self.end = end
        """Depth at which the page ends, in pages."""
        self.flops = flops
        self.following = NEVER


NOT_USED: Final = Use(NEVER, -1, 0.0)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class BeladyCompute(SampledEviction):
    """Belady's rule weighted by compute. It knows the future: what an order could save at most, not a policy to deploy.

    score    - requests until the next use of the leaf's last page / FLOPs that the page saves, at its depth
    victim   the lowest score among ``samples`` leaves drawn at random; a page that is never used again goes first

    Compare it with RandomCompute, and Belady with LRU: the authors take the distance between the two oracles as what knowing
    compute can add. A heuristic: they find it within 1.1 points of the optimum of an integer program. As in their simulator
    (github.com/LauYeeYu/libCacheSim, 128 samples), everything computed is inserted. Here pages leave from the end of their
    prompt. The future is that of the trace, in its order.
    """

    samples: int = 128

    @property
    def needs_future(self) -> bool:
        return True

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._flops = PageFlops(context)
        self._future = Foresight(context.requests)
        self._latest = NEVER
        self._is_plain = self.scores_as(BeladyCompute, "score", "scores")

    def on_request(self, request: Request, now: float) -> None:
        self._latest = max(self._latest, request.index)
        if self._future.has_resets:  # what is used next may no longer be lost before
            for leaf in self._leaves.all:
                leaf.due = UNKNOWN

    def on_hit(self, node: Node, now: float) -> None:
        self._leaves.use(node)

    def lowest(self, leaves: list[Leaf], now: float) -> Leaf:
        if not self._is_plain:
            return super().lowest(leaves, now)
        latest, lowest, least = float(self._latest), leaves[0], inf
        for leaf in leaves:
            score = (latest - leaf.due) / leaf.worth
            if score >= 0:  # its next use has come, or is unknown
                score = self._look_ahead(leaf)
            if score < least or score == least and leaf.used_s < lowest.used_s:
                lowest, least = leaf, score
        return lowest

    def _look_ahead(self, leaf: Leaf) -> float:
        """Note when a leaf is used next, and what that saves; return its score."""
        use = self._use(leaf.node)
        score = self.score(leaf.node, 0.0)
        leaf.due, leaf.worth = (inf, 1.0) if score == -inf else (float(use.following), use.flops)
        return score

    def score(self, node: Node, now: float) -> float:
        use = self._use(node)
        if use.following == NEVER or self._future.is_lost(self._latest, use.following):
            return -inf
        later = float(self._latest - use.following)
        return later / use.flops

    def limit(self, node: Node) -> None:
        user = self._use(node).user
        if user != NEVER and not node.is_state:
            self.most_pages = min(node.pages, self._future.pages_alike(user, node.depth + node.pages))

    def _use(self, node: Node) -> Use:
        """Return what is known of the node's last page. A recurrent state is used with the page before it.

        Noted with the node. It holds until the next user has come or the node ends elsewhere; the next question begins there.
        """
        tier, end = self.tier, node.depth + node.pages
        noted: Use | None = node.notes[tier]
        if noted is not None and noted.end == end and (noted.following > self._latest or noted.following == NEVER):
            return noted
        pages = node.partner if node.is_state else node
        if noted is not None:
            user = noted.user
        elif pages is None:
            return NOT_USED
        else:
            start, length = pages.runs[-1]
            user = self._future.first_user(start + length - 1)
        use = Use(user, end, self._flops.at(end))
        if user != NEVER:
            while (following := self._future.next_user(use.user, end)) != NEVER and following <= self._latest:
                use.user = following
            use.following = following
        node.note(tier, use)
        return use
