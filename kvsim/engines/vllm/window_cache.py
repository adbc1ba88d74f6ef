"""vLLM's cache for models with sliding windows, request by request."""

from kvsim.core.request import Request
from kvsim.core.serving import Server
from kvsim.core.tier import Tier
from kvsim.core.tree import RadixTree
from kvsim.engines.vllm.window_blocks import WindowBlockPool, WindowLease
from kvsim.engines.vllm.window_groups import WindowGroups
from kvsim.pages.extents import Extent, join_extents, split_extents

Moment = tuple[int, int]
"""A step: tokens of a request that have been computed before it, and after it."""


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
        return super().held_extents() + [(page, 1) for page in self.pool.states.pages()]

    def serve(self, request: Request, pages: int, now: float) -> WindowLease | None:
        pool, size = self.pool, self.page_tokens
        answer = request.output_runs if self._cache_output else None
        lease = WindowLease(request, self._gpu, pool.residency.tree.root, join_extents(request.runs, answer or ()))
        pool.find(lease, request.lookup_pages(size))
        moments = self._moments(request, lease.hit_pages, pages)
        if not self._has_room(lease, moments):
            return None
        pool.hold_found(lease, now)
        lease.hits = lease.hit_pages, 0, 0
        for start, end in moments:
            pool.drop_behind(lease, start)
            has_room = pool.take(lease, max(0, -(-end // size) - lease.held_pages))
            assert has_room, "a step had no room for its blocks"
            if end <= request.prompt_tokens:
                self._name(lease, min(end // size, request.prompt_pages))
            pool.name_windows(lease, end // size)
        return lease

    def _moments(self, request: Request, hit_pages: int, pages: int) -> list[Moment]:
        """Return the steps of a request that change something; it takes ``pages`` pages in all, of full attention."""
        size, prompt = self.page_tokens, request.prompt_tokens
        start, moments = hit_pages * size, []
        while start < prompt:
            end = min(prompt, start + self._chunk_tokens) if self._chunk_tokens else prompt
            moments.append((start, end))
            start = end
        last = min(prompt + max(request.output_tokens, 1) - 1, pages * size)
        if last <= prompt:
            return moments
        steps = {prompt, *range(-(-prompt // size) * size, last, size)}
        slide = (self._windows.window_tokens - 1) % size
        steps.update(range(prompt + (slide - prompt) % size, last, size))
        if self._cache_output and self._windows.names_answers:
            steps.update(range(prompt + (-1 - prompt) % size, last, size))
        return moments + [(tokens, tokens + 1) for tokens in sorted(steps)]

    def _has_room(self, lease: WindowLease, moments: list[Moment]) -> bool:
        """Whether each step finds its blocks, of which others may hold those that the request has found."""
        gpu, size, windows, hit = self._gpu, self.page_tokens, self._windows, lease.hit_pages
        idle, idle_by_page = self.pool.idle_blocks(lease)
        room = gpu.pool.free + gpu.evictable_pages - idle
        first = hit - len(lease.run)
        held = hit
        for start, end in moments:
            held = max(held, -(-end // size))
            behind = windows.pages_behind(start)
            wanted = held - hit + windows.groups * (held - max(hit, behind)) + sum(idle_by_page[max(0, behind - first) :])
            if wanted > room:
                return False
        return True

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
