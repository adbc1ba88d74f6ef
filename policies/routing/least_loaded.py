"""Least loaded first, as the least-connections method of HTTP load balancers; there, the load is the number of requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.load import LoadRouting
from kvsim.policies.routing.lowest import Lowest


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LeastLoaded(LoadRouting):
    """Keeps queues short: the best that can be done without regard to what is cached where.

    every request   the engine with the lowest load; of several, the one with the lowest number
    load            tokens: prompt tokens of the requests sent there that have not ended; requests: their number
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lowest = Lowest()

    def bind(self, context: RoutingContext) -> None:
        is_own = type(self).load_of is not LoadRouting.load_of
        self._lowest = Lowest(None if is_own or context.changes is None else context.changes())

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        return engines[self._lowest.of(engines, self.load_of)].engine
