"""SGLang's unified cache: one tree for GPU, host memory and storage, whose nodes move as a whole."""

from dataclasses import asdict
from typing import Any

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup
from kvsim.core.tier import GPU
from kvsim.core.tree import Node
from kvsim.engine.prefetching import PrefetchCounts
from kvsim.engines.sglang.answers import join_answer, pad
from kvsim.engines.sglang.moving_nodes import MovingNodeCache
from kvsim.engines.sglang.read_ahead import Gap, ReadAhead
from kvsim.engines.sglang.whole_nodes import NodeLease
from kvsim.pages.extents import Extent, count_pages, split_extents
from kvsim.policies.prefetch.base import Refusal


class UnifiedLease(NodeLease):
    """What a request has found and holds, from its arrival on."""

    __slots__ = ("brought_pages", "counted_pages", "lookup_pages", "prompt_pages", "runs", "stored_from")

    def __init__(self, request: Request, root: Node) -> None:
        super().__init__(request, root, (0, 0, 0), None)
        self.runs = request.runs
        """Page ids that may be cached: of the prompt and, if answers are cached, of the answer."""
        self.prompt_pages = request.prompt_pages
        self.lookup_pages = request.prompt_pages
        """Leading pages that a look-up covers."""
        self.counted_pages = 0
        """Leading pages of the prompt that have been entered: nodes there have had its hit."""
        self.stored_from = 0
        """Position of the first page that storage has brought to the host for this request."""
        self.brought_pages = 0
        """How many storage has brought."""


