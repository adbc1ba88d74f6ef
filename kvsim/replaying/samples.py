"""Requests for several samples, in a replay: one answer after another finds the prompt that the first one has computed."""

from typing import Any

from kvsim.core.fan_out import FanOut
from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Hits, Server
from kvsim.replaying.server import PassingServer


class SampleLease:
    """The leases of all samples of a request."""

    __slots__ = ("hits", "leases")

    def __init__(self, hits: Hits, leases: list[Any]) -> None:
        self.hits = hits
        """Those of the first request; the others find its pages, which are no hits."""
        self.leases = leases


class SampleServer(PassingServer):
    """Serves each sample as a request of its own; all end together.

    together    a request that finds room for some of its samples keeps that and continues from there. One whose prompt and
                answers exceed the GPU tier is rejected
    apart       if no other request runs, a sample without room waits until the oldest one before it has ended
    warm-up     ends before the samples begin
    """

    def __init__(self, server: Server, samples: FanOut) -> None:
        super().__init__(server)
        self.samples = samples
        self._request: Request | None = None
        """A request with samples that have found no room yet."""
        self._left: list[Request] = []
        self._then: list[Request] = []
        """Its requests that begin when those before them have ended."""
        self._hits: Hits = ()
        self._leases: list[Any] = []
        self._others = 0
        """Requests that run beside it."""

    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request whose samples take ``pages`` pages each, including those that they share."""
        if self._request is not request:
            self._give_up()
            if not self._fits(request, pages):
                return NEVER_FITS
            self._begin(request)
        while self._left or self._then:
            if not self._left:
                self._end_leases()
                self._left, self._then = self._then, []
            lease = self.server.serve(self._left[0], self._pages(self._left[0], pages), now)
            if lease is None and self.samples.are_apart and self._leases and not self._others:
                self.server.finish_request(self._leases.pop(0))
            elif lease is None or lease is NEVER_FITS:
                return lease
            else:
                self._left.pop(0)
                self._leases.append(lease)
                self._hits = self._hits or lease.hits
        leases, self._leases, self._request = self._leases, [], None
        self._others += 1
        return SampleLease(self._hits, leases)

    def _fits(self, request: Request, pages: int) -> bool:
        """Whether there is room for all samples of a request that must have room together."""
        is_one = self.samples.are_apart or request.samples == 1
        return is_one or self.samples.pages(request, pages, self.page_tokens) <= self.tiers[0].pool.capacity

    def _begin(self, request: Request) -> None:
        first = self.samples.first(request)
        self._request, self._hits = request, ()
        self._left = first if self.samples.are_apart else [request, *request.other_samples()]
        self._then = self.samples.then(request)

    def _pages(self, request: Request, pages: int) -> int:
        """Return how many of the pages of a sample one of its requests takes."""
        return pages if request.samples else min(pages, request.pages_for(request.prompt_tokens, self.page_tokens))

    def _give_up(self) -> None:
        """End the samples of a request that was rejected since others found no room."""
        self._end_leases()
        self._request = None

    def _end_leases(self) -> None:
        for lease in self._leases:
            self.server.finish_request(lease)
        self._leases = []

    def finish_request(self, lease: SampleLease) -> None:
        """End all samples."""
        self._others -= 1
        for each in lease.leases:
            self.server.finish_request(each)

    # --- the moments of a request with one answer; one with several has everything done at its first -------------------------

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> Any:
        if request.samples != 1:
            return self.serve(request, in_all, now)
        lease = self.server.begin(request, tokens, in_all, now)
        if lease is None or lease is NEVER_FITS:
            return lease
        self._others += 1
        return SampleLease(lease.hits, [lease])

    def is_loading(self, lease: SampleLease) -> bool:
        return any(self.server.is_loading(each) for each in lease.leases)

    def begin_chunk(self, lease: SampleLease, tokens: int) -> bool:
        return len(lease.leases) > 1 or self.server.begin_chunk(lease.leases[0], tokens)

    def end_chunk(self, lease: SampleLease, tokens: int) -> None:
        if len(lease.leases) == 1:
            self.server.end_chunk(lease.leases[0], tokens)

    def grow(self, lease: SampleLease, pages: int, full_pages: int) -> bool:
        return len(lease.leases) > 1 or self.server.grow(lease.leases[0], pages, full_pages)

    def preempt(self, lease: SampleLease) -> bool:
        if len(lease.leases) > 1 or not self.server.preempt(lease.leases[0]):
            return False
        self._others -= 1
        return True
