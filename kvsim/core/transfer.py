"""The record that the core hands to a substrate to have pages copied."""

from math import nan
from typing import Any, Final, cast

from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.tier import Edge, Tier
from kvsim.core.tree import Carrier, Node


class FetchPin:
    """Keeps the pages of a fetch, and the path above them, in the tier that they are fetched into, from its start until
    ``let_go``. Only what has arrived is kept after the fetch has ended."""

    __slots__ = ("_fetch_pins", "_residency", "node", "tier")

    def __init__(self, node: Node, tier: Tier, residency: Residency, fetch_pins: "dict[FetchPin, None]") -> None:
        """``fetch_pins`` lists all that keep something."""
        self.node: Node | None = node
        """The deepest node that is kept; None if nothing is."""
        self.tier = tier
        self._residency = residency
        self._fetch_pins = fetch_pins
        residency.pin(node, tier)
        fetch_pins[self] = None

    def keep(self, node: Node) -> None:
        """Keep a node and the path above it instead of what was kept until now."""
        if self.node is not None and self.node is not node:
            self._residency.pin(node, self.tier)
            self._residency.unpin(self.node, self.tier)
            self.node = node

    def let_go(self) -> None:
        """Keep nothing any more; nothing happens if it keeps nothing."""
        self._fetch_pins.pop(self, None)
        if self.node is not None:
            self._residency.unpin(self.node, self.tier)
            self.node = None


class Transfer(Carrier):
    """Pages to be copied from one tier to another: the core creates it, a substrate copies the bytes and reports the end.

    ``Transfers.begin`` assigns slots in the target; ``finish`` or ``abort`` ends the transfer. If one of its nodes is cut
    meanwhile, both parts are listed.
    """

    __slots__ = (
        "after", "arrived_pages", "begun", "begun_s", "done", "edge", "ended", "fetch_pin", "goes_down", "has_fault",
        "is_announced", "pins", "request", "source", "submitted", "target",
    )  # fmt: skip

    def __init__(self, edge: Edge, nodes: list[Node], *, goes_down: bool, after: "list[Transfer] | None" = None) -> None:
        self.nodes = nodes
        self.edge = edge
        self.source: Tier = edge.upper if goes_down else edge.lower
        self.target: Tier = edge.lower if goes_down else edge.upper
        self.goes_down = goes_down
        """Whether the target is below the source."""
        self.after: list[Transfer] = NO_TRANSFERS if after is None else after
        """Transfers that must end before this one begins, since they bring what it reads; never changed in place."""
        self.request: Request | None = None
        """Down: the request whose prompt is copied, if the copy was offered after a use. Up: the request that it is read for; set
        by the engine."""
        self.begun = False
        self.is_announced = False
        """Whether those that watch the cache have been told that it has begun."""
        self.begun_s = nan
        """Time at which the engine passed it to the substrate."""
        self.done = False
        self.pins: list[tuple[Node, int]] = []
        """(node, tier index) pairs that this transfer pins until it ends."""
        self.submitted = False
        """Whether the engine has taken charge of this transfer."""
        self.ended: Any = None
        """The engine's event for the end of this transfer, if a process waits for it."""
        self.has_fault = False
        """Set by a substrate before the end if the first page that did not arrive can no longer be read from the source."""
        self.arrived_pages = 0
        """Pages that arrived; set at the end."""
        self.fetch_pin: FetchPin | None = None
        """What keeps a fetch's pages in the target after its end."""

    @property
    def pages(self) -> int:
        """Pages still in this transfer."""
        pages = 0
        for node in self.nodes:
            pages += node.pages
        return pages

    @property
    def name(self) -> str:
        """Source and target, such as ``gpu-cpu``."""
        return f"{self.source.name}-{self.target.name}"


NO_TRANSFERS: Final[list[Transfer]] = []


class Begin:
    """Whether a transfer can run; if not, the transfers that must end first."""

    __slots__ = ("can_run", "waits")

    def __init__(self, can_run: bool, waits: list[Transfer]) -> None:
        self.can_run = can_run
        self.waits = waits


RUN: Final = Begin(True, NO_TRANSFERS)


def transfers_of(node: Node) -> tuple[Transfer, ...]:
    """Return the transfers that copy a node."""
    return cast(tuple[Transfer, ...], node.transfers)
