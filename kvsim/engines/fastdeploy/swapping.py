"""FastDeploy's prefix cache: a page is on the GPU or in CPU memory, and is swapped between the two."""

from typing import Any

from kvsim.core.answers import check_enough, victim, victims
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.runs import count_pages
from kvsim.core.serving import NEVER_FITS
from kvsim.core.tier import CPU, GPU, Tier
from kvsim.core.tree import INCOMING, READY, Node, RadixTree


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


class SwappingCache:
    """Serves requests from the GPU and, if there is a second tier, CPU memory. On a prompt's path, GPU pages come first.

    look-up        over all full pages; those found are used and pinned, and those in CPU memory are swapped in
    whole prompt   if every page is found, the last one is computed again in place: pinned and used, but not a hit
    room, 2 tiers  before the look-up: if fewer slots are free than the prompt has pages, that number of pages is evicted, so
                   the look-up may find in CPU memory what was just swapped out
    room, 1 tier   after the look-up: if fewer slots are free than pages are missing, that number of pages is evicted
    answer         its pages are taken one by one; if no slot is free, one page is evicted
    eviction       of n pages: always n, or all that can leave, however many slots are free; least recently used leaves first
    CPU memory     if the evicted pages do not all fit, n pages are deleted there, in the same order, before they arrive
    recency        a look-up and an insert are uses; the end of a request is not
    no room        what was evicted stays evicted and, with one tier, the pages found count as used; a request without room for
                   its answer keeps what it has and continues from there

    No prompt may have more pages than CPU memory.
    """

    def __init__(self, tiers: list[Tier], page_tokens: int, *, recompute_last_token: bool = True) -> None:
        self.residency = Residency(tiers)
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.cpu = tiers[CPU] if len(tiers) > 1 else None
        self.page_tokens = page_tokens
        self.counts = self.residency.counts
        self._recompute_last_token = recompute_last_token
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
        """End a request whose answer is complete: unpin its path and give back its other slots."""
        self.residency.notify_finish(lease.request, lease.node, self.residency.now)
        self.gpu.pool.give(lease.slots)
        self.residency.unpin(lease.node, self.gpu)

    # --- the prompt --------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, pages: int, now: float) -> SwapLease | None:
        """Admit a prompt and insert its pages. Returns None if there is no room for it."""
        residency, gpu, cpu = self.residency, self.gpu, self.cpu
        pool = gpu.pool
        prompt_pages = min(pages, request.pages_for(request.prompt_tokens, self.page_tokens))
        if cpu is not None and pool.free < prompt_pages:
            self._swap_out(cpu, prompt_pages, now)
            if pool.free < prompt_pages:
                return None
        path, rest = residency.follow(self.tree.root, request.runs)
        found = path[-1].depth + path[-1].pages if path else 0
        on_gpu = path
        gpu_pages = found
        if cpu is not None:
            on_gpu = [node for node in path if node.state[GPU] == READY]
            gpu_pages = on_gpu[-1].depth + on_gpu[-1].pages if on_gpu else 0
        residency.pin_path(on_gpu, gpu, gpu_pages)
        node = path[-1] if path else self.tree.root
        missing = prompt_pages - found
        if cpu is not None:
            self._swap_in(cpu, path[len(on_gpu) :], now)
        elif pool.free < missing:
            self._delete(gpu, missing, now)
            if pool.free < missing:
                for used in path:
                    used.last_used = now
                residency.unpin(node, gpu)
                return None
        residency.notify_request(request, now)
        residency.use(path, now, is_first=True)
        lease = SwapLease(request, node, self._hits(request, gpu_pages, found), pool.take(missing), pages - prompt_pages)
        if rest:
            inserted = count_pages(rest)
            mine, lease.slots = pool.split(lease.slots, inserted)
            lease.node = residency.add_leaf(node, rest, inserted, gpu, mine, now)
        return lease

    def _hits(self, request: Request, gpu_pages: int, found: int) -> tuple[int, int, int]:
        """Return the hits of a prompt of which ``found`` pages were found, ``gpu_pages`` of them on the GPU."""
        cpu_pages = found - gpu_pages
        if self._recompute_last_token and found and found * self.page_tokens >= request.prompt_tokens:
            if cpu_pages:
                return gpu_pages, cpu_pages - 1, 0
            return gpu_pages - 1, 0, 0
        return gpu_pages, cpu_pages, 0

    def _swap_in(self, cpu: Tier, nodes: list[Node], now: float) -> None:
        """Move the rest of a path from CPU memory to free GPU slots, and pin it there."""
        residency, gpu = self.residency, self.gpu
        for node in nodes:
            residency.add_copy(node, gpu, INCOMING, gpu.pool.take(node.pages))
            node.pins[GPU] = 1
            residency.set_ready(node, gpu, now)
            residency.free(node, cpu)
            self.counts.loaded_pages += node.pages

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
        lease.slots = pool.join(lease.slots, pool.take(taken))
        lease.missing -= taken

    # --- eviction ----------------------------------------------------------------------------------------------------

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
        residency.add_copy(node, cpu, INCOMING, cpu.pool.take(node.pages))
        residency.drop_copy(node, self.gpu)
        residency.set_ready(node, cpu, now)
        self.counts.written_pages += node.pages

    def _delete(self, tier: Tier, pages: int, now: float) -> None:
        """Delete ``pages`` pages of a tier, or all that can leave."""
        if pages <= 0:
            return
        for offered in victims(tier, now):
            node = victim(offered, self.tree, tier)
            if node.pages > pages:
                self.residency.trim(node, tier, pages)
                return
            pages -= node.pages
            self.counts.dropped_pages += node.pages
            self.residency.free(node, tier)
            if not pages:
                return
        check_enough(tier, min(pages, tier.evictable_pages))
