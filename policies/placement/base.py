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
    """Decides when pages are copied from a tier to the tier below. One instance serves one such pair of tiers.

    The core owns slots, pins and transfers, and makes the copies that are possible: one that finds no room, even after
    evictions in the lower tier, is skipped and counted. After a use, a policy decides either node by node (``after_use``) or
    about the whole prompt (``wanted_pages``). A node is then copied only after its parent, if the upper tier has the parent.
    """

    @property
    def keeps_loaded(self) -> bool:
        """Whether the lower tier keeps its copy of pages that are loaded to the upper tier or, once written down, stay there."""
        return True

    @property
    def watermark(self) -> float:
        """Fill of the upper tier, 0 to 1, above which pages are written down before they are evicted; 0 means never."""
        return 0.0

    @property
    def reads_hardware(self) -> bool:
        """Whether decisions depend on the machine's rates, even in a replay."""
        return False

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run. The context's tier is the lower one."""

    def on_request(self, request: Request, now: float) -> None:
        """Called when a request has computed its prompt for the first time, before the pages it used are offered."""

    def after_use(self, node: Node, now: float) -> bool:
        """Whether to copy a node down that a request has just computed or reused and that the lower tier lacks.

        Also asked when the node arrives in the upper tier from a tier above that.
        """
        return False

    def wanted_pages(self, request: Request, path: Sequence[Node], now: float) -> int:
        """Return how many leading pages of a computed prompt the lower tier should have, at most ``prompt_pages``.

        ``path`` leads from the root to the prompt's last node. Of these pages, those that the upper tier has and the lower
        tier lacks are written, or none if there is not room for all. Asked again when pages of the prompt arrive in the
        upper tier from a tier above that.
        """
        return 0

    @abstractmethod
    def after_eviction(self, node: Node, now: float) -> bool:
        """Whether to write a node down that leaves the upper tier, or soon will, and has no other copy.

        Nodes may be cut, and the last part then leaves first. So the answer may depend on where the node ends, but not on
        its length.
        """

    def offer_table(self) -> OfferTable:
        """Return the table that decides which offered pages vLLM's CPU tier stores. Raises ValueError if the policy has none."""
        raise ValueError(f"{type(self).__name__} cannot decide what vLLM's CPU tier stores: choose placement=store_threshold")
