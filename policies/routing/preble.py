"""Preble's E2 (Srivatsa et al., Preble: Efficient Distributed Prompt Scheduling for LLM Serving, 2025, arXiv 2407.00023)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import MOST_SECONDS, Real, check_settings
from kvsim.pages.extent_counts import PageCounts
from kvsim.pages.extents import Extent, count_pages
from kvsim.policies.fields import keep_types
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.sent_prompts import SentPrompts


class Window:
    """What was sent to each engine in the last seconds, in the seconds that it takes, and how long answers were."""

    def __init__(self, engines: Sequence[int], window_s: float) -> None:
        self._window_s = window_s
        self._rows = {engine: row for row, engine in enumerate(engines)}
        self.prefill_s = np.zeros(len(engines))
        self.requests = np.zeros(len(engines), np.int64)
        self.uses = [PageCounts() for _ in engines]
        """How often each page was used, by row."""
        self._sent: deque[tuple[float, int, float, tuple[Extent, ...]]] = deque()
        self._answers: deque[tuple[float, int, int]] = deque()
        """When each answer ended, on which engine, and its tokens."""
        self._answer_tokens = 0

    @property
    def mean_answer(self) -> float:
        """Mean length of the answers that have ended, in tokens."""
        return self._answer_tokens / len(self._answers) if self._answers else 0.0

    def sent(self, request: Request, engine: int, prefill_s: float, now: float) -> None:
        """An engine has got a request that takes ``prefill_s`` seconds to compute there."""
        row = self._rows[engine]
        self.prefill_s[row] += prefill_s
        self.requests[row] += 1
        self.uses[row].add(request.runs)
        self._sent.append((now, row, prefill_s, request.runs))

    def answered(self, engine: int, tokens: int, now: float) -> None:
        """An answer has ended."""
        self._answers.append((now, engine, tokens))
        self._answer_tokens += tokens

    def lost(self, engine: int, now: float) -> None:
        """The requests that have just ended on an engine were lost with it: they have no answers."""
        while self._answers and self._answers[-1][:2] == (now, engine):
            self._answer_tokens -= self._answers.pop()[2]

    def move(self, now: float) -> None:
        """Forget what is older than the window."""
        begin = now - self._window_s
        while self._sent and self._sent[0][0] < begin:
            _, row, prefill_s, extents = self._sent.popleft()
            self.requests[row] -= 1
            self.prefill_s[row] = self.prefill_s[row] - prefill_s if self.requests[row] else 0.0
            self.uses[row].remove(extents)
        while self._answers and self._answers[0][0] < begin:
            self._answer_tokens -= self._answers.popleft()[2]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Preble(RoutingPolicy):
    """Exploits a cached prefix if it saves more than is left to compute; otherwise it explores the engine that costs least.

    known           an engine has cached what was sent there, until later prompts drive it out: as many pages as its GPU holds
    longest match   m tokens on some engines, of n
    m > n - m       exploit: of these engines, the one with the lowest load; if that has the highest load of all, and more than
                    balance_threshold times the lowest, the engine with the lowest load
    otherwise       explore: the engine with the lowest load + eviction + prefill
    load            seconds of prefill and decoding of the requests that were sent there in the last window_s seconds. An answer
                    counts with the mean length of those that have ended in that time
    eviction        for each run of pages that would be driven out: seconds to compute it again * how often it was used, per
                    request that was sent there in that time
    prefill         seconds to compute what the engine has not cached of the prompt
    of equals       the engine with the lowest number

    Prefill takes what the model's FLOPs take; a token of an answer takes as long as to read the weights, whatever else decodes:
    the paper fits both to measurements. On engines that only decode, the number of requests in the window decides. The paper also
    copies hot prefixes to further engines (when their queueing delay doubles) and sends prompts with little to compute to engines
    that mostly decode; both are left out, as is its local scheduler. To explore takes time in proportion to the engines.
    """

    window_s: float = 180.0
    balance_threshold: float | None = 1.5

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0, most=MOST_SECONDS), "window_s")
        check_settings(self, Real(least=1), "balance_threshold", or_null=True, hint="null always exploits")

    def bind(self, context: RoutingContext) -> None:
        if context.prefill_s is None:
            raise ValueError("needs a model and a machine")
        self._seconds = context.prefill_s
        self._decode_step_s = context.decode_step_s if context.decodes else 0.0
        self._prefills = context.prefills
        self._page_tokens = context.page_tokens
        self._rows = {engine: row for row, engine in enumerate(context.engines)}
        self._sent = SentPrompts(context.engines, dict(zip(context.engines, context.capacities, strict=True)))
        self._window = Window(context.engines, self.window_s)
        self._has_begun: set[int] = set()
        """Requests under way whose first token has passed."""
        self._draining: set[int] = set()
        """Engines whose requests end before they stop."""
        self._prefill_s = 0.0

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        self._window.move(now)
        rows = np.array([self._rows[status.engine] for status in engines])
        loads = self._loads()[rows]
        found = self._sent.matches(request.runs, now) if self._prefills else {}
        cached = np.array([found.get(status.engine, 0) for status in engines]) * self._page_tokens
        longest = int(cached.max())
        if not self._prefills:
            at = int(self._window.requests[rows].argmin())
        elif longest > request.prompt_tokens - longest:
            at = self._exploit(loads, np.flatnonzero(cached == longest))
        else:
            at = self._explore(request, engines, loads, cached)
        self._prefill_s = self._prefill(request, int(cached[at])) if self._prefills else 0.0
        return engines[at].engine

    def _loads(self) -> np.ndarray:
        """Return the load of each engine, by row, in seconds."""
        window = self._window
        loads: np.ndarray = window.prefill_s + window.requests * (window.mean_answer * self._decode_step_s)
        return loads

    def _exploit(self, loads: np.ndarray, best: np.ndarray) -> int:
        """Return the position of the engine to use, of those that have most of the prompt."""
        at = int(best[int(loads[best].argmin())])
        lowest = int(loads.argmin())
        is_uneven = self.balance_threshold is not None and loads[at] > self.balance_threshold * loads[lowest]
        return lowest if is_uneven and loads[at] == loads.max() else at

    def _explore(self, request: Request, engines: Sequence[EngineStatus], loads: np.ndarray, cached: np.ndarray) -> int:
        """Return the position of the engine that costs least."""
        whole_s = self._prefill(request, 0)
        costs = [
            load + self._eviction_s(request, status.engine, tokens // self._page_tokens)
            + (self._prefill(request, tokens) if tokens else whole_s)
            for load, status, tokens in zip(loads.tolist(), engines, cached.tolist(), strict=True)
        ]  # fmt: skip
        return costs.index(min(costs))

    def _prefill(self, request: Request, cached_tokens: int) -> float:
        """Return the seconds to compute what is not cached of a prompt; its last token always is."""
        return self._seconds(min(cached_tokens, request.prompt_tokens - 1), request.prompt_tokens)

    def _eviction_s(self, request: Request, engine: int, cached_pages: int) -> float:
        """Return what it costs to drive out pages for the rest of a prompt, in seconds per request."""
        row, tokens = self._rows[engine], self._page_tokens
        requests, uses = int(self._window.requests[row]), self._window.uses[row]
        cost_s = 0.0
        for before, extents in self._sent.victims(engine, request.prompt_pages - cached_pages) if requests else ():
            pages = count_pages(extents)
            share = uses.total(extents) / pages / requests
            cost_s += self._seconds(before * tokens, (before + pages) * tokens) * share
        return cost_s

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self._window.sent(request, engine, self._prefill_s, now)
        self._sent.add(request.runs, engine, now)

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        self._has_begun.add(request.index)

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        if request.index in self._has_begun:
            self._has_begun.discard(request.index)
            self._window.answered(engine, request.output_tokens, now)

    def on_down(self, engine: int, now: float) -> None:
        if engine in self._draining:
            self._draining.discard(engine)
        else:
            self._window.lost(engine, now)
        self._sent.forget(engine)

    def on_draining(self, engine: int, now: float) -> None:
        self._draining.add(engine)


keep_types(Preble, balance_threshold=float | None)
