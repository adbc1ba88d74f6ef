"""KV-aware routing, as NVIDIA Dynamo's router does it (``lib/kv-router/src/scheduling/selector.rs`` and ``sequences``)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, Real, check_settings
from kvsim.pages.extent_counts import PageCounts
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext

NOBODY: Final[dict[int, int]] = {}


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
        self._holders = context.holders if type(self).cost is KVAware.cost else None
        """Who may have cached some of a prompt; without it, all engines are asked."""
        self._numbers = {engine: at for at, engine in enumerate(context.engines)}
        self._loads = np.zeros((3, len(context.engines)), np.int64)
        """Of each engine, what ``ActiveRequests`` says: tokens to compute, different pages, all pages."""
        self._senders: dict[int, dict[int, int]] = {}
        """By first page of a prompt: how many requests with that page each engine has that have not ended."""
        self._offered: Sequence[EngineStatus] = ()
        self._places: dict[int, int] = {}
        self._rows = np.zeros(0, np.int64)
        """Where each of the engines that were offered last stands among them, and in ``_loads``."""

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        holders = self._holders
        costs = self._ask(request, engines) if holders is None else self._costs(request, engines, holders(request))
        chosen = engines[self._draw(costs)]
        self._tokens_to_compute = self._tokens(request, chosen)
        return chosen.engine

    def _ask(self, request: Request, engines: Sequence[EngineStatus]) -> np.ndarray:
        """Return the cost of each engine."""
        return np.array([self.cost(request, status) for status in engines])

    def _costs(self, request: Request, engines: Sequence[EngineStatus], holders: Collection[int]) -> np.ndarray:
        """Return the cost of each engine. Only those are asked that may have some of the prompt: the others have none."""
        if engines is not self._offered:
            self._offered = engines
            self._places = {status.engine: at for at, status in enumerate(engines)}
            self._rows = np.array([self._numbers[status.engine] for status in engines], np.int64)
        loads = self._loads if len(engines) == len(self._numbers) else self._loads[:, self._rows]
        if not self._prefills:
            prompt_pages: np.ndarray = loads[2] + request.prompt_pages
            return prompt_pages.astype(float)
        tokens, pages = loads[0], loads[1]
        costs: np.ndarray = self.overlap_score_weight * ((tokens + request.prompt_tokens) / self._page_tokens)
        if self._decodes:
            costs = costs + (pages + request.prompt_pages)
        sent = self._senders.get(request.runs[0][0], NOBODY) if request.runs else NOBODY
        for engine in {*holders, *sent}:
            at = self._places.get(engine, -1)
            if at >= 0:
                costs[at] = self.cost(request, engines[at])
        return costs

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

    def _draw(self, costs: np.ndarray) -> int:
        """Return the position of the lowest cost or, at a temperature above 0, one drawn by softmax."""
        lowest = float(costs.min())
        highest = float(costs.max()) if self.router_temperature else lowest
        if lowest == highest:
            best = np.flatnonzero(costs == lowest)
            return int(best[0] if len(best) == 1 else best[int(self._rng.random() * len(best))])
        scale = (highest - lowest) * self.router_temperature
        weights = [exp((lowest - cost) / scale) for cost in costs.tolist()]
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
        self._note(request, engine, 1)

    def _note(self, request: Request, engine: int, count: int) -> None:
        """Note the load of an engine after a change, and with a ``count`` of 1 or -1 that a request has come or gone."""
        active = self._active[engine]
        loads, at = self._loads, self._numbers[engine]
        loads[0, at], loads[1, at], loads[2, at] = active.total_prefill_tokens, active.pages.pages, active.prompt_pages
        if count and request.runs:
            first = request.runs[0][0]
            senders = self._senders.setdefault(first, {})
            senders[engine] = senders.get(engine, 0) + count
            if not senders[engine]:
                del senders[engine]
                if not senders:
                    del self._senders[first]

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._active[engine].finish_prefill(request)
        self._note(request, engine, 0)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        active = self._active[engine]
        active.finish_prefill(request)
        active.pages.remove(request.runs)
        active.prompt_pages -= request.prompt_pages
        self._note(request, engine, -1)
