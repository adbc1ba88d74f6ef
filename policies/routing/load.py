"""The load of an engine, as a router without reports knows it."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy

LOADS = ("tokens", "requests")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LoadRouting(RoutingPolicy):
    """Compares engines by their load.

    tokens     prompt tokens of the requests sent there that have not ended
    requests   number of these requests
    """

    load: str = "tokens"

    def __post_init__(self) -> None:
        if self.load not in LOADS:
            raise ValueError(f"load must be one of {', '.join(LOADS)}, not {self.load}")

    def load_of(self, status: EngineStatus) -> int:
        """Return the load of one engine."""
        return status.outstanding_tokens if self.load == "tokens" else status.outstanding_requests
