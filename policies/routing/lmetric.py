"""LMetric (Zhang et al., Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling, OSDI 2026, arXiv
2603.15202, figure 17; ``lmetric.rs`` in its blitz-router)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, check_settings
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.cached import cached_pages
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.work import SentWork


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LMetric(RoutingPolicy):
    """Multiplies what an engine would have to compute by how many requests it has: cache and load without a weight to tune.

    A product orders engines alike, whatever its factors are scaled by.

    every request   the engine with the lowest product
    product         prefill tokens * requests
    prefill tokens  to be computed if the engine got the request: its own that are not cached, at least one, and those of requests
                    sent there that have not had their first token, as counted when they were sent
    requests        sent there and not ended, waiting or running, and this one
    equal products  the fewest prefill tokens, then the engine with the lowest number

    So an engine with one request gets a prompt before an idle one if it has more than half of it cached. On engines that only
    decode, the number of requests decides alone. Left out is the paper's detector of hot prefixes, which none of its four traces
    sets off. Every engine's product is computed for each request, since the order of engines depends on it.
    """

    staleness_s: float = 0.0
    late_answers: bool = False

    def __post_init__(self) -> None:
        check_settings(self, SECONDS, "staleness_s")

    def without_effect(self) -> Sequence[str]:
        return () if self.staleness_s else ("late_answers",)

    @property
    def needs_cached_pages(self) -> bool:
        return True

    @property
    def hears_late(self) -> bool:
        return self.late_answers

    @property
    def chooses_by(self) -> str:
        return "reports" if self.late_answers else "state"

    def bind(self, context: RoutingContext) -> None:
        self._page_tokens = context.page_tokens
        self._prefills = context.prefills
        self._holders = context.holders
        self._work = SentWork(context.engines)
        self._tokens_to_compute = 0

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        work = self._work
        work.offer(engines)
        requests = work.requests[work.rows]
        if not self._prefills:
            self._tokens_to_compute = 0
            return engines[int(requests.argmin())].engine
        waiting = work.prefill_tokens[work.rows]
        tokens = waiting + request.prompt_tokens
        for at, pages in cached_pages(request, engines, work.places, self._holders).items():
            tokens[at] = waiting[at] + max(1, request.prompt_tokens - pages * self._page_tokens)
        products = tokens * (requests + 1)
        best = np.flatnonzero(products == products.min())
        at = int(best[int(tokens[best].argmin())])
        self._tokens_to_compute = int(tokens[at] - waiting[at])
        return engines[at].engine

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self._work.sent(request, engine, self._tokens_to_compute)

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._work.computed(request, engine)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        self._work.ended(request, engine)
