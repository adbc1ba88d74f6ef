"""Schedulers that LMetric's paper compares it with (Zhang et al., OSDI 2026, sections 4 and 6), as that paper describes them.

They are for ``run.py`` beside it. All know what the paper's router knows: at any time which requests each engine has and what it
has cached, and all count a request from when they send it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.core.request import Request
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.cached import cached_pages
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.work import SentWork


@dataclass(kw_only=True, eq=False)
class Scored(RoutingPolicy):
    """Sends a request to the engine with the lowest score; of several, to the one with the lowest number."""

    @property
    def needs_cached_pages(self) -> bool:
        return True

    def bind(self, context: RoutingContext) -> None:
        if context.prefill_s is None:
            raise ValueError("needs a model and a machine")
        self._seconds = context.prefill_s
        self._page_tokens = context.page_tokens
        self._holders = context.holders
        self._work = SentWork(context.engines)
        self._waiting = {engine: dict[int, float]() for engine in context.engines}
        """By engine, the seconds of prefill of each request that has not had its first token."""
        self._chosen = 0, 0.0

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        self._work.offer(engines)
        hits = np.zeros(len(engines))
        for at, pages in cached_pages(request, engines, self._work.places, self._holders).items():
            hits[at] = min(pages * self._page_tokens, request.prompt_tokens - 1)
        at = int(self.scores(request, engines, hits).argmin())
        self._chosen = request.prompt_tokens - int(hits[at]), self._seconds(int(hits[at]), request.prompt_tokens)
        return engines[at].engine

    def scores(self, request: Request, engines: Sequence[EngineStatus], hits: np.ndarray) -> np.ndarray:
        """Return the score of each engine; ``hits`` are the tokens of the prompt that each one has cached."""
        raise NotImplementedError

    @property
    def batch(self) -> np.ndarray:
        """How many requests each engine has, waiting or running."""
        return self._work.requests[self._work.rows]

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        tokens, seconds = self._chosen
        self._work.sent(request, engine, tokens)
        self._waiting[engine][request.index] = seconds

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._work.computed(request, engine)
        self._waiting[engine].pop(request.index, None)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        self._work.ended(request, engine)
        self._waiting[engine].pop(request.index, None)


@dataclass(kw_only=True, eq=False)
class VLLM(Scored):
    """Balances load alone, as vLLM's data-parallel front end does: 4 * requests before their first token + the others."""

    def scores(self, request: Request, engines: Sequence[EngineStatus], hits: np.ndarray) -> np.ndarray:
        queued = np.array([len(self._waiting[status.engine]) for status in engines])
        found: np.ndarray = self.batch + 3 * queued
        return found


@dataclass(kw_only=True, eq=False)
class Linear(Scored):
    """Adds up what is not cached and the load, both from 0 to 1: weight * (1 - hit ratio) + (1 - weight) * batch / largest batch.

    The paper's section 4.2 has it as the scheduler of Alibaba's Bailian, and finds 0.7 best for chats and 0.55 for API calls.
    """

    weight: float = 0.7

    def scores(self, request: Request, engines: Sequence[EngineStatus], hits: np.ndarray) -> np.ndarray:
        batch = self.batch
        found: np.ndarray = self.weight * (1 - hits / request.prompt_tokens) + (1 - self.weight) * batch / max(1, batch.max())
        return found


@dataclass(kw_only=True, eq=False)
class LowestTTFT(Scored):
    """Estimates the time to first token on each engine: the prefill of what waits there and of the request's own new tokens.

    The paper's stand-in for llm-d asks a simulator of the engine (section 4.6); here that is the simulated engines' own model of
    prefill, without the decode steps beside it.
    """

    def scores(self, request: Request, engines: Sequence[EngineStatus], hits: np.ndarray) -> np.ndarray:
        waiting = [sum(self._waiting[status.engine].values()) for status in engines]
        own = {hit: self._seconds(int(hit), request.prompt_tokens) for hit in set(hits.tolist())}
        return np.array([before + own[hit] for before, hit in zip(waiting, hits.tolist(), strict=True)])
