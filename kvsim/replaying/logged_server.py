"""A server that writes what it does to the event log."""

from typing import Any

from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Server
from kvsim.engine.event_log import EventLog, by_tier
from kvsim.replaying.server import PassingServer


class LoggedServer(PassingServer):
    """An engine's own cache that logs every request. Its transfers begin and end at once, before the request is admitted."""

    def __init__(self, server: Server, log: EventLog) -> None:
        super().__init__(server)
        self.log = log
        self._waiting: Request | None = None
        self._moved = (0, 0)

    def serve(self, request: Request, pages: int, now: float) -> Any:
        return self._log_served(request, pages, self.server.serve(request, pages, now))

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> Any:
        return self._log_served(request, in_all, self.server.begin(request, tokens, in_all, now))

    def _log_served(self, request: Request, pages: int, lease: Any) -> Any:
        """Log what has come of a request, and return its lease."""
        if lease is NEVER_FITS:
            return lease
        if lease is None:
            if request is not self._waiting:
                self.log.add("wait", request=request.index)
            self._waiting = request
            return None
        found = by_tier(lease.hits)
        self.log.add("match", request=request.index, prompt_pages=request.prompt_pages, **found)
        self._log_moves()
        self.log.add("admit", request=request.index, pages=pages, load_pages=sum(lease.hits[1:]))
        return lease

    def finish_request(self, lease: Any) -> None:
        self.server.finish_request(lease)
        self._log_moves()
        self.log.add("finish", request=lease.request.index)

    def preempt(self, lease: Any) -> bool:
        is_preempted = self.server.preempt(lease)
        if is_preempted:
            self.log.add("release", request=lease.request.index)
        return is_preempted

    def reset(self) -> None:
        self.server.reset()
        self.log.add("reset")

    def _log_moves(self) -> None:
        """Log what has moved between the two tiers since the last call."""
        if len(self.tiers) < 2:
            return
        upper, lower = self.tiers[0].name, self.tiers[1].name
        before, self._moved = self._moved, (self.counts.written_pages, self.counts.loaded_pages)
        for source, target, now, then in ((upper, lower, self._moved[0], before[0]), (lower, upper, self._moved[1], before[1])):
            if now > then:
                for event in ("swap_begin", "swap_end"):
                    ends = {"from": source, "to": target}
                    self.log.add(event, transfer=self.log.transfers, **ends, pages=now - then)
                self.log.transfers += 1
