"""What eviction policies hear of requests."""

from collections.abc import Iterable
from typing import Any

from kvsim.core.tier import GPU, Tier
from kvsim.core.tree import READY, Node, RadixTree


class Listeners:
    """The tiers whose eviction policies want to hear of the requests that one GPU tier serves, by kind of notification."""

    __slots__ = ("arrivals", "departures", "finishes", "hits", "requests", "tiers")

    def __init__(self, tiers: list[Tier]) -> None:
        self.tiers = tiers
        self.arrivals = [tier for tier in tiers if tier.wants_arrivals]
        self.requests = [tier for tier in tiers if tier.wants_requests]
        self.departures = [tier for tier in tiers if tier.wants_departures]
        self.finishes = [tier for tier in tiers if tier.wants_finishes]
        self.hits = [tier for tier in tiers if tier.wants_hits]


class Notices:
    """Notifies the policies of all tiers, or of those below one of several GPU tiers, of the requests that it serves.

    ``gpu`` is that GPU tier; None stands for the only one.
    """

    def __init__(self, tiers: list[Tier]) -> None:
        gpus = [tier for tier in tiers if tier.level == GPU]
        self.has_several_gpus = len(gpus) > 1
        self._all = Listeners(tiers)
        self.wants_hits = bool(self._all.hits)
        """Whether any policy hears of hits."""
        self.latest: Any = None
        """The request that policies have been notified of last."""
        self._listeners = {gpu.index: Listeners([gpu, *gpu.all_below()]) for gpu in gpus} if self.has_several_gpus else {}

    def hearing(self, gpu: Tier | None) -> Listeners:
        """Return who hears of the requests of a GPU tier."""
        return self._listeners[gpu.index] if gpu is not None and self.has_several_gpus else self._all

    def arrival(self, request: Any, now: float, gpu: Tier | None = None) -> None:
        """Notify policies that a request has arrived and waits."""
        if self._all.arrivals:
            for tier in self.hearing(gpu).arrivals:
                tier.eviction.on_arrival(request, now)

    def request(self, request: Any, now: float, gpu: Tier | None = None, *, on_gpu_only: bool = False) -> None:
        """Notify policies of a request before its hits and inserts."""
        self.latest = request
        if self._all.requests:
            for tier in self.hearing(gpu).requests:
                if on_gpu_only and tier is not gpu:
                    continue
                tier.eviction.on_request(request, now)

    def finish(self, request: Any, node: Node, now: float, gpu: Tier | None = None) -> None:
        """Notify policies that a request has finished; its path, which ends with ``node``, is still pinned."""
        if self._all.finishes:
            for tier in self.hearing(gpu).finishes:
                tier.eviction.on_finish(request, node, now)

    def departure(self, request: Any, tree: RadixTree, now: float, gpu: Tier | None = None) -> None:
        """Notify policies that a request which has arrived will not finish, with the path of its prompt in the tree."""
        if self._all.departures:
            path = tree.walk(tree.root, request.runs)[0]
            for tier in self.hearing(gpu).departures:
                tier.eviction.on_departure(request, path[-1] if path else tree.root, now)

    def hits(self, nodes: Iterable[Node], now: float, gpu: Tier | None = None) -> None:
        """Notify the policy of every tier that has a ready copy of a hit."""
        for tier in self.hearing(gpu).hits:
            index = tier.index
            for node in nodes:
                if node.state[index] == READY:
                    tier.eviction.on_hit(node, now)
