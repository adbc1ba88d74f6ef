"""The contract of placement policies."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.offer_table import OfferTable


@mypyc_attr(allow_interpreted_subclasses=True)
class PlacementPolicy(metaclass=ABCMeta):
    """Says when a tier gets copies from the tier above it. One instance serves one such edge.

    The core owns slots, pins and transfers and does what can be done: a copy that finds no room after the tier's own
    evictions is not made, and the refusal is counted. A policy decides about what was used node by node (``after_use``) or
    for a prompt as a whole (``wanted_pages``). A node is written then only after its parent, if the tier above has that, too.
    """

    @property
    def keeps_loaded(self) -> bool:
        """Whether this tier keeps its copy of pages that are loaded to the tier above, or that stay there after all."""
        return True

    @property
    def watermark(self) -> float:
        """Fill of the tier above from which pages are written before they have to leave; 0: never."""
        return 0.0

    @property
    def reads_hardware(self) -> bool:
        """Whether decisions depend on the machine's rates, also in a replay."""
        return False

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the lower one."""

    def on_request(self, request: Request, now: float) -> None:
        """The request's prompt is computed for the first time; what it used is about to be offered."""

    def after_use(self, node: Node, now: float) -> bool:
        """Whether to copy down a node that the lower tier lacks, now that a request has computed or reused it.

        Also asked when the node arrives in the upper tier from above.
        """
        return False

    def wanted_pages(self, request: Request, path: Sequence[Node], now: float) -> int:
        """How many pages of a computed prompt, from the first on, the lower tier should have: ``prompt_pages`` at most.

        ``path`` leads from the root to the prompt's last node. All of them that the upper tier has and the lower one lacks are
        written or, if there is no room for all, none. Asked again when pages of this prompt have arrived in the upper tier
        from above.
        """
        return 0

    @abstractmethod
    def after_eviction(self, node: Node, now: float) -> bool:
        """Whether to write down a node that leaves the upper tier, or is about to, and has no other copy.

        Of a node that is cut the last part leaves first: the answer may depend on where the node ends, not on its length.
        """

    def offer_table(self) -> OfferTable:
        """Says which of the pages that are offered to vLLM's CPU tier it stores. Raises ValueError if the policy does not."""
        raise ValueError(f"{type(self).__name__} does not say what vLLM's CPU tier stores: choose placement=store_threshold")
