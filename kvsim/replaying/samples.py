"""Requests for several samples, in a replay: one answer after another finds the prompt that the first one has computed."""

from typing import Any

from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Hits, Server
from kvsim.replaying.server import PassingServer


class SampleLease:
    """The leases of all samples of a request."""

    __slots__ = ("hits", "leases")

    def __init__(self, hits: Hits, leases: list[Any]) -> None:
        self.hits = hits
        """Those of the first sample; the others find its pages, which are no hits."""
        self.leases = leases


class SampleServer(PassingServer):
    """Serves each sample as a request of its own; all end together.

    A request that finds room for some of its samples keeps that and continues from there. One whose prompt and answers exceed
    the GPU tier is rejected.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._request: Request | None = None
        """A request with samples that have found no room yet."""
        self._left: list[Request] = []
        self._leases: list[Any] = []

    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request whose samples take ``pages`` pages each, including those that they share."""
        if self._request is not request:
            self._give_up()
            if request.samples > 1 and request.pages_with_all(pages, self.page_tokens) > self.tiers[0].pool.capacity:
                return NEVER_FITS
            self._request, self._left = request, [request, *request.other_samples()]
        while self._left:
            lease = self.server.serve(self._left[0], pages, now)
            if lease is None:
                return None
            self._left.pop(0)
            self._leases.append(lease)
        leases, self._leases, self._request = self._leases, [], None
        return SampleLease(leases[0].hits, leases)

    def _give_up(self) -> None:
        """End the samples of a request that was rejected since others found no room."""
        for lease in self._leases:
            self.server.finish_request(lease)
        self._request, self._leases = None, []

    def finish_request(self, lease: SampleLease) -> None:
        """End all samples."""
        for each in lease.leases:
            self.server.finish_request(each)
