"""The contracts of what a replay and an engine can play requests against."""

from typing import Any, Protocol

from kvsim.core.cache import Cache
from kvsim.core.hybrid import HybridCache
from kvsim.core.request import Request
from kvsim.core.tier import Tier

ServedCache = Cache | HybridCache
"""What an engine serves requests from, call by call."""

Hits = tuple[int, int, int]
"""Hit pages by the tier that they came from: gpu, cpu, disk."""


class ReplayLease(Protocol):
    """What a served request keeps until it is finished."""

    hits: Hits


class Server(Protocol):
    """Serves requests without a clock: all that a request brings about has happened when ``serve`` returns.

    Replay keeps what ``serve`` returns and hands it to ``finish_request`` later, oldest first.
    """

    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request that takes ``pages`` pages in all. Returns what it holds, a ``ReplayLease``; None if there is no room.

        After None the same request is asked for again when another one has finished, or rejected if none runs.
        """

    def finish_request(self, lease: Any) -> None:
        """The request has its answer: what it holds is given back."""


class ServingCache(Server, Protocol):
    """A cache that is its own server, by the rules of one engine."""

    tiers: list[Tier]
    counts: Any
    """A dataclass of numbers: what became of pages that were moved."""
    page_tokens: int
