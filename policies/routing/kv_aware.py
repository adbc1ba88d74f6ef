"""KV-aware routing, as NVIDIA Dynamo's router does it (``lib/kv-router/src/scheduling/selector.rs`` and ``sequences``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, Real, check_settings
from kvsim.pages.extent_counts import PageCounts
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext


class ActiveRequests:
    """What the requests sent to an engine, and not ended, need there."""

    def __init__(self) -> None:
        self.pages = PageCounts()
        """Pages of their prompts; those that several share are one."""
        self.prompt_pages = 0
        """The same, where those that several share count for each."""
        self.prefill_tokens: dict[int, int] = {}
        """By request, the tokens that it had to compute when it was sent; none once its first token has passed."""
        self.total_prefill_tokens = 0

    def finish_prefill(self, request: Request) -> None:
        """The prompt is computed, or never will be."""
        self.total_prefill_tokens -= self.prefill_tokens.pop(request.index, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class KVAware(RoutingPolicy):
    """Weighs what an engine has cached of a prompt against what it has to do, as the engines report their caches.

    every request    the engine with the lowest cost; of several, any
    cost             overlap_score_weight * prefill blocks + decode blocks, if the engine got the request
    prefill blocks   tokens still to be computed, this prompt's without what is cached and those of requests sent there that
                     have not had their first token, divided by the tokens of a page
    decode blocks    different pages of the prompts of all requests sent there that have not ended, and of this one
    temperature      above 0: an engine is drawn, with probability in proportion to exp(-cost / (range of costs) / temperature)

    On engines that only prefill, decode blocks do not count. On engines that only decode, prefill blocks do not count, and
    decode blocks that prompts share count for each. Answers never count, as in Dynamo without ``router_track_output_blocks``;
    nor do cached pages in CPU memory or on disk. Newer versions of Dynamo call the weight ``prefill_load_scale``.
    """

    overlap_score_weight: float = 1.0
    router_temperature: float = 0.0
    staleness_s: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "overlap_score_weight", "router_temperature")
        check_settings(self, SECONDS, "staleness_s")

    @property
    def needs_cached_pages(self) -> bool:
        return True

    def bind(self, context: RoutingContext) -> None:
        self._page_tokens = context.page_tokens
        self._prefills, self._decodes = context.prefills, context.decodes
        self._rng: np.random.Generator = context.rng
        self._active = {engine: ActiveRequests() for engine in context.engines}
        self._tokens_to_compute = 0

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        chosen = engines[self._draw([self.cost(request, status) for status in engines])]
        self._tokens_to_compute = self._tokens(request, chosen)
        return chosen.engine

    def cost(self, request: Request, status: EngineStatus) -> float:
        """Return what the request would cost on an engine, in blocks: pages."""
        active = self._active[status.engine]
        if not self._prefills:
            return float(active.prompt_pages + request.prompt_pages)
        prefill_blocks = (active.total_prefill_tokens + self._tokens(request, status)) / self._page_tokens
        cost = self.overlap_score_weight * prefill_blocks
        if self._decodes:
            cost += active.pages.pages + request.prompt_pages - active.pages.leading(request.runs)
        return cost

    def _tokens(self, request: Request, status: EngineStatus) -> int:
        """Return how many tokens of the prompt the engine would have to compute."""
        return max(0, request.prompt_tokens - status.cached_pages(request) * self._page_tokens)

    def _draw(self, costs: list[float]) -> int:
        """Return the position of the lowest cost or, at a temperature above 0, one drawn by softmax."""
        lowest, highest = min(costs), max(costs)
        if not self.router_temperature or lowest == highest:
            best = [at for at, cost in enumerate(costs) if cost == lowest]
            return best[0] if len(best) == 1 else best[int(self._rng.random() * len(best))]
        scale = (highest - lowest) * self.router_temperature
        weights = [exp((lowest - cost) / scale) for cost in costs]
        left = self._rng.random() * sum(weights)
        for at, weight in enumerate(weights):
            left -= weight
            if left <= 0:
                return at
        return len(costs) - 1

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        active = self._active[engine]
        active.pages.add(request.runs)
        active.prompt_pages += request.prompt_pages
        active.prefill_tokens[request.index] = self._tokens_to_compute
        active.total_prefill_tokens += self._tokens_to_compute

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._active[engine].finish_prefill(request)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        active = self._active[engine]
        active.finish_prefill(request)
        active.pages.remove(request.runs)
        active.prompt_pages -= request.prompt_pages
