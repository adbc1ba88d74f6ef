"""Random routing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class RandomRouting(RoutingPolicy):
    """Chooses any engine with equal probability: what a policy must beat to be worth its state.

    every request   each engine that is up is equally likely
    """

    @property
    def chooses_by(self) -> str:
        return "order"

    def bind(self, context: RoutingContext) -> None:
        self._rng: np.random.Generator = context.rng

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        return engines[int(self._rng.random() * len(engines))].engine
