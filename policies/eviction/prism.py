"""PRISM's demand-aware radix tree, as far as it is public (Qu et al.: PRISM: Fast online LLM serving via scheduling-memory
co-design, 2026, arXiv:2605.08581)."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.pages.extent_counts import PageCounts
from kvsim.policies.eviction.base import RankedEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Prism(RankedEviction):
    """Keeps what requests wait for.

    demand   requests that have arrived, have not finished, and whose prompts contain the page
    victim   least demand first, then the least recently used

    Meant for ``scheduling=prism``, which admits those for whom least has to be computed: the paper aligns the two. What is public
    of it (the abstract) names exact prefixes that are kept by demand, but no formula: this one is chosen here. Where nothing
    waits, as in a replay, it is LRU. A request that an engine gives up, since it fails, stays counted. Recurrent states count as
    the page that they were saved after.
    """

    def __post_init__(self) -> None:
        self._demand = PageCounts()
        self._arrived: dict[int, None] = {}
        """Requests that are counted, by their index."""

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

    def _enter_again(self, node: Node) -> None:
        """Announce a node whose rank may have fallen although nothing pins it, such as one in a lower tier."""
        if node.is_evictable(self.tier):
            self.on_evictable(node)

    def rank(self, node: Node) -> tuple[int, float]:
        pages = node.partner if node.is_state else node
        return self._demand.last(pages.runs) if pages is not None else 0, node.last_used_in(self.tier)

    def pages_before(self, node: Node, next_rank: tuple[int, float]) -> int:
        return node.pages if node.is_state else self._demand.trailing(node.runs)
