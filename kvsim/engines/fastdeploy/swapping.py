"""FastDeploy's prefix cache in a replay: what it does in time (``SteppedSwaps``), with swaps and writes that take no time."""

from typing import Any

from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Server
from kvsim.core.tier import DISK, GPU
from kvsim.core.tree import RadixTree
from kvsim.engines.fastdeploy.stepped import SteppedSwaps
from kvsim.engines.fastdeploy.swaps import SwapLease


class SwappingCache(Server):
    """Serves requests from the GPU and, if there are such tiers, CPU memory and storage. On a path, GPU pages come first, then
    those in CPU memory, then those that only storage has.

    look-up        over all full pages; those found are used and pinned, and those in CPU memory are swapped in
    whole prompt   if every page is found, the last one is computed again in place: pinned and used, but not a hit
    images         if what is found ends inside one, its pages are computed again in place, too
    room           with CPU memory or storage, before the look-up: if fewer slots are free than the prompt has pages, that
                   number of pages is evicted, so the look-up may find in CPU memory what was just swapped out
    room, GPU only after the look-up: if fewer slots are free than pages are missing, that number of pages is evicted
    answer         its pages are taken one by one; if no slot is free, one page is evicted
    eviction       of n pages: always n, or all that can leave, however many slots are free; least recently used leaves first
    CPU memory     if the evicted pages do not all fit, n pages are deleted there, in the same order, before they arrive
    recency        a look-up and an insert are uses; the end of a request is not
    output caching if it is on, the full pages that the answer completes are inserted at the end, and used then; those known
                   already give the request's slots back, or take them if they are in CPU memory
    no room        what was evicted stays evicted and, with the GPU only, the pages found count as used; a request without room
                   for its answer keeps what it has and continues from there

    No prompt may have more pages than CPU memory. With storage (FastDeploy's ``request_match_blocks`` and
    ``write_cache_to_storage``; a page goes between GPU and storage directly):

    look-up        for the whole rest of the prompt behind GPU and CPU memory, in free GPU slots, up to the first page that
                   storage lacks; what it has is copied to the GPU and stays in storage, and the other slots are for computing
    written        when a request finishes, before it gives its pages up: those of its prompt, and of a cached answer, that
                   storage lacks and the placement policy wants (the engine: all of them), first pages first
    eviction       by the policy of the storage tier: as many pages as a write lacks room for, none of the path that is
                   written; if that is not enough, its first pages are written
    recency        a page in storage is used when a request uses it on any tier: its finish looks all of its pages up
    """

    def __init__(self, cache: SteppedSwaps) -> None:
        self.cache = cache
        self.tiers, self.counts, self.page_tokens = cache.tiers, cache.counts, cache.page_tokens
        self._unfinished: SwapLease | None = None
        """The lease of a request that found room for its prompt but not for its whole answer."""

    @property
    def tree(self) -> RadixTree:
        """The radix tree of stored pages."""
        return self.cache.tree

    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request that takes ``pages`` pages in all. Returns its lease, None without room now, or NEVER_FITS."""
        lease, self._unfinished = self._unfinished, None
        if lease is not None and lease.request is not request:
            self.cache.release(lease)
            lease = None
        if lease is None:
            if pages > self.cache.gpu.pool.capacity:
                return NEVER_FITS
            lease = self._admit(request, pages, now)
            if lease is None:
                return None
        if lease.lacking:
            self._take_answer(lease)
            if lease.lacking:
                self._unfinished = lease
                return None
        return lease

    def finish_request(self, lease: SwapLease) -> None:
        """End a request whose answer is complete: cache its answer, write to storage, unpin its path, give back other slots."""
        self.cache.finish(lease)
        self._land()

    def reset(self) -> None:
        self.cache.reset()

    def _admit(self, request: Request, pages: int, now: float) -> SwapLease | None:
        """Admit a prompt and insert its pages. Returns None if there is no room for it."""
        cache, lease = self.cache, self.cache.lease(request)
        prompt_pages = min(pages, request.pages_for(request.prompt_tokens, self.page_tokens))
        is_admitted = cache.admit(lease, prompt_pages, now)
        self._land()
        if not is_admitted:
            return None
        cache.claim(lease, now)
        if lease.has_load:
            cache.swaps.load(lease, now)
            self._land()
        lease.hits = tuple(lease.reused_pages(DISK + 1))
        cache.begin_chunk(lease, request.prompt_tokens, now)
        lease.lacking = pages - prompt_pages
        return lease

    def _take_answer(self, lease: SwapLease) -> None:
        """Give a request the pages that its answer lacks, or as many as there is room for."""
        swaps, pool = self.cache.swaps, self.cache.gpu.pool
        while (short := lease.lacking - pool.free) > 0 and swaps.evict_singly(short, swaps.residency.now):
            self._land()
        taken = min(lease.lacking, pool.free)
        lease.slots = pool.join(lease.slots, swaps.residency.take(self.tiers[GPU], taken))
        lease.lacking -= taken

    def _land(self) -> None:
        """End all transfers under way."""
        swaps = self.cache.swaps
        swaps.under_way.flush()
        while swaps.in_flight:
            swaps.finish(next(iter(swaps.in_flight)), swaps.residency.now)
