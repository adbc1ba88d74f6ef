"""vLLM's GPU block pool and the CPU offloading tier below it, as one cache."""

from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import Server
from kvsim.core.tier import Edge, Tier
from kvsim.core.tree import RadixTree
from kvsim.engines.vllm.block_pool import BlockLease, BlockPool
from kvsim.engines.vllm.observed_offload import ObservedOffload
from kvsim.engines.vllm.offload import OffloadCounts, OffloadTier, use_at_once
from kvsim.engines.vllm.versions import LATEST, VERSIONS, Version
from kvsim.pages.extents import Extent, join_extents, split_extents
from kvsim.policies.eviction.offload_order import OffloadUse


class VLLMCache(Server):
    """Serves requests from a GPU block pool and, if there is a second tier, from CPU memory."""

    def __init__(
        self,
        tiers: list[Tier],
        edges: list[Edge],
        rules: Rules,
        page_tokens: int,
        *,
        version: Version = VERSIONS[LATEST],
        is_ahead: bool = False,
    ) -> None:
        """``is_ahead``: the engine forms a step while the one before it runs, which matters to requests as they were observed."""
        self.counts_last_admission = version.counts_last_admission
        self.tiers = tiers
        self.page_tokens = page_tokens
        self.pool = BlockPool(tiers[0], len(tiers))
        self.counts = OffloadCounts()
        self.offload = OffloadTier(edges[0], self.counts, version=version) if edges else None
        self._recompute_last_token = rules.recompute_last_token
        self._cache_output = rules.cache_output
        self.observed: ObservedOffload | None = None
        """What requests are to CPU memory that overlap as they were observed."""
        if self.offload is not None:
            self.observed = ObservedOffload(self.offload, version, page_tokens, is_ahead=is_ahead)
        self.loads_first = self.offload is not None
        self.preempts_all = self.loads_first and version.frees_late and is_ahead

    def serve(self, request: Request, pages: int, now: float) -> BlockLease | None:
        """Match, admit with room for ``pages`` pages in all, load and store. Without room, return None; at most cut a node."""
        usable = self._usable_pages(request)
        lease = self._admit(request, request.runs, pages, usable, now)
        if lease is not None:
            if self.offload is not None:
                lease.offload = OffloadUse(request.runs)
                lease.hits = lease.hits[0], use_at_once(self.offload, lease.offload, lease.hits[0], usable), 0
            self.pool.take(lease, pages - lease.held_pages)
            if lease.rest:
                self.pool.name(lease, lease.rest)
        return lease

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> BlockLease | None:
        pages, usable = request.pages_for(tokens, self.page_tokens), self._usable_pages(request)
        if tokens > request.prompt_tokens:
            usable = (tokens - self._recompute_last_token) // self.page_tokens
        lease = self._admit(request, self._path(request), pages, usable, now)
        if lease is not None and self.observed is not None:
            lease.offload = None
            found = self.observed.look_up(request, self._known_path(request, tokens), lease.hits[0])
            loaded = self.observed.load(request, found.chunks, lease.hits[0])
            lease.hits = lease.hits[0], loaded, 0
            self.pool.take(lease, loaded)
        return lease

    def _known_path(self, request: Request, tokens: int) -> tuple[Extent, ...]:
        """Return the full pages of a request's first ``tokens`` tokens, as far as they are of its prompt."""
        return split_extents(request.runs, tokens // self.page_tokens)[0]

    def look_up_waiting(self, request: Request, tokens: int) -> bool:
        if self.observed is None:
            return True
        path, _ = self.pool.match(self._path(request), (tokens - self._recompute_last_token) // self.page_tokens)
        hit_pages = path[-1].depth + path[-1].pages if path else 0
        found = self.observed.look_up(request, self._known_path(request, tokens), hit_pages)
        return not (found.is_written or found.is_read)

    def is_loading(self, lease: BlockLease) -> bool:
        return self.observed is not None and self.observed.is_loading(lease.request)

    def end_pass(self, *, is_step: bool) -> None:
        if self.observed is not None:
            self.observed.end_pass(is_step=is_step)

    def _usable_pages(self, request: Request) -> int:
        """Return how many pages of a prompt may be found."""
        return request.lookup_pages(self.page_tokens) if self._recompute_last_token else request.prompt_pages

    def _path(self, request: Request) -> tuple[Extent, ...]:
        """Return the pages of a request that get names."""
        answer = request.output_runs if self._cache_output else None
        return join_extents(request.runs, answer or ())

    def _admit(self, request: Request, extents: tuple[Extent, ...], pages: int, usable: int, now: float) -> BlockLease | None:
        """Match at most ``usable`` pages, and hold them if there is room for ``pages`` pages in all."""
        pool = self.pool
        path, rest = pool.match(extents, usable)
        hit_pages = path[-1].depth + path[-1].pages if path else 0
        if not pool.has_room(path, pages):
            return None
        lease = BlockLease(request, pool.gpu, pool.residency.tree.root)
        pool.hold(lease, path, now)
        lease.rest = rest
        lease.hits = hit_pages, 0, 0
        return lease

    def begin_chunk(self, lease: BlockLease, tokens: int) -> bool:
        missing = -(-tokens // self.page_tokens) - lease.held_pages
        if missing > 0 and not self.pool.take(lease, missing):
            return False
        pages = tokens // self.page_tokens - lease.node.depth - lease.node.pages
        if pages > 0 and lease.rest:
            extents, lease.rest = split_extents(lease.rest, pages)
            self.pool.name(lease, extents)
        if self.observed is not None:
            self.observed.compute(lease.request, tokens)
        return True

    def grow(self, lease: BlockLease, pages: int, full_pages: int) -> bool:
        missing = pages - lease.held_pages
        if missing > 0 and not self.pool.take(lease, missing):
            return False
        self._name_answer(lease, full_pages)
        return True

    def _name_answer(self, lease: BlockLease, pages: int) -> None:
        """Name the pages of an answer among the first ``pages`` pages of its request, which are full, if answers are cached."""
        named, request = lease.node.depth + lease.node.pages, lease.request
        if self._cache_output and request.output_runs and pages > named:
            answer = split_extents(request.output_runs, max(0, named - request.prompt_pages))[1]
            if full := split_extents(answer, pages - named)[0]:
                self.pool.name(lease, full)

    def preempt(self, lease: BlockLease) -> bool:
        """Give back what a request holds: its pages with names stay, and are the most recent."""
        self.pool.free(lease)
        return True

    @property
    def tree(self) -> RadixTree:
        """The radix tree of the GPU's pages."""
        return self.pool.tree

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + ([] if self.offload is None else self.offload.order.held())

    def verify(self) -> None:
        if self.observed is not None:
            self.observed.end_pass(is_step=False)
        super().verify()
        self.pool.check([])

    def finish_request(self, lease: BlockLease) -> None:
        """End a request whose answer is complete: name the full pages of the answer, if it is cached; the pages that the request
        used become the most recent."""
        self._name_answer(lease, lease.held_pages)
        self.pool.finish(lease)
        if self.offload is not None and lease.offload is not None:
            self.offload.finish(lease.offload)
        elif self.observed is not None:
            self.observed.finish(lease.request)
