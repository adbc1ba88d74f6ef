"""The contract of placement policies."""

from abc import ABC, abstractmethod

from kvsim.core.offload import OfferTable
from kvsim.core.tier import optional
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext


class PlacementPolicy(ABC):
    """Says when a tier gets copies from the tier above it. One instance serves one such edge.

    The core owns slots, pins and transfers and does what can be done: a copy that finds no room after the tier's own
    evictions is not made, and the refusal is counted. Nodes are written only below a parent that is written.
    """

    keeps_loaded: bool = True
    """Whether this tier keeps its copy of pages that are loaded to the tier above."""

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the lower one."""

    @optional
    def after_use(self, node: Node, now: float) -> bool:
        """Whether to copy down a node that the lower tier lacks, now that a request has computed or reused it.

        Also asked when the node arrives in the upper tier from above.
        """
        return False

    @abstractmethod
    def after_eviction(self, node: Node, now: float) -> bool:
        """Whether to write down a node that leaves the upper tier and has no other copy."""

    def offer_table(self) -> OfferTable:
        """Says which of the pages that are offered to vLLM's CPU tier it stores. Raises ValueError if the policy does not."""
        raise ValueError(f"{type(self).__name__} does not say what vLLM's CPU tier stores: choose placement=store_threshold")
