"""The one record that passes from the core to a substrate."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.core.edge import Edge
    from kvsim.core.request import Request
    from kvsim.core.tier import Tier
    from kvsim.core.tree import Node


class Transfer:
    """Pages on their way from one tier to another: the core makes it, a substrate copies it, the core is told.

    ``Transfers.begin`` gives the target its slots, ``finish`` or ``abort`` ends it. A node that is cut meanwhile stands here
    as its two parts.
    """

    __slots__ = (
        "after", "arrived_pages", "begun", "done", "edge", "ended", "goes_down", "has_fault", "nodes", "pins", "request",
        "source", "submitted", "target",
    )  # fmt: skip

    def __init__(self, edge: "Edge", nodes: "list[Node]", *, goes_down: bool, after: "list[Transfer] | None" = None) -> None:
        self.edge = edge
        self.source: Tier = edge.upper if goes_down else edge.lower
        self.target: Tier = edge.lower if goes_down else edge.upper
        self.nodes = nodes
        """What is copied, in the order in which it arrives: parents before children."""
        self.goes_down = goes_down
        """Whether the target is below the source."""
        self.after: list[Transfer] = after or []
        """Transfers that must have ended before this one can begin: they bring what this one reads."""
        self.request: Request | None = None
        """Whose prompt is copied down, if it was offered after a use."""
        self.begun = False
        self.done = False
        self.pins: list[tuple[Node, int]] = []
        """(node, tier) pairs that this transfer keeps in place."""
        self.submitted = False
        """The engine sees to it."""
        self.ended: Any = None
        """The engine's event for the end of this transfer, if somebody waits for it."""
        self.has_fault = False
        """Set by a substrate before the end: the first page that did not arrive cannot be read from the source any more."""
        self.arrived_pages = 0
        """Set at the end."""

    @property
    def pages(self) -> int:
        """Pages still in this transfer."""
        pages = 0
        for node in self.nodes:
            pages += node.pages
        return pages

    @property
    def name(self) -> str:
        """Direction, such as ``gpu-cpu``."""
        return f"{self.source.name}-{self.target.name}"
