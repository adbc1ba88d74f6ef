"""vLLM's cache for models with sliding windows, request by request."""

from kvsim.core.request import Request
from kvsim.core.serving import Server
from kvsim.core.tier import Tier
from kvsim.core.tree import RadixTree
from kvsim.engines.vllm.window_blocks import WindowBlockPool, WindowLease
from kvsim.engines.vllm.window_groups import WindowGroups
from kvsim.pages.extents import Extent, join_extents, split_extents

Stage = tuple[int, int]
"""Tokens of a request that have been computed before, and after: a step that computes a chunk of its prompt, or steps of a token
each that compute its answer."""


class VLLMWindowCache(Server):
    """Serves requests from one pool of blocks, in which a page takes one for full attention and one for each group with a window.

    steps   a prompt is computed in chunks, an answer token by token. Before each step, blocks behind the window are given back;
            then the step takes blocks for its pages, of all groups, and the pages that it fills get names
    admit   a request is admitted if every step, to the end of its answer, finds its blocks
    finish  the full pages of an answer get names of full attention, if answers are cached
    """

    def __init__(self, gpu: Tier, windows: WindowGroups, page_tokens: int, *, chunk_tokens: int, cache_output: bool) -> None:
        """``chunk_tokens``: tokens of a prompt that a step computes; 0: all."""
        self.tiers = [gpu]
        self.page_tokens = page_tokens
        self.pool = WindowBlockPool(gpu, windows)
        self.counts = self.pool.residency.counts
        self._gpu = gpu
        self._windows = windows
        self._chunk_tokens = chunk_tokens
        self._cache_output = cache_output

    @property
    def tree(self) -> RadixTree:
        """The radix tree of full attention's pages."""
        return self.pool.tree

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + self.pool.held_extents()

    def serve(self, request: Request, pages: int, now: float) -> WindowLease | None:
        pool, size = self.pool, self.page_tokens
        answer = request.output_runs if self._cache_output else None
        lease = WindowLease(request, self._gpu, pool.residency.tree.root, join_extents(request.runs, answer or ()))
        pool.find(lease, request.lookup_pages(size))
        stages = self._stages(request, lease.hit_pages, pages)
        if not self._has_room(lease, stages):
            return None
        pool.hold_found(lease, now)
        lease.hits = lease.hit_pages, 0, 0
        for start, end in stages:
            pool.drop_behind(lease, start)
            if end <= request.prompt_tokens:
                self._take(lease, -(-end // size))
                self._name(lease, min(end // size, request.prompt_pages))
            else:
                self._grow(lease, end)
            pool.name_windows(lease, end // size)
        return lease

    def _stages(self, request: Request, hit_pages: int, pages: int) -> list[Stage]:
        """Return the stages of a request, which takes ``pages`` pages in all, of full attention.

        An answer is one stage, or page by page if its pages get names of groups with a window.
        """
        size, prompt, stages = self.page_tokens, request.prompt_tokens, list[Stage]()
        start = hit_pages * size
        while start < prompt:
            end = min(prompt, start + self._chunk_tokens) if self._chunk_tokens else prompt
            stages.append((start, end))
            start = end
        last = min(prompt + max(request.output_tokens, 1) - 1, pages * size)
        by_page = self._cache_output and self._windows.names_answers
        while start < last:
            end = min(last, start - start % size + size) if by_page else last
            stages.append((start, end))
            start = end
        return stages

    def _has_room(self, lease: WindowLease, stages: list[Stage]) -> bool:
        """Whether each step finds its blocks, of which others may hold those that the request has found.

        With each page an answer holds more than before, so that the step that takes its last one decides.
        """
        pool, size, windows, hit = self.pool, self.page_tokens, self._windows, lease.hit_pages
        room = self._gpu.pool.free + self._gpu.evictable_pages - pool.idle_pages(lease)
        held = hit
        for start, end in stages:
            if -(-end // size) <= held:
                continue
            held = -(-end // size)
            step = start if end <= lease.request.prompt_tokens else (held - 1) * size
            behind = windows.pages_behind(step)
            wanted = held - hit + windows.groups * (held - max(hit, behind)) + pool.idle_blocks(lease, behind)
            if wanted > room:
                return False
        return True

    def _grow(self, lease: WindowLease, end: int) -> None:
        """Let an answer grow to ``end`` tokens: the pages that leave the window before it takes its last page leave first."""
        size = self.page_tokens
        pages = -(-end // size)
        if pages > lease.held_pages:
            self.pool.slide(lease, (pages - 1) * size)
            self._take(lease, pages)
        self.pool.slide(lease, end - 1)

    def _take(self, lease: WindowLease, pages: int) -> None:
        """Take what a request lacks to ``pages`` pages."""
        has_room = self.pool.take(lease, max(0, pages - lease.held_pages))
        assert has_room, "a step had no room for its blocks"

    def _name(self, lease: WindowLease, pages: int) -> None:
        """Name the first ``pages`` pages of full attention."""
        more = pages - lease.node.depth - lease.node.pages
        if more > 0 and lease.rest:
            extents, lease.rest = split_extents(lease.rest, more)
            self.pool.name(lease, extents)

    def finish_request(self, lease: WindowLease) -> None:
        """End a request whose answer is complete: name the answer's full pages, if it is cached, and give back its blocks."""
        self._name(lease, lease.held_pages)
        self.pool.finish(lease)

    def reset(self) -> None:
        self.pool.reset()

    def verify(self) -> None:
        super().verify()
        self.pool.check([])
