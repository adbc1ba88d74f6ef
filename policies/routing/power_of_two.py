"""The power of two choices (Mitzenmacher, 2001), as in SGLang's router (``sgl-model-gateway/src/policies/power_of_two.rs``)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.load import LoadRouting


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class PowerOfTwo(LoadRouting):
    """Spreads load nearly as well as the least loaded engine of all would, but two loads decide, and no engine attracts a burst.

    every request   two different engines are drawn; the one with the lower load, of equals the first one drawn
    load            tokens: prompt tokens of the requests sent there that have not ended; requests: their number

    SGLang's router compares tokens that engines report and, where these are missing, its own number of requests.
    """

    def bind(self, context: RoutingContext) -> None:
        self._rng: np.random.Generator = context.rng

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        count = len(engines)
        if count == 1:
            return engines[0].engine
        first = int(self._rng.random() * count)
        second = (first + 1 + int(self._rng.random() * (count - 1))) % count
        if self.load_of(engines[second]) < self.load_of(engines[first]):
            first = second
        return engines[first].engine
