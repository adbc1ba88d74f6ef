"""A cluster whose requests are not known before they arrive."""

from collections.abc import Callable
from math import nan

from kvsim.cluster.cluster import Cluster
from kvsim.core.request import Request, Reset
from kvsim.engine.columns import COLUMNS
from kvsim.engine.job import Job
from kvsim.engine.outcome import REJECTED


class LiveCluster(Cluster):
    """Serves what arrives until nobody wants it any more: it is never done. Whoever drives it lets ``env`` run.

    ``on_first_token`` and ``on_end`` are called with a request's number at the time of the event.
    """

    on_first_token: Callable[[int], None]
    on_end: Callable[[int], None]

    def open(self) -> None:
        """Begin: the clock is about to start."""
        self.start([])
        self._unfinished, self.is_done = 1, False  # one request, which never comes, keeps the engines up

    @property
    def unfinished(self) -> int:
        """The number of requests that have arrived and not ended."""
        return self._unfinished - 1

    def arrive(self, request: Request) -> None:
        """Take a request that arrives now; it gets its number here. Nothing else may happen to be going on in ``env``."""
        request.index, request.arrival_s = len(self.book.requests), self.env.now
        self.book.requests.append(request)
        for column in COLUMNS:
            if column.is_recorded:
                self.book.columns[column.name].append(() if column.is_by_tier else column.missing)
        self._unfinished += 1
        self._arrive(request)

    def is_rejected(self, number: int) -> bool:
        """Whether a request could not run even alone."""
        return bool(self.book.columns["status"][number] == REJECTED)

    def hit_pages(self, number: int) -> tuple[int, ...]:
        """Return the pages that a request has hit so far, by tier from the top down; () before it is admitted."""
        return tuple(self.book.columns["hit_pages"][number])

    def queued_s(self, number: int) -> float:
        """Return how long a request has waited in queues until its prompt was computed; nan before."""
        return float(self.book.columns["queue_s"][number])

    def empty(self) -> bool:
        """Drop all pages if no request is under way. Returns whether it did."""
        if self.unfinished:
            return False
        self._reset(Reset("now", nan))
        return True

    def ended(self, request: Request, engine: int) -> None:
        super().ended(request, engine)
        self.on_end(request.index)

    def first_token(self, job: Job, engine: int) -> None:
        super().first_token(job, engine)
        self.on_first_token(job.request.index)
