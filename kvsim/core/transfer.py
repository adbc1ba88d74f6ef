"""The one record that passes from the core to a substrate."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.core.request import Request
    from kvsim.core.tier import Tier
    from kvsim.core.tree import Node


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages on their way from one tier to the next: the core makes it, a substrate copies it, the core is told.

    ``begin`` gives the target its slots, ``finish`` or ``abort`` ends it. A node that is cut meanwhile stands here as
    its two parts.
    """

    source: "Tier"
    target: "Tier"
    nodes: list["Node"]
    """What is copied, in the order in which it arrives."""
    after: list["Transfer"] = field(default_factory=list)
    """Transfers that must have ended before this one can begin: they bring what this one reads."""
    request: "Request | None" = None
    """Whose prompt is copied down, if it was offered after a use."""
    begun: bool = False
    done: bool = False
    pins: list[tuple["Node", int]] = field(default_factory=list)
    """(node, tier) pairs that this transfer keeps in place."""
    submitted: bool = False
    """The engine sees to it."""
    ended: Any = None
    """The engine's event for the end of this transfer, if somebody waits for it."""
    has_fault: bool = False
    """Set by a substrate before the end: the first page that did not arrive cannot be read from the source any more."""
    arrived_pages: int = 0
    """Set at the end."""

    @property
    def pages(self) -> int:
        """Pages still in this transfer."""
        return sum([node.pages for node in self.nodes])

    @property
    def name(self) -> str:
        """Direction, such as ``gpu-cpu``."""
        return f"{self.source.name}-{self.target.name}"
