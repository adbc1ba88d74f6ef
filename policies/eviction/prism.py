"""PRISM's demand-aware radix tree, as far as it is public (Qu et al.: PRISM: Fast online LLM serving via scheduling-memory
co-design, 2026, arXiv:2605.08581)."""

from dataclasses import dataclass
from typing import Final

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.pages.extent_counts import PageCounts
from kvsim.policies.eviction.base import RankedEviction

SPARE: Final = 1024
"""Nodes that may be remembered although they have left the tier, beside as many as are in it twice over."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Prism(RankedEviction):
    """Keeps what requests wait for.

    demand   requests that have arrived, have not finished, and whose prompts contain the page
    victim   least demand first, then the least recently used

    Meant for ``scheduling=prism``, which admits those for whom least has to be computed: the paper aligns the two. What is public
    of it (the abstract) names exact prefixes that are kept by demand, but no formula: this one is chosen here. A replay has no
    arrivals: there it is LRU. Recurrent states count as the page that they were saved after.
    """

    def __post_init__(self) -> None:
        self._demand = PageCounts()
        self._arrived: dict[int, None] = {}
        """Requests that are counted, by their index."""
        self._asked: dict[Node, int] = {}
        """The demand of nodes, above 0, when they were ranked last."""

    def on_arrival(self, request: Request, now: float) -> None:
        if request.index not in self._arrived:
            self._arrived[request.index] = None
            self._demand.add(request.runs)

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        if request.index not in self._arrived:
            return
        del self._arrived[request.index]
        self._demand.remove(request.runs)
        path: Node = node
        while path.parent is not None:
            self._enter_again(path)
            if path.partner is not None:
                self._enter_again(path.partner)
            path = path.parent
        if len(self._asked) > 2 * (len(self.line) + len(self.heap)) + SPARE:
            self._asked = {one: demand for one, demand in self._asked.items() if one.is_evictable(self.tier)}

    def on_departure(self, request: Request, node: Node, now: float) -> None:
        self.on_finish(request, node, now)

    def _enter_again(self, node: Node) -> None:
        """Announce a node whose rank may have fallen although nothing pins it, such as one in a lower tier."""
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def on_evictable(self, node: Node) -> None:
        self._asked.pop(node, None)
        super().on_evictable(node)

    def rank(self, node: Node) -> tuple[int, float]:
        """Return the demand and the last use. By vLLM's rules, a page may have copies off the path of the request that has ended:
        their demand falls when they are announced next."""
        pages = node.partner if node.is_state else node
        demand = self._demand.last(pages.runs) if pages is not None else 0
        if demand or node in self._asked:
            demand = self._asked[node] = max(demand, self._asked.get(node, 0))
        return demand, node.last_used_in(self.tier)

    def pages_before(self, node: Node, next_rank: tuple[int, float]) -> int:
        return node.pages if node.is_state else self._demand.trailing(node.runs)
