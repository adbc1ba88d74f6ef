"""Replay of requests in the order in which a real engine admitted them, with the overlaps that they had there."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Hits, Server
from kvsim.engine.outcome import Outcome
from kvsim.replaying.replay import Replay
from kvsim.replaying.settings import ReplaySettings

ENDED, COMPUTED, GROWN, ADMITTED = 0, 1, 2, 3
"""What happens to a request, in the order in which it takes effect if several things happen at the same time."""
Event = tuple[float, int, int, int]
"""Time, what happens, the request, and a number: of computed tokens, or of pages."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When things happened to each request, in seconds. A request that has no time of admission is not played."""

    admitted_s: npt.NDArray[np.float64]
    tokens_s: Sequence[npt.NDArray[np.float64]]
    """When each token of its answer was there; with the first one, its prompt is computed, and with the last one, it ends."""


class ObservedReplay(Replay):
    """Plays requests by the moments of a real run. Transfers take no time.

    admitted   it is looked up, and takes the pages of its prompt; the first chunk of that begins
    computed   a chunk of its prompt ends, and the next one begins: chunks take the time until the first token evenly
    grown      its answer takes the next page, when the token before that page is there; vLLM then finds the pages before it
    ended      all of its answer can be found, if answers are cached, and its pages can be evicted

    A request for which there is no room must have found some: the engine knows of an end before its client does. So the running
    request that ends next ends early.
    """

    def __init__(self, server: Server, settings: ReplaySettings, chunk_tokens: int) -> None:
        """``chunk_tokens`` are those of a prompt that one step computes."""
        super().__init__(server, settings)
        self.chunk_tokens = chunk_tokens
        self.now_s = 0.0
        """The time of what happens now."""

    def run_observed(self, requests: list[Request], moments: Moments) -> Outcome:
        """Play the requests; those that are not played, or can never fit, are rejected."""
        began = perf_counter()
        self._requests, self._moments = requests, moments
        self._running: dict[int, Any] = {}
        self._computed: dict[int, int] = {}
        """By running request, how many tokens of its prompt have been computed."""
        self._events: list[Event] = [
            (at_s, ADMITTED, number, 0) for number, at_s in enumerate(moments.admitted_s.tolist()) if at_s == at_s
        ]
        heapify(self._events)
        rows: list[Hits | None] = [None] * len(requests)
        while self._events:
            now, what, number, amount = heappop(self._events)
            self.now_s = now
            if what == ADMITTED:
                rows[number] = self._admit(number, now)
            elif number in self._running:
                if what == ENDED:
                    self._end(number)
                elif what == COMPUTED:
                    self._compute(number, amount)
                else:
                    self._grow(number, amount)
        return self._outcome(requests, rows, perf_counter() - began)

    def _admit(self, number: int, now: float) -> Hits | None:
        """Admit a request, and note what will happen to it. Returns its hits; None if it can never fit."""
        request, page_tokens, tokens = self._requests[number], self.server.page_tokens, len(self._moments.tokens_s[number])
        pages = request.pages_for(request.prompt_tokens, page_tokens)
        in_all = request.pages_for(request.prompt_tokens + tokens - 1, page_tokens)
        if in_all > self.server.tiers[0].pool.capacity:
            return None
        while (lease := self.server.begin(request, pages, in_all, now)) is None and self._end_next():
            pass
        if lease is None or lease is NEVER_FITS:
            return None
        hits: Hits = lease.hits
        self._running[number], self._computed[number] = lease, sum(hits) * page_tokens
        self.server.begin_chunk(lease, self._chunk_end(number))
        self._expect(number, now)
        return hits

    def _expect(self, number: int, now: float) -> None:
        """Note what will happen to a request that is admitted now. The KV of an answer's last token is never computed."""
        request, page_tokens, tokens_s = self._requests[number], self.server.page_tokens, self._moments.tokens_s[number]
        prompt, done = request.prompt_tokens, self._computed[number]
        ends, first_s = [*range(done + self.chunk_tokens, prompt, self.chunk_tokens), prompt], max(now, float(tokens_s[0]))
        for end in ends:
            at_s = now + (first_s - now) * (end - done) / (prompt - done) if end < prompt else first_s
            heappush(self._events, (at_s, COMPUTED, number, end))
        first = -(-prompt // page_tokens) * page_tokens
        for position in range(first, prompt + len(tokens_s) - 1, page_tokens):
            at_s = max(now, float(tokens_s[position - prompt]))
            heappush(self._events, (at_s, GROWN, number, position // page_tokens + 1))
        heappush(self._events, (max(now, float(tokens_s[-1])), ENDED, number, 0))

    def _chunk_end(self, number: int) -> int:
        """Return the token up to which the next chunk of a prompt goes."""
        return min(self._computed[number] + self.chunk_tokens, self._requests[number].prompt_tokens)

    def _compute(self, number: int, tokens: int) -> None:
        """End a chunk of a prompt, and begin the next one."""
        lease = self._running[number]
        self.server.end_chunk(lease, tokens)
        self._computed[number] = tokens
        if tokens < self._requests[number].prompt_tokens:
            self.server.begin_chunk(lease, self._chunk_end(number))

    def _grow(self, number: int, pages: int) -> None:
        while not self.server.grow(self._running[number], pages) and self._end_next(but=number):
            pass

    def _end_next(self, but: int = -1) -> bool:
        """End the running request that ends next, other than ``but``. Returns False if there is none."""
        others = [number for number in self._running if number != but]
        if others:
            self._end(min(others, key=lambda number: float(self._moments.tokens_s[number][-1])))
        return bool(others)

    def _end(self, number: int) -> None:
        """End a request, and what is left of its prompt before."""
        while self._computed[number] < self._requests[number].prompt_tokens:
            self._compute(number, self._chunk_end(number))
        del self._computed[number]
        self.server.finish_request(self._running.pop(number))
