"""Shows a replay step by step: after each request is served, and after each has finished."""

from collections.abc import Callable
from typing import Any

from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Server
from kvsim.replaying.server import PassingServer


class SteppedServer(PassingServer):
    """Shows what another server does."""

    def __init__(self, server: Server, show: Callable[[str], None]) -> None:
        super().__init__(server)
        self.show = show
        self._served: dict[Any, Request] = {}

    def serve(self, request: Request, pages: int, now: float) -> Any:
        return self._show_served(request, self.server.serve(request, pages, now))

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> Any:
        return self._show_served(request, self.server.begin(request, tokens, in_all, now))

    def _show_served(self, request: Request, lease: Any) -> Any:
        """Show what has come of a request, and return its lease."""
        if lease is None or lease is NEVER_FITS:
            self.show(f"no room for request {request.index}")
        else:
            self._served[lease] = request
            self.show(f"request {request.index} runs, {sum(lease.hits):,} of its {request.prompt_pages:,} pages hit")
        return lease

    def finish_request(self, lease: Any) -> None:
        self.server.finish_request(lease)
        self.show(f"request {self._served.pop(lease).index} has finished")

    def preempt(self, lease: Any) -> bool:
        is_preempted = self.server.preempt(lease)
        if is_preempted:
            self.show(f"request {self._served.pop(lease).index} is preempted")
        return is_preempted
