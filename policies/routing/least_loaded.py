"""Least loaded first, as the least-connections method of HTTP load balancers; there, the load is the number of requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.load import LoadRouting


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LeastLoaded(LoadRouting):
    """Keeps queues short: the best that can be done without regard to what is cached where.

    every request   the engine with the lowest load; of several, the one with the lowest number
    load            tokens: prompt tokens of the requests sent there that have not ended; requests: their number
    """

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        chosen, lowest = engines[0].engine, self.load_of(engines[0])
        for status in engines:
            load = self.load_of(status)
            if load < lowest:
                chosen, lowest = status.engine, load
        return chosen
