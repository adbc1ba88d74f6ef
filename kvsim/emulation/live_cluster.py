"""A cluster whose requests are not known before they arrive, and are forgotten when they have ended."""

from collections.abc import Callable
from math import nan

from kvsim.cluster.cluster import Cluster
from kvsim.cluster.landings import Landings
from kvsim.core.request import Request, Reset
from kvsim.engine.job import Job
from kvsim.engine.outcome import REJECTED, SHED


class LiveCluster(Cluster):
    """Serves what arrives until nobody wants it any more: it is never done. Whoever drives it lets ``env`` run.

    ``on_first_token`` and ``on_end`` are called with a request's number at the time of the event; after ``on_end``, nothing is
    known of the request any more.
    """

    on_first_token: Callable[[int], None]
    on_end: Callable[[int], None]

    def open(self) -> None:
        """Begin: the clock is about to start."""
        self.start([])
        self._unfinished, self.is_done = 1, False  # one request, which never comes, keeps the engines up
        self.book.keep_rows()
        for mover in dict.fromkeys([engine.mover for engine in self.engines]):
            mover.watches[:] = [watch for watch in mover.watches if not isinstance(watch, Landings)]
        self._arrived = 0
        self._jobs: dict[int, Job] = {}
        """What engines know requests as that have not ended."""
        self._given_up: set[int] = set()
        """Requests that were aborted before an engine has heard of them."""

    @property
    def unfinished(self) -> int:
        """The number of requests that have arrived and not ended."""
        return self._unfinished - 1

    @property
    def running(self) -> int:
        """The number of requests that are admitted."""
        return min(self.unfinished, sum(len(engine.schedule) for engine in self.engines))

    def arrive(self, request: Request) -> None:
        """Take a request that arrives now; it gets its number here. Nothing else may happen to be going on in ``env``."""
        request.index, request.arrival_s = self._arrived, self.env.now
        self._arrived += 1
        self.book.add(request.index)
        self._unfinished += 1
        self._arrive(request)

    def is_rejected(self, number: int) -> bool:
        """Whether a request could not run even alone."""
        return bool(self.book.columns["status"][number] == REJECTED)

    def is_shed(self, number: int) -> bool:
        """Whether the admission policy has refused a request."""
        return bool(self.book.columns["status"][number] == SHED)

    def hit_pages(self, number: int) -> tuple[int, ...]:
        """Return the pages that a request has hit so far, by tier from the top down; () before it is admitted."""
        return tuple(self.book.columns["hit_pages"][number])

    def queued_s(self, number: int) -> float:
        """Return how long a request has waited in queues until its prompt was computed; nan before."""
        return float(self.book.columns["queue_s"][number])

    def retractions(self, number: int) -> int:
        """Return how often a request has had to give its pages back so far."""
        return int(self.book.columns["retractions"][number])

    def abort(self, number: int) -> None:
        """End a request early, since nobody waits for its answer: now, when its engine hears of it, or when the step that
        computes it has ended. It must not have ended."""
        job = self._jobs.get(number)
        if job is None:
            self._given_up.add(number)
        elif job in self._homeless:
            self._homeless.remove(job)
            self.ended(job.request, 0)
        else:
            engine = self.engine_of(job)
            assert engine is not None
            engine.abort(job)

    def empty(self) -> bool:
        """Drop all pages if no request is under way. Returns whether it did."""
        if self.unfinished:
            return False
        self._resets.reset(Reset("now", nan))
        return True

    def _deliver(self, job: Job) -> None:
        index = job.request.index
        if index in self._given_up:
            self._given_up.discard(index)
            self.ended(job.request, 0)
            return
        self._jobs[index] = job
        super()._deliver(job)

    def resend(self, job: Job) -> None:
        self._jobs[job.request.index] = job
        super().resend(job)

    def ended(self, request: Request, engine: int) -> None:
        before = self._unfinished
        super().ended(request, engine)
        if self._unfinished == before:  # other samples of it have not
            return
        self.on_end(request.index)
        self._jobs.pop(request.index, None)
        self.book.forget(request.index)
        for cache in self.caches:
            if (known := cache.pages_known()) is not None:
                known.pop(request.index, None)

    def first_token(self, job: Job, engine: int) -> None:
        super().first_token(job, engine)
        self.on_first_token(job.request.index)
