"""The requests of one engine that are not admitted: their prefetches, and the queue."""

from collections.abc import Callable
from math import inf

from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier
from kvsim.engine.job import ENDED, FETCHING, NEW, QUEUED, Job
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import Prefetch, Prefetching
from kvsim.engine.queue import JobQueue


class WaitingRequests:
    """Requests that wait for pages of one GPU tier: in the queue or, before that, for what is fetched for them."""

    def __init__(
        self,
        cache: ServedCache,
        gpu: Tier,
        mover: Mover,
        prefetching: Prefetching,
        queue: JobQueue,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called when a request has joined the queue."""
        self.env = mover.env
        self.cache = cache
        self.gpu = gpu
        self.mover = mover
        self.prefetching = prefetching
        self.queue = queue
        self.fetching: dict[Job, None] = {}
        """Those that wait for their prefetch and are not queued yet."""
        self.waited_s = 0.0
        """Sum of the times that requests were in the queue."""
        self.most_queued = 0
        self._wake = wake
        self._can_fetch = cache.lower is not None and cache.lower.views[gpu.index].fetches_to is not None
        prefetching.queued_s = mover.substrate.queued_s

    def start(self, job: Job) -> None:
        """Start a request's prefetch, if it gets one, or queue it."""
        self.cache.arrives(job.request, self.env.now)
        if self._can_fetch:
            self._prefetch(job)
        if job.prefetch is None:
            self._enqueue(job)

    def departs(self, request: Request) -> None:
        """A request that has arrived will not finish on this engine."""
        self.cache.residency.tell_departure(request, self.env.now, self.gpu)

    def start_samples(self, job: Job) -> None:
        """Queue the other samples of a request whose first one has computed the prompt: all count as one use of its pages."""
        for request in job.request.other_samples():
            sample = Job(request, job.arrival_s)
            sample.is_known = True
            self._enqueue(sample)

    def _prefetch(self, job: Job) -> None:
        """Start the job's prefetch if the policy wants one. The job is queued when that ends or has lasted long enough."""
        lease = self.cache.match(job.request, self.gpu)
        prefetch = self.prefetching.start(lease, self.env.now) if lease.far_pages else None
        if prefetch is None:
            return
        job.prefetch, job.phase = prefetch, FETCHING
        self.fetching[job] = None
        prefetch.fetch.request = job.request
        self.mover.submit(prefetch.transfers)
        self.mover.end_of(prefetch.fetch).callbacks.append(lambda _: self._fetched(job, prefetch))
        wait_s = self.prefetching.wait_s(prefetch.pages * self.cache.page_tokens)
        if wait_s < inf:
            self.env.timeout(wait_s).callbacks.append(lambda _: self._enqueue(job))

    def _fetched(self, job: Job, prefetch: Prefetch) -> None:
        self.prefetching.end(prefetch)
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        if job.phase in (NEW, FETCHING):
            self.fetching.pop(job, None)
            self.push(job)
            self._wake()

    def push(self, job: Job) -> None:
        """Queue a request that waits again after a retraction, or for the first time."""
        job.times.queued_at_s = self.env.now
        self.queue.push(job)
        self.mover.awaiting[self.gpu.owner] = None
        self.most_queued = max(self.most_queued, len(self.queue))

    def leave_queue(self, job: Job) -> None:
        """Take a request out of the queue, and record how long it was there."""
        self.queue.remove(job)
        self.waited_s += self.env.now - job.times.queued_at_s

    def reject(self, job: Job) -> None:
        """Take a request out of the queue that could not run even alone, and give up what was fetched for it."""
        self.queue.remove(job)
        job.phase = ENDED
        if job.prefetch is not None:
            self.prefetching.give_up(job.prefetch)

    def drop(self, job: Job) -> None:
        """Take out a request wherever it is, if it waits here, and give up what is fetched for it."""
        if job.phase == QUEUED:
            self.leave_queue(job)
        self.fetching.pop(job, None)
        if job.prefetch is not None:
            if job.prefetch.is_under_way:
                self.mover.cancel(job.prefetch.fetch)
            self.prefetching.give_up(job.prefetch)
            job.prefetch = None
