"""Brings to the GPU what requests reuse of the tiers below it."""

from functools import partial

from simpy import Event

from kvsim.core.lease import Lease
from kvsim.core.serving import NO_LOAD, ServedCache
from kvsim.core.transfer import Transfer
from kvsim.engine.book import Book
from kvsim.engine.job import PREFILLING, Job
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import Prefetching


class Loading:
    """The loads of the requests on one engine. Records what they have hit."""

    def __init__(self, cache: ServedCache, mover: Mover, prefetching: Prefetching, *, engine: int, is_layerwise: bool) -> None:
        """``is_layerwise``: a step can follow a load that is under way, layer by layer."""
        self.env = mover.env
        self.cache = cache
        self.mover = mover
        self.prefetching = prefetching
        self.engine = engine
        self.is_layerwise = is_layerwise

    def start(self, job: Job, lease: Lease, book: Book) -> None:
        """Start the loads of a request that has its slots, and determine what is left to compute."""
        job.phase = PREFILLING
        job.times.has_pages(self.env.now)
        transfers, loads = self.cache.load(lease, self.env.now) if lease.has_load else NO_LOAD
        planned = {load: load.pages for load in loads}  # a load that begins late may be cut short
        self.cache.shorten_hit(lease, None, self.env.now)  # others' loads may have failed while it waited for its slots
        for transfer in transfers:
            if not transfer.goes_down:
                transfer.request = job.request
        self.mover.submit(transfers)
        job.loads, job.ready_loads = self.cache.arriving(lease), 0
        for load in job.loads:  # of other requests, too
            planned.setdefault(load, load.pages)
        for load, pages in planned.items():
            self.mover.end_of(load).callbacks.append(partial(self._loaded, job, lease, load, pages, book))
        if job.admissions == 1 and not job.request.sample:
            disk_pages = lease.loaded_disk_pages
            if job.prefetch is not None:
                disk_pages += self.prefetching.settle(job.prefetch, lease)
                job.prefetch = None
            if not job.is_counted:
                job.is_counted, job.counted = True, lease
                book.hit(job.request, (lease.gpu_pages, lease.loaded_pages - disk_pages, disk_pages), self.engine)
        reused = (lease.gpu_pages + lease.loaded_pages) * self.cache.page_tokens
        job.computed = min(reused, job.target_tokens - 1)

    def _loaded(self, job: Job, lease: Lease, load: Transfer, pages: int, book: Book, _: Event) -> None:
        """Shorten a request's hit by what a load of ``pages`` pages failed to bring; the request computes it."""
        if load.arrived_pages < pages and job.lease is lease:
            lost = self.cache.shorten_hit(lease, load, self.env.now)
            job.computed = max(0, job.computed - lost * self.cache.page_tokens)
            if job.counted is lease:
                book.unread(job.request, lost)

    def is_followed(self, job: Job) -> bool:
        """Whether a request's loads have arrived, or a step can follow them."""
        loads = job.loads
        while job.ready_loads < len(loads):
            load = loads[job.ready_loads]
            if not (load.done or self.is_layerwise and load.begun):
                return False
            job.ready_loads += 1
        return True
