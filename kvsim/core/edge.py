"""An edge between two tiers: the placement policy that copies pages down, and the write-downs under way."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvsim.core.answers import is_typed, number, truth, whole_number
from kvsim.core.request import Request
from kvsim.core.tier import Tier, overrides
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node

if TYPE_CHECKING:
    from kvsim.policies.placement.base import PlacementPolicy


class Edge:
    """Joins an upper tier to a lower one. Pages are written down and loaded along edges only."""

    def __init__(self, upper: Tier, lower: Tier, placement: "PlacementPolicy") -> None:
        self.upper = upper
        self.lower = lower
        self.placement = placement
        upper.below.append(self)
        lower.above.append(self)
        self.open: Transfer | None = None
        """Write-downs decided on but not yet handed out."""
        self.in_flight: OrderedDict[Transfer, None] = OrderedDict()
        """Write-downs handed out but not yet ended, oldest first."""
        self.leaving: list[Node] = []
        """Victims of the current eviction pass that will be written down at its end, in order of eviction."""
        self.early_mark = 0
        """``inserted_pages`` of the upper tier when pages were last written early."""
        self._policy: Any = placement
        """The same object, typed so that its answers may be anything."""
        self._is_typed = is_typed(placement, "after_use", "after_eviction")
        self._policy_name = f"the placement policy of the {lower.name} tier, {type(placement).__name__},"
        self.wants_requests = overrides(placement, "on_request")
        self.copies_prompts = overrides(placement, "wanted_pages")
        """After a use, the policy decides about the whole prompt."""
        self.copies_nodes = not self.copies_prompts and overrides(placement, "after_use")
        """After a use, the policy decides node by node."""

    def __repr__(self) -> str:
        return f"Edge({self.upper.name}-{self.lower.name})"

    @property
    def copies_after_use(self) -> bool:
        """Whether the policy copies pages down after a request has used them."""
        return self.copies_nodes or self.copies_prompts

    # --- what the placement policy answers; PolicyError if the answer is unusable --------------------------------------------

    def wants_used(self, node: Node, now: float) -> bool:
        """Whether to copy a node down after a request has used it."""
        if self._is_typed:
            return self.placement.after_use(node, now)
        return truth(self._policy_name, "after_use()", self._policy.after_use(node, now))

    def wants_evicted(self, node: Node, now: float) -> bool:
        """Whether to write a node down when it leaves the upper tier."""
        if self._is_typed:
            return self.placement.after_eviction(node, now)
        return truth(self._policy_name, "after_eviction()", self._policy.after_eviction(node, now))

    def wanted_pages(self, request: Request, path: Sequence[Node], now: float) -> int:
        """How many leading pages of a prompt the lower tier should have."""
        answer = self._policy.wanted_pages(request, path, now)
        return whole_number(self._policy_name, "wanted_pages()", answer, request.prompt_pages)

    def keeps_loaded(self) -> bool:
        """Whether the lower tier keeps its copy of pages that the upper tier also has."""
        return truth(self._policy_name, "keeps_loaded", self._policy.keeps_loaded)

    def watermark(self) -> float:
        """Fill of the upper tier above which pages are written early; 0 means never."""
        return number(self._policy_name, "watermark", self._policy.watermark, 1.0)


def chain(tiers: Sequence[Tier], placements: "Sequence[PlacementPolicy]") -> list[Edge]:
    """Return edges that join each tier to the next; ``placements`` has one entry per edge, from the top."""
    return [Edge(tiers[at], tiers[at + 1], placement) for at, placement in enumerate(placements)]
