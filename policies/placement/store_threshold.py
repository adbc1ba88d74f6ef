"""Stores pages at their k-th offer, as vLLM's CPU offloading does."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.offer_table import OfferTable


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class StoreThreshold(PlacementPolicy):
    """Stores only pages that requests keep asking for, so that the rest does not fill a tier that is small for its traffic.

    Every request offers the pages of its prompt, whether the lower tier has them or not. With k of 2 or more, offers are counted
    in a table of the ``tracker_pages`` pages offered last.

    offer            pages in the table are counted and become its most recent ones, then the others are added
    after use        copy down the pages before the first that is neither stored below nor offered k times: all or none
    after eviction   nothing: pages that were not copied are dropped

    Under vLLM's rules, vLLM's own CPU tier uses such a table for the pages it is offered.
    """

    k: int = 0
    tracker_pages: int = 64_000

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "k")
        check_settings(self, Whole(1), "tracker_pages")

    def bind(self, context: PolicyContext) -> None:
        self._tier = context.tier
        self._table = self.offer_table()

    def on_request(self, request: Request, now: float) -> None:
        self._table.count(request.runs)

    def wanted_pages(self, request: Request, path: Sequence[Node], now: float) -> int:
        for node in path:
            if not node.state[self._tier] and (proven := self._table.proven_pages(node.runs)) < node.pages:
                return node.depth + proven
        return request.prompt_pages

    def after_eviction(self, node: Node, now: float) -> bool:
        return False

    def offer_table(self) -> OfferTable:
        return OfferTable(self.k, self.tracker_pages)
