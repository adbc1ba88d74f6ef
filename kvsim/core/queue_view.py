"""Waiting requests, as a scheduling policy sees them."""

from collections.abc import Sequence

from kvsim.core.lease import LOOK
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier


class Waiting:
    """A request that waits to be admitted, for the first time or again after a retraction."""

    __slots__ = ("arrival_s", "cached", "cached_version", "entry", "generated", "place", "request", "was_running")

    def __init__(self, request: Request, arrival_s: float) -> None:
        self.request = request
        self.place = request.index, request.sample
        """Its place among all requests, in order of arrival."""
        self.arrival_s = arrival_s
        self.entry = -1
        """Number of its entry into the queue: requests that have begun to wait later have higher ones. -1: it does not wait."""
        self.was_running = False
        """Whether it waits again after a retraction."""
        self.generated = 0
        """Output tokens generated before it was retracted."""
        self.cached = 0, 0
        self.cached_version = -1
        """What ``Round`` has found of its prompt in the cache, and in which version of that."""

    def __repr__(self) -> str:
        return f"Waiting(request={self.request.index})"

    @property
    def target_tokens(self) -> int:
        """Tokens to compute, cached or not: those of the prompt and, after a retraction, of the answer so far."""
        return self.request.prompt_tokens + self.generated


class Round:
    """All waiting requests when an engine is about to admit some of them, and what its cache has of their prompts."""

    def __init__(self, waiting: Sequence[Waiting], cache: ServedCache, gpu: Tier, now: float) -> None:
        self.waiting = waiting
        """In the order in which the last round left them, requests that have begun to wait since then at the end."""
        self.now = now
        self._cache = cache
        self._gpu = gpu
        self._version = cache.version
        self._page_tokens = cache.page_tokens

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
        if waiting.cached_version != self._version:
            found = self._cache.match(waiting.request, self._gpu, LOOK)
            waiting.cached = found.gpu_pages, found.leading_pages
            waiting.cached_version = self._version
        return waiting.cached
