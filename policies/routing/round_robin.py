"""Round robin."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class RoundRobin(RoutingPolicy):
    """Gives each engine the same number of requests, whatever their length and whatever it has cached.

    every request   the next engine, by number, after the one chosen before; after the last comes the first
    """

    @property
    def chooses_by(self) -> str:
        return "order"

    def __post_init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        at = bisect_right(engines, self._last, key=lambda status: status.engine)
        self._last = engines[at if at < len(engines) else 0].engine
        return self._last
