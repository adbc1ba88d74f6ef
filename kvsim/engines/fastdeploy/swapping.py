"""FastDeploy's prefix cache: a page is on the GPU or in CPU memory, and is swapped between the two; storage keeps copies."""

from typing import Any

from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.serving import NEVER_FITS, Server
from kvsim.core.tier import CPU, GPU, Edge, Tier
from kvsim.core.tree import ABSENT, INCOMING, READY, Node, RadixTree
from kvsim.core.victims import check_enough, victim, victims
from kvsim.pages.extents import Extent, count_pages


class SwapLease:
    """What a running request holds: a pinned path down to ``node``, and slots for a partial page and the answer."""

    __slots__ = ("hits", "missing", "node", "request", "slots")

    def __init__(self, request: Request, node: Node, hits: tuple[int, int, int], slots: Any, missing: int) -> None:
        self.request = request
        self.node = node
        self.hits = hits
        self.slots = slots
        self.missing = missing
        """Pages of the answer that have found no room yet."""


class SwappingCache(Server):
    """Serves requests from the GPU and, if there are such tiers, CPU memory and storage. On a path, GPU pages come first, then
    those in CPU memory, then those that only storage has.

    look-up        over all full pages; those found are used and pinned, and those in CPU memory are swapped in
    whole prompt   if every page is found, the last one is computed again in place: pinned and used, but not a hit
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

    def __init__(
        self,
        tiers: list[Tier],
        page_tokens: int,
        *,
        storage: Edge | None = None,
        recompute_last_token: bool = True,
        cache_output: bool = False,
    ) -> None:
        """``storage`` joins the GPU tier to a disk tier; None if there is none."""
        self.residency = Residency(tiers)
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.cpu = next((tier for tier in tiers if tier.level == CPU), None)
        self.storage = storage
        self.page_tokens = page_tokens
        self.counts = self.residency.counts
        self._recompute_last_token = recompute_last_token
        self._caches_output = cache_output
        self._unfinished: SwapLease | None = None
        """The lease of a request that found room for its prompt but not for its whole answer."""

    @property
    def tree(self) -> RadixTree:
        """The radix tree of stored pages."""
        return self.residency.tree

    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request that takes ``pages`` pages in all. Returns its lease, None without room now, or NEVER_FITS."""
        lease, self._unfinished = self._unfinished, None
        if lease is None or lease.request is not request:
            if pages > self.gpu.pool.capacity:
                return NEVER_FITS
            lease = self._admit(request, pages, self.residency.tick(now))
            if lease is None:
                return None
        if lease.missing:
            self._take_answer(lease, self.residency.now)
            if lease.missing:
                self._unfinished = lease
                return None
        return lease

    def finish_request(self, lease: SwapLease) -> None:
        """End a request whose answer is complete: cache its answer, write to storage, unpin its path, give back other slots."""
        if self._caches_output and lease.request.output_runs:
            self._insert_answer(lease, lease.request.output_runs)
        if self.storage is not None:
            self._store(self.storage, lease.node, self.residency.now)
        self.residency.notices.finish(lease.request, lease.node, self.residency.now)
        self.residency.give(self.gpu, lease.slots)
        self.residency.unpin(lease.node, self.gpu)

    # --- the prompt --------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, pages: int, now: float) -> SwapLease | None:
        """Admit a prompt and insert its pages. Returns None if there is no room for it."""
        residency, gpu = self.residency, self.gpu
        pool = gpu.pool
        prompt_pages = min(pages, request.pages_for(request.prompt_tokens, self.page_tokens))
        is_single = len(self.tiers) == 1
        if not is_single and not self._has_room(prompt_pages, now):
            return None
        path, rest = residency.follow(self.tree.root, request.runs)
        found = path[-1].depth + path[-1].pages if path else 0
        on_gpu = path if is_single else [node for node in path if node.state[GPU] == READY]
        gpu_pages = on_gpu[-1].depth + on_gpu[-1].pages if on_gpu else 0
        residency.pin_path(on_gpu, gpu, gpu_pages)
        node = path[-1] if path else self.tree.root
        missing = prompt_pages - found
        if is_single and not self._has_room(missing, now):
            for used in path:
                used.last_used = now
            residency.unpin(node, gpu)
            return None
        cpu_pages = self._load(path[len(on_gpu) :], now)
        residency.notices.request(request, now)
        residency.use(path, now, is_first=True)
        hits = self._hits(request, gpu_pages, cpu_pages, found - gpu_pages - cpu_pages)
        lease = SwapLease(request, node, hits, residency.take(gpu, missing), pages - prompt_pages)
        if rest:
            inserted = count_pages(rest)
            mine, lease.slots = pool.split(lease.slots, inserted)
            lease.node = residency.add_leaf(node, rest, inserted, gpu, mine, now)
        return lease

    def _hits(self, request: Request, gpu_pages: int, cpu_pages: int, stored_pages: int) -> tuple[int, int, int]:
        """Return the hits of a prompt by tier: of one found as a whole, the last page is computed again."""
        found = gpu_pages + cpu_pages + stored_pages
        if self._recompute_last_token and found and found * self.page_tokens >= request.prompt_tokens:
            if stored_pages:
                return gpu_pages, cpu_pages, stored_pages - 1
            if cpu_pages:
                return gpu_pages, cpu_pages - 1, 0
            return gpu_pages - 1, 0, 0
        return gpu_pages, cpu_pages, stored_pages

    def _load(self, nodes: list[Node], now: float) -> int:
        """Bring the rest of a path to free GPU slots, and pin it there: pages in CPU memory move, others are copied from storage.

        Returns the number of pages that were in CPU memory.
        """
        residency, gpu, cpu, moved = self.residency, self.gpu, self.cpu, 0
        for node in nodes:
            residency.add_incoming(node, gpu, residency.take(gpu, node.pages))
            residency.set_ready(node, gpu, now)
            if cpu is not None and node.state[cpu.index] == READY:
                residency.free(node, cpu)
                moved += node.pages
            self.counts.loaded_pages += node.pages
        return moved

    # --- storage -----------------------------------------------------------------------------------------------------

    def _store(self, edge: Edge, node: Node, now: float) -> None:
        """Write the path's pages down to ``node`` that storage lacks, first page first, if they are wanted and there is room."""
        residency, storage, pages = self.residency, edge.lower, 0
        wanted: list[Node] = []
        for part in node.path():
            if not part.state[storage.index]:
                if not edge.wants_used(part, now):
                    break
                wanted.append(part)
                pages += part.pages
        residency.pin(node, storage)
        self._delete(storage, pages - storage.pool.free, now)
        for part in residency.first_pages(wanted, storage.pool.free):
            residency.add_copy(part, storage, INCOMING, residency.take(storage, part.pages))
            residency.set_ready(part, storage, now)
            self.counts.written_pages += part.pages
            pages -= part.pages
        self.counts.no_room_pages += pages
        residency.unpin(node, storage)

    # --- the answer --------------------------------------------------------------------------------------------------

    def _take_answer(self, lease: SwapLease, now: float) -> None:
        """Give a request the pages that its answer lacks, or as many as there is room for."""
        pool = self.gpu.pool
        short = lease.missing - pool.free
        if short > 0:
            if self.cpu is None:
                self._delete(self.gpu, short, now)
            else:
                self._swap_out_one_by_one(self.cpu, short, now)
        taken = min(lease.missing, pool.free)
        lease.slots = pool.join(lease.slots, self.residency.take(self.gpu, taken))
        lease.missing -= taken

    def _insert_answer(self, lease: SwapLease, extents: tuple[Extent, ...]) -> None:
        """Insert the full pages of a complete answer, which are in the request's slots, below its prompt."""
        residency, gpu, pool = self.residency, self.gpu, self.gpu.pool
        now = residency.tick(residency.now)
        path, rest = residency.follow(lease.node, extents)
        for node in path:
            mine, lease.slots = pool.split(lease.slots, node.pages)
            if node.state[GPU] == READY:
                residency.give(gpu, mine)
                residency.pin_alone(node, gpu)
            else:
                residency.add_incoming(node, gpu, mine)
                residency.set_ready(node, gpu, now)
                if self.cpu is not None and node.state[self.cpu.index] == READY:
                    residency.free(node, self.cpu)
            lease.node = node
        residency.use(path, now, is_first=False)
        if rest:
            inserted = count_pages(rest)
            mine, lease.slots = pool.split(lease.slots, inserted)
            lease.node = residency.add_leaf(lease.node, rest, inserted, gpu, mine, now)

    # --- eviction ----------------------------------------------------------------------------------------------------

    def _has_room(self, pages: int, now: float) -> bool:
        """Whether ``pages`` slots are free on the GPU, if need be after evicting that number of pages."""
        pool = self.gpu.pool
        if pool.free < pages:
            if self.cpu is None:
                self._delete(self.gpu, pages, now)
            else:
                self._swap_out(self.cpu, pages, now)
        return pool.free >= pages

    def _swap_out(self, cpu: Tier, pages: int, now: float) -> None:
        """Evict ``pages`` pages together. They do not compete with those in CPU memory for the room that they need there."""
        leaving: list[Node] = []
        count = 0
        for offered in victims(self.gpu, now):
            node = self._victim(offered, pages - count)
            self.residency.leave(node, self.gpu)
            leaving.append(node)
            count += node.pages
            if count == pages:
                break
        check_enough(self.gpu, min(pages - count, self.gpu.evictable_pages))
        if count > cpu.pool.free:
            self._delete(cpu, pages, now)
        for node in leaving:
            self._arrive(node, cpu, now)

    def _swap_out_one_by_one(self, cpu: Tier, pages: int, now: float) -> None:
        """Evict ``pages`` pages, each as soon as CPU memory has room for it.

        Requests finish oldest first, so pages leave the GPU by last use, and all pages in CPU memory were used before. They
        make room before those that arrive.
        """
        for offered in victims(self.gpu, now):
            node = self._victim(offered, pages)
            pages -= node.pages
            self._delete(cpu, node.pages - cpu.pool.free, now)
            self.residency.leave(node, self.gpu)
            self._arrive(node, cpu, now)
            if not pages:
                break
        check_enough(self.gpu, min(pages, self.gpu.evictable_pages))

    def _victim(self, offered: object, most: int) -> Node:
        """Return an offered GPU leaf, or its last ``most`` pages if it has more."""
        node = victim(offered, self.tree, self.gpu)
        if node.pages > most:
            self.residency.cut(node, node.pages - most)
        return node

    def _arrive(self, node: Node, cpu: Tier, now: float) -> None:
        """Complete the move of a leaving node to CPU memory, which has room for it."""
        residency = self.residency
        residency.add_copy(node, cpu, INCOMING, residency.take(cpu, node.pages))
        residency.drop_copy(node, self.gpu)
        residency.set_ready(node, cpu, now)
        self.counts.written_pages += node.pages

    def _delete(self, tier: Tier, pages: int, now: float) -> None:
        """Delete ``pages`` pages of a tier, or all that can leave. Copies in storage stay, unless the tier is storage itself."""
        if pages <= 0:
            return
        for offered in victims(tier, now):
            node = victim(offered, self.tree, tier)
            is_last_copy = node.state.count(ABSENT) == len(self.tiers) - 1
            if node.pages > pages:
                if is_last_copy and tier.may_shorten:
                    self.residency.trim(node, tier, pages)
                    return
                self.residency.cut(node, node.pages - pages)
            pages -= node.pages
            self.counts.dropped_pages += node.pages * is_last_copy
            self.residency.free(node, tier)
            if not pages:
                return
        check_enough(tier, min(pages, tier.evictable_pages))
