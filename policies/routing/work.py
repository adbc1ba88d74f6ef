"""What a router knows, without reports, of the work that it has sent to engines; a row of numbers for each engine."""

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from kvsim.core.request import Request
from kvsim.pages.extent_counts import PageCounts
from kvsim.policies.routing.base import EngineStatus

NOBODY: Final[dict[int, int]] = {}


class SentWork:
    """Requests that have not ended, and the tokens to compute of those that have not had their first token."""

    def __init__(self, engines: Sequence[int]) -> None:
        """``engines`` are the numbers of all that there are."""
        self._rows = {engine: row for row, engine in enumerate(engines)}
        self.requests = np.zeros(len(engines), np.int64)
        self.prefill_tokens = np.zeros(len(engines), np.int64)
        self._to_compute: dict[int, int] = {}
        """By request, the tokens that it had to compute when it was sent."""
        self._offered: Sequence[EngineStatus] = ()
        self.rows = np.zeros(0, np.int64)
        """The rows of the engines that were offered last."""
        self.places: dict[int, int] = {}
        """By number, where each of them stands among these."""

    def offer(self, engines: Sequence[EngineStatus]) -> None:
        """Take note of which engines a request is offered to."""
        if engines is not self._offered:
            self._offered = engines
            self.rows = np.array([self._rows[status.engine] for status in engines], np.int64)
            self.places = {status.engine: at for at, status in enumerate(engines)}

    def row(self, engine: int) -> int:
        """Return the row of an engine."""
        return self._rows[engine]

    def sent(self, request: Request, engine: int, tokens: int) -> None:
        """An engine has got a request, and has ``tokens`` tokens of its prompt to compute."""
        row = self._rows[engine]
        self.requests[row] += 1
        self.prefill_tokens[row] += tokens
        self._to_compute[request.index] = tokens

    def computed(self, request: Request, engine: int) -> None:
        """The prompt of a request is computed, or never will be."""
        self.prefill_tokens[self._rows[engine]] -= self._to_compute.pop(request.index, 0)

    def ended(self, request: Request, engine: int) -> None:
        """A request is with its engine no more."""
        self.computed(request, engine)
        self.requests[self._rows[engine]] -= 1


class PagesInUse:
    """Pages of the prompts of requests that have not ended, by engine."""

    def __init__(self, engines: Sequence[int]) -> None:
        self._counts = {engine: (row, PageCounts()) for row, engine in enumerate(engines)}
        self.different = np.zeros(len(engines), np.int64)
        """Pages that several requests of an engine share count once."""
        self.all = np.zeros(len(engines), np.int64)
        """They count for each."""
        self._users: dict[int, dict[int, int]] = {}
        """By first page of a prompt: how many requests with that page each engine has."""

    def users(self, request: Request) -> Collection[int]:
        """Return the engines that use the first page of a prompt."""
        return self._users.get(request.runs[0][0], NOBODY) if request.runs else NOBODY

    def leading(self, request: Request, engine: int) -> int:
        """Return how many leading pages of a prompt an engine uses already."""
        return self._counts[engine][1].leading(request.runs)

    def add(self, request: Request, engine: int) -> None:
        """An engine has got a request."""
        row, counts = self._counts[engine]
        counts.add(request.runs)
        self._note(request, engine, 1, row, counts.pages)

    def remove(self, request: Request, engine: int) -> None:
        """A request is with its engine no more."""
        row, counts = self._counts[engine]
        counts.remove(request.runs)
        self._note(request, engine, -1, row, counts.pages)

    def _note(self, request: Request, engine: int, count: int, row: int, pages: int) -> None:
        self.different[row] = pages
        self.all[row] += count * request.prompt_pages
        if request.runs:
            first = request.runs[0][0]
            users = self._users.setdefault(first, {})
            users[engine] = users.get(engine, 0) + count
            if not users[engine]:
                del users[engine]
                if not users:
                    del self._users[first]
