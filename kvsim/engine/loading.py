"""Brings to the GPU what requests reuse of the tiers below it."""

from simpy import Event

from kvsim.core.lease import Lease
from kvsim.core.serving import Lower, ServedCache
from kvsim.core.transfer import Transfer
from kvsim.engine.book import Book
from kvsim.engine.job import PREFILLING, Job
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import Prefetching


class Expected:
    """A load that a request waits for."""

    __slots__ = ("book", "job", "lease", "load", "loading", "lower")

    def __init__(self, loading: "Loading", lower: Lower, job: Job, lease: Lease, load: Transfer, book: Book) -> None:
        self.loading = loading
        self.lower = lower
        self.job = job
        self.lease = lease
        self.load = load
        self.book = book

    def misses(self, _: Event) -> None:
        """The load has ended, and brought too little."""
        self.loading.misses(self.lower, self.job, self.lease, self.load, self.book)


class Loading:
    """The loads of the requests on one engine. Records what they have hit."""

    def __init__(self, cache: ServedCache, mover: Mover, prefetching: Prefetching, *, engine: int, is_layerwise: bool) -> None:
        """``is_layerwise``: a step follows a load that is under way, layer by layer, if the substrate can do that."""
        self.env = mover.env
        self.cache = cache
        self.lower = cache.lower
        self.mover = mover
        self.prefetching = prefetching
        self.engine = engine
        self.is_layerwise = is_layerwise

    def start(self, job: Job, lease: Lease, book: Book) -> None:
        """Start the loads of a request that has its slots, and determine what is left to compute."""
        job.phase = PREFILLING
        job.times.has_pages(self.env.now)
        job.loads, job.ready_loads = [], 0
        if self.lower is not None:
            self._load(self.lower, job, lease, book)
        again = self.cache.counts_last_admission and not job.is_prefilled
        if (job.admissions == 1 or again) and not job.request.sample:
            hits = self.prefetching.hits(lease, job.prefetch)
            job.prefetch = None
            if not job.is_counted or again and job.counted is not None:
                job.is_counted, job.counted = True, lease
                book.hit(job.request, hits, self.engine)
        if self.prefetching.kept is not None:
            self.prefetching.kept.admitted(job.request, lease.gpu_pages)
        reused = (lease.gpu_pages + lease.loaded_pages) * self.cache.page_tokens
        job.computed = min(reused, job.target_tokens - 1)

    def _load(self, lower: Lower, job: Job, lease: Lease, book: Book) -> None:
        """Start the loads of a request, and shorten its hit when one of them, or of those that it shares, ends too soon."""
        begun = lower.load(lease, self.env.now)
        planned = {load: load.pages for load in begun.loads}  # a load that begins late may be cut short
        for transfer in begun.transfers:
            if not transfer.goes_down:
                transfer.request = job.request
        self.mover.submit(begun.transfers)
        job.loads = lease.arriving()
        for load in job.loads:  # of other requests, too
            planned.setdefault(load, load.pages)
        for load, pages in planned.items():
            self.mover.expect(load, pages, Expected(self, lower, job, lease, load, book).misses)

    def misses(self, lower: Lower, job: Job, lease: Lease, load: Transfer, book: Book) -> None:
        """Shorten a request's hit by what a load failed to bring; the request computes it."""
        if job.lease is lease:
            lost = lower.load(lease, self.env.now, load).lost_pages
            job.computed = max(0, job.computed - lost * self.cache.page_tokens)
            if job.counted is lease:
                book.unread(job.request, lost)

    def gives_way(self) -> bool:
        """Let go of pages that are kept for requests that have not arrived. Returns whether there were any."""
        return self.prefetching.kept is not None and self.prefetching.kept.give_way()

    def is_followed(self, job: Job) -> bool:
        """Whether a request's loads have arrived, or a step can follow them."""
        loads = job.loads
        while job.ready_loads < len(loads):
            load = loads[job.ready_loads]
            if not (load.done or self.is_layerwise and load.begun and self.mover.substrate.follows(load)):
                return False
            job.ready_loads += 1
        return True
