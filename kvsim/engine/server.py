"""What replay plays requests against if there are several tiers."""

from kvsim.core.alone import AloneOnGpu
from kvsim.core.cache import Lease, TieredCache
from kvsim.core.instant import InstantCache
from kvsim.core.request import Request
from kvsim.core.serving import Hits
from kvsim.core.transfer import Transfer
from kvsim.engine.prefetching import Prefetching


class TieredServer:
    """Serves requests from a cache by the calls that the engine makes; every transfer ends at once."""

    def __init__(self, cache: TieredCache, prefetching: Prefetching, *, in_one_pass: bool = True) -> None:
        self.cache = cache
        self.prefetching = prefetching
        self._alone = AloneOnGpu(cache) if in_one_pass and isinstance(cache, InstantCache) and AloneOnGpu.suits(cache) else None
        self._waiting: tuple[Request | None, int, int] = None, 0, 0
        """A request without room, where the fetch for it began, and how many pages that brought."""

    def serve(self, request: Request, pages: int, now: float, match: Lease | None = None) -> Lease | None:
        cache, load_pages = self.cache, 0
        lease = match or cache.match(request)
        waiting, first_page, fetched_pages = self._waiting
        if waiting is request:
            self.prefetching.waste(-fetched_pages)
        else:
            fetched_pages = 0
            if lease.disk_pages and (transfers := self.prefetching.start(lease, now)) is not None:
                first_page = lease.gpu_pages + lease.leading_cpu_pages
                fetched_pages = self._prefetch(transfers, now)
                lease = cache.match(request)
        if lease.cpu_pages or lease.disk_pages:
            load_pages = self.prefetching.pages_to_load(lease)
        if not cache.admit(lease, pages, now, load_pages):
            self.prefetching.waste(fetched_pages)
            self._waiting = request, first_page, fetched_pages
            return None
        lease.hits = self._run(lease, first_page, fetched_pages, now)
        return lease

    def serve_alone(self, request: Request, pages: int, now: float) -> Hits | None:
        """As ``serve`` and at once ``finish_request``, while no other request runs. Returns the hit pages; None without room."""
        match: Lease | None = None
        if self._alone is not None:
            served = self._alone.serve(request, pages, now)
            if isinstance(served, int):
                return served, 0, 0
            match = served
        lease = self.serve(request, pages, now, match)
        if lease is None:
            return None
        self.finish_request(lease)
        return lease.hits

    def finish_request(self, lease: Lease) -> None:
        if transfers := self.cache.finish_request(lease):
            self._move(transfers, self.cache.now)

    def _prefetch(self, transfers: list[Transfer], now: float) -> int:
        if not transfers:
            return 0
        started = transfers[-1].pages
        self._move(transfers, now)
        arrived = transfers[-1].arrived_pages
        self.prefetching.end(started, arrived)
        return arrived

    def _run(self, lease: Lease, first_page: int, fetched_pages: int, now: float) -> Hits:
        """From admission to the last computed page; the request keeps its lease until it is retired."""
        cache = self.cache
        if lease.waits or lease.owed_pages:
            self._move(lease.waits, now)
            while waits := cache.claim(lease, now):
                self._move(waits, now)
        if lease.has_load:
            self._move(cache.load(lease, now), now)
        disk_pages = lease.loaded_disk_pages
        if fetched_pages:
            disk_pages += self.prefetching.settle(lease, first_page, fetched_pages)
        if transfers := cache.insert(lease, now):
            self._move(transfers, now)
        return lease.gpu_pages, lease.loaded_pages - disk_pages, disk_pages

    def _move(self, transfers: list[Transfer], now: float) -> None:
        """Begin and finish transfers in order, and all that they wait for or bring about."""
        cache = self.cache
        for transfer in transfers:
            if transfer.done:
                continue
            while waits := cache.begin(transfer, now):
                self._move(waits, now)
            if follow_ups := cache.finish(transfer, now):
                self._move(follow_ups, now)
