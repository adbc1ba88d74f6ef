"""vLLM's store threshold."""

from dataclasses import dataclass

from kvsim.core.offload import OfferTable
from kvsim.core.tree import Node
from kvsim.policies.placement.base import PlacementPolicy


@dataclass(kw_only=True, eq=False)
class StoreThreshold(PlacementPolicy):
    """Writes a page down once enough requests have brought it, so that pages used once cost no link time and no room below.

    after use        copy down from the ``k``-th use on, parent first; at 0 and 1 at once
    after eviction   nothing: what was not copied is dropped

    Under vLLM's rules uses are counted in a table of ``tracker_pages`` pages, and go on when the page has left.
    """

    k: int = 0
    tracker_pages: int = 64_000

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"k must be 0 or more, not {self.k}")
        if self.tracker_pages < 1:
            raise ValueError(f"tracker_pages must be at least 1, not {self.tracker_pages}")

    def after_use(self, node: Node, now: float) -> bool:
        return node.hits >= self.k

    def after_eviction(self, node: Node, now: float) -> bool:
        return False

    def offer_table(self) -> OfferTable:
        return OfferTable(self.k, self.tracker_pages)