class UnifiedNodeCache(MovingNodeCache):
    """``MovingNodeCache`` as requests use it. With a GPU only, it is SGLang's radix cache with prefill chunks and answers.

    step        one before each attempt to admit a request, one more while storage is looked up
    look-up     refreshes all that it finds, also for a request that finds no room. Both parts of a cut are older than the rest
                of the path
    arrival     below the deepest node found, which the host must have, the pages in storage become one new node on the host,
                which makes room as in ``prefetch_counts``; fewer pages if room is short
    room        free + evictable pages of the GPU, with the nodes found there pinned; copies on the host do not lower the need.
                Copies and loads under way are waited for before a request is rejected
    load        at least ``load_min_tokens``
    prefill     in chunks of ``chunk_pages``, each inserted when it is computed
    insert      refreshes its path; a node that only the host has takes the computed pages; pages that the GPU has are given
                back. Both parts of a cut are newer than the rest of the path, a new leaf is newest
    hits        one for each node on the path and for the new leaf, once for each request
    answer      if answers are cached, the finish inserts prompt and answer in whole pages, without the last token, as a node of
                its own, and then refreshes the prompt

    SGLang 0.5.23, ``UnifiedRadixCache``.
    """

    def __init__(
        self,
        setup: CacheSetup,
        *,
        recompute_last_token: bool = True,
        cache_output: bool = False,
        load_min_tokens: int = 10,
        counts_unmatched: bool = False,
    ) -> None:
        """``counts_unmatched`` makes room on the host for all pages of the prompt that a look-up has not found, before it is
        known how many of them storage has."""
        super().__init__(
            setup, recompute_last_token=recompute_last_token, copy_steps=setup.copy_steps, load_min_tokens=load_min_tokens
        )
        self.prefetch_counts = PrefetchCounts()
        self._ahead = ReadAhead(self)
        self._chunk_pages = setup.prefill_chunk_tokens // setup.page_tokens or UNLIMITED
        self._cache_output = cache_output
        self._counts_unmatched = counts_unmatched
        self._running = 0
        self._waiting: UnifiedLease | None = None
        """The request that found no room when it was last tried."""

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + ([] if self.storage is None else self.storage.held())

    def serve(self, request: Request, pages: int, now: float) -> UnifiedLease | None:
        """Look up, admit with room for ``pages`` pages in all, and insert chunk by chunk. Returns None without room."""
        lease = self._admit(request, pages, now)
        if lease is not None:
            self._prefill(lease, sum(lease.hits))
        return lease

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> UnifiedLease | None:
        return self._admit(request, request.pages_for(tokens, self.page_tokens), now)

    def _admit(self, request: Request, pages: int, now: float) -> UnifiedLease | None:
        """Look up, and admit with ``pages`` pages."""
        self.residency.tick(now)
        lease, self._waiting = self._waiting, None
        self._take_steps()
        if lease is None or lease.request is not request:
            lease = self._new_lease(request)
            if self.storage is not None:
                self._read_ahead(lease)
        while True:
            path = self._look_up(lease)
            on_gpu = [node for node in path if node.state[GPU]]
            gpu_pages = on_gpu[-1].depth + on_gpu[-1].pages if on_gpu else 0
            missing = pages - gpu_pages - self.gpu.pool.free
            if missing <= 0 or self.can_evict(missing, on_gpu, gpu_pages):
                break
            if self._running:
                self._waiting = lease
                return None
            if not self.is_moving:
                self.prefetch_counts.wasted_pages += lease.brought_pages
                return None
            self._take_steps()
        self._running += 1
        self.residency.notices.request(request, self.residency.now)
        self.residency.pin_path(on_gpu, self.gpu, gpu_pages)
        if on_gpu:
            lease.node = on_gpu[-1]
        loaded_pages = self.load_back(lease, request, path[len(on_gpu) :])
        self.send_loads()
        lease.hits = self._hits(lease, gpu_pages, loaded_pages)
        lease.slots = self.take(pages - sum(lease.hits), self.residency.now)
        return lease

    def step_tokens(self, tokens: int, *, is_answer: bool) -> int:
        """Prompts count in whole pages, and answers not at all: they are computed in steps of their own."""
        return 0 if is_answer else -(-tokens // self.page_tokens) * self.page_tokens

    def end_chunk(self, lease: Any, tokens: int) -> None:
        self._enter_chunk(lease, min(tokens // self.page_tokens, lease.prompt_pages))
        self.send_copies()

    def grow(self, lease: Any, pages: int, full_pages: int) -> bool:
        pool = self.gpu.pool
        missing = pages - self._held_pages(lease)
        if missing > pool.free and not self.can_evict(missing - pool.free, [], 0):
            return False
        if missing > 0:
            lease.slots = pool.join(lease.slots, self.take(missing, self.residency.now))
        return True

    def _held_pages(self, lease: UnifiedLease) -> int:
        """Return the pages of a running request: those of its path, and its own."""
        return lease.node.depth + lease.node.pages + self.gpu.pool.count(lease.slots)

    def finish_request(self, lease: Any) -> None:
        """End a request whose answer is complete: insert what is to be cached of it and give back everything else."""
        residency, prompt_pages = self.residency, lease.prompt_pages
        if self._cache_output:
            held = self._held_pages(lease)
            runs = split_extents(lease.runs, held)[0]
            end = count_pages(runs)
            self.enter(lease, runs, prompt_pages)
            if end > prompt_pages:
                now = residency.tick(residency.now)
                for node in lease.node.path():
                    if node.depth < prompt_pages:
                        node.last_used = now
        residency.notices.finish(lease.request, lease.node, residency.now)
        residency.give(self.gpu, lease.slots)
        residency.unpin(lease.node, self.gpu)
        self.send_copies()
        self._running -= 1

    def prefetched(self) -> dict[str, int]:
        return asdict(self.prefetch_counts)

    def _take_steps(self) -> None:
        self.take_step()
        self.store_copied()

    # --- the look-up ---------------------------------------------------------------------------------------------------------

    def _new_lease(self, request: Request) -> UnifiedLease:
        lease, tokens = UnifiedLease(request, self.tree.root), self.page_tokens
        if self._recompute_last_token:
            lease.lookup_pages = request.lookup_pages(tokens)
        if self._cache_output and request.output_tokens:
            keys = request.prompt_tokens + request.output_tokens - 1 - request.bigram
            lease.runs = pad(join_answer(request), request, keys // tokens)
        return lease

    def _look_up(self, lease: UnifiedLease) -> list[Node]:
        """Return the nodes of a prompt that are cached, and refresh them. The last is cut where the look-up ends."""
        return self.find(lease.runs, lease.lookup_pages)

    def _hits(self, lease: UnifiedLease, gpu_pages: int, loaded_pages: int) -> tuple[int, int, int]:
        """Return the hits by tier, and count what the request uses of the pages that storage has brought."""
        end = min(gpu_pages + loaded_pages, lease.stored_from + lease.brought_pages)
        used = max(0, end - max(gpu_pages, lease.stored_from)) if loaded_pages else 0
        self.prefetch_counts.used_pages += used
        self.prefetch_counts.wasted_pages += lease.brought_pages - used
        return gpu_pages, loaded_pages - used, used

    # --- storage -------------------------------------------------------------------------------------------------------------

    def _read_ahead(self, lease: UnifiedLease) -> None:
        """Read what storage has of a prompt behind the pages found, into a new node on the host."""
        storage = self.storage
        assert storage is not None
        lookup = split_extents(lease.runs, lease.lookup_pages)[0]
        gap = self._ahead.gap(lease.request, self._look_up(lease), lookup)
        stored = storage.leading_pages(gap.runs) if gap else 0
        counted = gap.pages if gap and self._counts_unmatched else stored
        hold = self.hold_on_host(gap.node) if gap and counted and gap.node is not self.tree.root else None
        self.take_step()
        pages = self._pages_to_read(gap, stored, counted) if gap and counted else 0
        if gap and pages:
            storage.touch(split_extents(gap.runs, pages)[0])
            self._ahead.enter(gap, pages, self.residency.take(self.cpu, pages))
            self.prefetch_counts.fetched_pages += pages
            lease.stored_from, lease.brought_pages = gap.first, pages
        if hold is not None:
            self.let_go(hold)
        self.store_copied()

    def _pages_to_read(self, gap: Gap, stored: int, counted: int) -> int:
        """Make room on the host for ``counted`` pages, as far as the policy and the host allow, and return how many of those
        stored to read. Prefetches of earlier requests have ended: there are no others."""
        counts = self.prefetch_counts
        room = self._ahead.room(gap, counted)
        if isinstance(room, Refusal):
            counts.refuse(room.value, stored)
            return 0
        pages = min(room, stored)
        if counted != stored and pages:
            answer = self._ahead.ask(gap, pages, pages)
            if isinstance(answer, Refusal):
                counts.refuse(answer.value, stored)
                return 0
            pages = min(pages, answer)
        counts.refused_by_memory_pages += stored - pages if room else 0
        return pages

    # --- the prefill ---------------------------------------------------------------------------------------------------------

    def _prefill(self, lease: UnifiedLease, done: int) -> None:
        """Compute a prompt from page ``done`` on, chunk by chunk, and insert each."""
        prompt_pages = lease.prompt_pages
        total = max(prompt_pages, -(-lease.request.prompt_tokens // self.page_tokens))
        while True:
            done = min(done + self._chunk_pages, total)
            self._enter_chunk(lease, min(done, prompt_pages))
            if done == total:
                break
        self.send_copies()

    def _enter_chunk(self, lease: UnifiedLease, end: int) -> None:
        """Enter the first ``end`` pages of a prompt."""
        self.enter(lease, split_extents(lease.runs, end)[0], lease.counted_pages)
        lease.counted_pages = end
