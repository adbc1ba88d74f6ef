"""BeladyCompute (Liu, Yu and Yang: When fancy eviction fails: rethinking cache replacement for LLM prefix reuse,
arXiv:2609.28870, 2026)."""

from dataclasses import dataclass
from math import inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.foresight import NEVER, Foresight
from kvsim.policies.eviction.sampled import SampledEviction, flops_of_page


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
        self._flops = flops_of_page(context)
        self._future = Foresight(context.requests)
        self._latest = NEVER

    def on_request(self, request: Request, now: float) -> None:
        self._latest = max(self._latest, request.index)

    def score(self, node: Node, now: float) -> float:
        user = self._last_user(node)
        following = self._future.next_user(user, node.depth + node.pages) if user != NEVER else NEVER
        if following == NEVER or self._future.is_lost(self._latest, following):
            return -inf
        return (self._latest - following) / self._flops(node.depth + node.pages)

    def limit(self, node: Node) -> None:
        user = self._last_user(node)
        if user != NEVER and not node.is_state:
            self.most_pages = min(node.pages, self._future.pages_alike(user, node.depth + node.pages))

    def _last_user(self, node: Node) -> int:
        """Return the last request, of those before the next one, that has the node's last page; NEVER if the trace has none.

        Noted with the node, so that the next question begins there. A recurrent state is used with the page before it.
        """
        tier, end = self.tier, node.depth + node.pages
        noted = node.notes[tier]
        pages = node.partner if node.is_state else node
        if noted is None and pages is not None:
            start, length = pages.runs[-1]
            noted = self._future.first_user(start + length - 1)
            node.note(tier, noted)
        if noted is None or noted == NEVER:
            return NEVER
        user: int = noted
        while (following := self._future.next_user(user, end)) != NEVER and following <= self._latest:
            user = following
        if user != noted:
            node.note(tier, user)
        return user
