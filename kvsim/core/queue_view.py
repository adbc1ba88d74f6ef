"""Waiting requests, as a scheduling policy sees them."""

from collections.abc import Sequence
from typing import cast

from kvsim.core.lease import LOOK
from kvsim.core.prompt_index import Changed, Prompt
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier

Place = tuple[float, int, int]
"""(time of arrival, index of the request, its sample): the order of arrival."""


class Waiting(Prompt):
    """A request that waits to be admitted, for the first time or again after a retraction."""

    __slots__ = ("arrival_s", "cached", "cached_version", "entry", "generated", "place", "request", "was_running")

    def __init__(self, request: Request, arrival_s: float) -> None:
        super().__init__()
        self.request = request
        self.place = arrival_s, request.index, request.sample
        """Its place among all requests: in order of arrival, which in closed loops is not that of the trace."""
        self.arrival_s = arrival_s
        self.entry = -1
        """Number of its entry into the queue: requests that have begun to wait later have higher ones. -1: it does not wait."""
        self.was_running = False
        """Whether it waits again after a retraction."""
        self.generated = 0
        """Output tokens generated before it was retracted."""
        self.cached = 0, 0
        self.cached_version = -1
        """What ``LookUps`` has found of its prompt in the cache, and in which version of that; -1: it has not looked."""

    def __repr__(self) -> str:
        return f"Waiting(request={self.request.index})"

    @property
    def target_tokens(self) -> int:
        """Tokens to compute, cached or not: those of the prompt and, after a retraction, of the answer so far."""
        return self.request.prompt_tokens + self.generated


class LookUps:
    """What a cache has of the prompts of an engine's waiting requests.

    A request is looked up when a policy first asks, and again only when its answer may have changed: where the cache can tell
    (``ServedCache.index_prompts``), once a page of the prompt has come, gone or moved; otherwise, once anything has changed.
    """

    def __init__(self, cache: ServedCache, gpu: Tier) -> None:
        self._cache = cache
        self._gpu = gpu
        self._page_tokens = cache.page_tokens
        self._index = cache.index_prompts()
        self._changed: Changed = []
        """Requests that are to be looked up again."""
        self._version = -1 if self._index is None else 0
        """The version of a cache that cannot tell of which prompts it has more or less."""

    def begin_round(self) -> list[Waiting] | None:
        """Take note that a policy is about to ask about the cache as it is now.

        Returns the requests whose answers may have changed since the last call, some of which may wait no more; None: any.
        """
        if self._index is not None:
            changed = cast(list[Waiting], self._changed.copy())
            self._changed.clear()
            return changed
        is_same = self._version == self._cache.version
        self._version = self._cache.version
        return [] if is_same else None

    def forget(self, waiting: Waiting) -> None:
        """Take note that a request waits no more."""
        if waiting.cached_version >= 0:
            waiting.cached_version = -1
            waiting.is_current = False
            if self._index is not None:
                self._index.remove(waiting)

    def gpu_pages(self, waiting: Waiting) -> int:
        """Return how many leading pages of the prompt are on the engine's GPU, or arriving there."""
        return self._found(waiting)[0]

    def gpu_tokens(self, waiting: Waiting) -> int:
        """Return the tokens of these pages."""
        return self._found(waiting)[0] * self._page_tokens

    def cached_tokens(self, waiting: Waiting) -> int:
        """Return how many leading tokens of the prompt are on the GPU or, after these, in the tier below it."""
        on_gpu, below = self._found(waiting)
        return (on_gpu + below) * self._page_tokens

    def _found(self, waiting: Waiting) -> tuple[int, int]:
        if not waiting.is_current or waiting.cached_version != self._version:
            found = self._cache.match(waiting.request, self._gpu, LOOK)
            waiting.cached = found.gpu_pages, found.leading_pages
            waiting.is_current = True
            if self._index is not None and waiting.cached_version < 0:
                waiting.extents = self._cache.looked_up(waiting.request)
                self._index.add(waiting, self._changed)
            waiting.cached_version = self._version
        return waiting.cached


class Round:
    """All waiting requests when an engine is about to admit some of them, and what its cache has of their prompts."""

    def __init__(self, waiting: Sequence[Waiting], look_ups: LookUps, now: float) -> None:
        self.waiting = waiting
        """In the order in which the last round left them, requests that have begun to wait since then at the end."""
        self.now = now
        self.look_ups = look_ups
        """What the cache has of the prompts: what the methods of a round return."""

    def gpu_pages(self, waiting: Waiting) -> int:
        """Return how many leading pages of the prompt are on the engine's GPU, or arriving there."""
        return self.look_ups.gpu_pages(waiting)

    def gpu_tokens(self, waiting: Waiting) -> int:
        """Return the tokens of these pages."""
        return self.look_ups.gpu_tokens(waiting)

    def cached_tokens(self, waiting: Waiting) -> int:
        """Return how many leading tokens of the prompt are on the GPU or, after these, in the tier below it."""
        return self.look_ups.cached_tokens(waiting)
