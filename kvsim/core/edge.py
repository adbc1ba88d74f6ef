"""Two tiers of which the lower holds copies for the upper: the placement policy between them, and what is on its way down."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
        """The write-downs decided on and not yet handed out."""
        self.in_flight: OrderedDict[Transfer, None] = OrderedDict()
        """Write-downs handed out and not yet ended, oldest first."""
        self.leaving: list[Node] = []
        """What has left the upper tier in the pass under way and is to be written down at its end, first victim first."""
        self.early_mark = 0
        """``inserted_pages`` of the upper tier when pages were last written early."""
        self.hears_requests = overrides(placement, "on_request")
        self.copies_prompts = overrides(placement, "wanted_pages")
        """The policy decides about whole prompts after a use."""
        self.copies_nodes = not self.copies_prompts and overrides(placement, "after_use")
        """The policy decides node by node after a use."""

    def __repr__(self) -> str:
        return f"Edge({self.upper.name}-{self.lower.name})"

    @property
    def copies_after_use(self) -> bool:
        """Whether anything is copied down when a request has used it."""
        return self.copies_nodes or self.copies_prompts


def chain(tiers: Sequence[Tier], placements: "Sequence[PlacementPolicy]") -> list[Edge]:
    """Edges that join each tier to the next one; ``placements`` has one entry an edge, from the top."""
    return [Edge(tiers[at], tiers[at + 1], placement) for at, placement in enumerate(placements)]
