"""KV-aware routing, as NVIDIA Dynamo's router does it (``lib/kv-router/src/scheduling/selector.rs`` and ``sequences``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, Real, check_settings
from kvsim.pages.page_owners import Leading, OwnCounts, PageOwners
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.drawing import softmax

LARGEST: Final = 2**20
"""Factors of exact costs up to which these are surely integers of 64 bits."""


class ActiveRequests:
    """What the requests sent to an engine, and not ended, need there."""

    def __init__(self, owners: PageOwners, place: int) -> None:
        """``owners`` know the engine by its ``place``."""
        self.pages = OwnCounts(owners, place)
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
    late_answers: bool = False

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "overlap_score_weight", "router_temperature")
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
        weight = Fraction(str(float(self.overlap_score_weight)))
        self._page_tokens = context.page_tokens
        self._prefills, self._decodes = context.prefills, context.decodes
        self._rng: np.random.Generator = context.rng
        self._per_token = weight.numerator
        self._per_page = weight.denominator * context.page_tokens
        """What a token to compute, and a page in use, add to a cost, in parts of a block: ``_per_page`` of them are one."""
        self._owners = PageOwners(len(context.engines))
        self._numbers = {engine: place for place, engine in enumerate(context.engines)}
        self._active = {engine: ActiveRequests(self._owners, place) for engine, place in self._numbers.items()}
        self._tokens_to_compute = 0
        self._leading = context.leading if type(self).cost is KVAware.cost else None
        """What all engines have cached; without it, each is asked."""
        is_small = max(self._per_token, self._per_page) <= LARGEST
        self._loads: np.ndarray = np.zeros(len(context.engines), np.int64 if is_small else object)
        """What the requests of each engine add to the cost of any other, in parts of a block."""
        self._offered: Sequence[EngineStatus] = ()
        self._rows = np.zeros(0, np.int64)
        """Where each of the engines that were offered last stands in ``_loads``."""

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        costs = self._ask(request, engines) if self._leading is None else self._costs(request, engines)
        chosen = engines[softmax(costs, self.router_temperature, self._rng)]
        self._tokens_to_compute = self._tokens(request, chosen)
        return chosen.engine

    def _ask(self, request: Request, engines: Sequence[EngineStatus]) -> np.ndarray:
        """Return the cost of each engine."""
        return np.array([self.cost(request, status) for status in engines])

    def _costs(self, request: Request, engines: Sequence[EngineStatus]) -> np.ndarray:
        """Return the cost of each engine; without a temperature, in parts of a block and less what is equal for all."""
        assert self._leading is not None
        costs: np.ndarray = self._loads.copy()
        if self._prefills:
            self._take_off_cached(costs, request, self._leading(request))
            if self._decodes:
                subtract(costs, self._owners.leading(request.runs), self._per_page)
        if len(engines) < len(costs):
            if engines is not self._offered:
                self._offered = engines
                self._rows = np.array([self._numbers[status.engine] for status in engines], np.int64)
            costs = costs[self._rows]
        if not self.router_temperature:
            return costs
        return ((costs + self._own_cost(request)) / self._per_page).astype(float)

    def _take_off_cached(self, costs: np.ndarray, request: Request, cached: Leading) -> None:
        """Take off the tokens of a prompt that each engine has cached; the last page may be partial."""
        tokens, page_tokens = request.prompt_tokens, self._page_tokens
        if cached.most() * page_tokens <= tokens:
            subtract(costs, cached, self._per_token * page_tokens)
        else:
            costs -= self._per_token * np.minimum(cached.of_all(len(costs)) * page_tokens, tokens).astype(costs.dtype, copy=False)

    def _own_cost(self, request: Request) -> int:
        """Return what a request adds to the cost of an idle engine without any of its pages, in parts of a block."""
        if not self._prefills:
            return self._per_page * request.prompt_pages
        return self._per_token * request.prompt_tokens + (self._per_page * request.prompt_pages if self._decodes else 0)

    def _load(self, active: ActiveRequests) -> int:
        """Return what an engine's requests add to the cost of any other, in parts of a block."""
        if not self._prefills:
            return self._per_page * active.prompt_pages
        return self._per_token * active.total_prefill_tokens + (self._per_page * active.pages.pages if self._decodes else 0)

    def cost(self, request: Request, status: EngineStatus) -> float:
        """Return what the request would cost on an engine, in blocks: pages."""
        active = self._active[status.engine]
        parts = self._load(active) + self._own_cost(request)
        if self._prefills:
            parts -= self._per_token * (request.prompt_tokens - self._tokens(request, status))
            if self._decodes:
                parts -= self._per_page * active.pages.leading(request.runs)
        return parts / self._per_page

    def _tokens(self, request: Request, status: EngineStatus) -> int:
        """Return how many tokens of the prompt the engine would have to compute."""
        return max(0, request.prompt_tokens - status.cached_pages(request) * self._page_tokens)

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        active = self._active[engine]
        active.pages.add(request.runs)
        active.prompt_pages += request.prompt_pages
        active.prefill_tokens[request.index] = self._tokens_to_compute
        active.total_prefill_tokens += self._tokens_to_compute
        self._note(engine)

    def _note(self, engine: int) -> None:
        """Note the load of an engine after a change."""
        self._loads[self._numbers[engine]] = self._load(self._active[engine])

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._active[engine].finish_prefill(request)
        self._note(engine)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        active = self._active[engine]
        active.finish_prefill(request)
        active.pages.remove(request.runs)
        active.prompt_pages -= request.prompt_pages
        self._note(engine)


def subtract(costs: np.ndarray, leading: Leading, each: int) -> None:
    """Take ``each``, which may be too large for 64 bits if costs are Python's numbers, off them for every page of an engine."""
    for flags, pages in leading.many:
        costs -= np.multiply(flags, each * pages, dtype=costs.dtype)
    for place, pages in leading.few.items():
        costs[place] -= each * pages
