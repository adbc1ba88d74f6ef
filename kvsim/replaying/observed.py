"""Replay of requests in the order in which a real engine admitted them, with the overlaps that they had there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Hits
from kvsim.engine.outcome import Outcome
from kvsim.replaying.replay import Replay

ENDED, COMPUTED, GROWN, ADMITTED = range(4)
"""What happens to a request, in the order in which it takes effect if several things happen at the same time."""
Event = tuple[float, int, int, int]
"""Time, what happens, the request, and the pages that it then has."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When things happened to each request, in seconds. A request that has no time of admission is not played."""

    admitted_s: npt.NDArray[np.float64]
    tokens_s: Sequence[npt.NDArray[np.float64]]
    """When each token of its answer was there; with the first one, its prompt is computed, and with the last one, it ends."""


class ObservedReplay(Replay):
    """Plays requests by the moments of a real run. Transfers take no time.

    admitted   it is looked up, and takes the pages of its prompt
    computed   its prompt can be found, where that is not so from its admission on
    grown      its answer takes the next page, when the token before that page is there
    ended      its answer can be found, if answers are cached, and its pages can be evicted

    A request for which there is no room must have found some: the engine knows of an end before its client does. So the running
    request that ends next ends early.
    """

    def run_observed(self, requests: list[Request], moments: Moments) -> Outcome:
        """Play the requests; those that are not played, or can never fit, are rejected."""
        began = perf_counter()
        self._requests, self._moments = requests, moments
        self._running: dict[int, Any] = {}
        self._uncomputed: set[int] = set()
        rows: list[Hits | None] = [None] * len(requests)
        for now, what, number, pages in sorted(self._events()):
            if what == ADMITTED:
                rows[number] = self._admit(number, pages, now)
            elif (lease := self._running.get(number)) is not None:
                if what == ENDED:
                    self._end(number)
                elif what == COMPUTED:
                    self._compute(number)
                else:
                    self._grow(number, lease, pages)
        return self._outcome(requests, rows, perf_counter() - began)

    def _events(self) -> Iterator[Event]:
        for number, (request, admitted_s, tokens_s) in enumerate(
            zip(self._requests, self._moments.admitted_s.tolist(), self._moments.tokens_s, strict=True)
        ):
            if np.isnan(admitted_s):
                continue
            yield admitted_s, ADMITTED, number, request.pages_for(request.prompt_tokens, self.server.page_tokens)
            for time_s, what, pages in self._later(request, tokens_s.tolist()):
                if time_s > admitted_s:
                    yield time_s, what, number, pages

    def _later(self, request: Request, tokens_s: list[float]) -> Iterator[tuple[float, int, int]]:
        """Yield what happens to a request after its admission. The KV of an answer's last token is never computed."""
        page_tokens, prompt = self.server.page_tokens, request.prompt_tokens
        yield tokens_s[0], COMPUTED, 0
        yield tokens_s[-1], ENDED, 0
        first = -(-prompt // page_tokens) * page_tokens
        for position in range(first, prompt + len(tokens_s) - 1, page_tokens):
            yield tokens_s[position - prompt], GROWN, position // page_tokens + 1

    def _admit(self, number: int, pages: int, now: float) -> Hits | None:
        """Admit a request. What happened to it by then, happens at once."""
        request, tokens_s = self._requests[number], self._moments.tokens_s[number].tolist()
        in_all = request.pages_for(request.prompt_tokens + len(tokens_s) - 1, self.server.page_tokens)
        if in_all > self.server.tiers[0].pool.capacity:
            return None
        while (lease := self.server.begin(request, pages, in_all, now)) is None and self._end_next():
            pass
        if lease is None or lease is NEVER_FITS:
            return None
        self._running[number] = lease
        self._uncomputed.add(number)
        hits: Hits = lease.hits
        for time_s, what, more in sorted(self._later(request, tokens_s), key=lambda event: event[:2]):
            if time_s <= now and what == COMPUTED:
                self._compute(number)
            elif time_s <= now and what == GROWN:
                self._grow(number, lease, more)
        if tokens_s[-1] <= now:
            self._end(number)
        return hits

    def _grow(self, number: int, lease: Any, pages: int) -> None:
        while not self.server.grow(lease, pages) and self._end_next(but=number):
            pass

    def _end_next(self, but: int = -1) -> bool:
        """End the running request that ends next, other than ``but``. Returns False if there is none."""
        others = [number for number in self._running if number != but]
        if others:
            self._end(min(others, key=lambda number: float(self._moments.tokens_s[number][-1])))
        return bool(others)

    def _compute(self, number: int) -> None:
        if number in self._uncomputed:
            self._uncomputed.remove(number)
            self.server.computed(self._running[number])

    def _end(self, number: int) -> None:
        self._compute(number)
        self.server.finish_request(self._running.pop(number))
