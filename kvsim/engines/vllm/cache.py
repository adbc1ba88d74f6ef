"""vLLM's GPU block pool and the CPU offloading tier below it, as one cache."""

from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import Server
from kvsim.core.tier import Edge, Tier
from kvsim.core.tree import RadixTree
from kvsim.engines.vllm.block_pool import BlockLease, BlockPool
from kvsim.engines.vllm.offload import OffloadCounts, OffloadTier, use_at_once
from kvsim.pages.extents import Extent, split_extents
from kvsim.policies.eviction.offload_order import OffloadUse


class VLLMCache(Server):
    """Serves requests from a GPU block pool and, if there is a second tier, from CPU memory."""

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int) -> None:
        self.tiers = tiers
        self.page_tokens = page_tokens
        self.pool = BlockPool(tiers[0], len(tiers))
        self.counts = OffloadCounts()
        self.offload = OffloadTier(edges[0], self.counts) if edges else None
        self._recompute_last_token = rules.recompute_last_token
        self._cache_output = rules.cache_output

    def serve(self, request: Request, pages: int, now: float) -> BlockLease | None:
        """Match, admit with room for ``pages`` pages in all, load and store. Without room, return None; at most cut a node."""
        lease = self.begin(request, pages, pages, now)
        if lease is not None and lease.rest:
            self.pool.name(lease, lease.rest)
        return lease

    def begin(self, request: Request, pages: int, in_all: int, now: float) -> BlockLease | None:
        usable = request.lookup_pages(self.page_tokens) if self._recompute_last_token else request.prompt_pages
        pool = self.pool
        path, rest = pool.match(request.runs, usable)
        hit_pages = path[-1].depth + path[-1].pages if path else 0
        if not pool.has_room(path, pages):
            return None
        lease = BlockLease(request, pool.gpu, pool.residency.tree.root)
        pool.hold(lease, path, now)
        pool.take(lease, pages - hit_pages)
        lease.rest = rest
        if self.offload is None:
            lease.hits = hit_pages, 0, 0
        else:
            lease.offload = use = OffloadUse(request.runs)
            lease.hits = hit_pages, use_at_once(self.offload, use, hit_pages, usable), 0
        return lease

    def begin_chunk(self, lease: BlockLease, tokens: int) -> None:
        pages = tokens // self.page_tokens - lease.node.depth - lease.node.pages
        if pages > 0 and lease.rest:
            extents, lease.rest = split_extents(lease.rest, pages)
            self.pool.name(lease, extents)

    def grow(self, lease: BlockLease, pages: int) -> bool:
        missing = pages - lease.held_pages
        return missing <= 0 or self.pool.take(lease, missing)

    @property
    def tree(self) -> RadixTree:
        """The radix tree of the GPU's pages."""
        return self.pool.tree

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + ([] if self.offload is None else self.offload.order.held())

    def verify(self) -> None:
        super().verify()
        self.pool.check([])

    def finish_request(self, lease: BlockLease) -> None:
        """End a request whose answer is complete: name the full pages of the answer, if it is cached; the pages that the request
        used become the most recent."""
        if self._cache_output and lease.request.output_runs:
            left = lease.held_pages - lease.node.depth - lease.node.pages
            if answer := split_extents(lease.request.output_runs, left)[0]:
                self.pool.name(lease, answer)
        self.pool.finish(lease)
        if self.offload is not None:
            self.offload.finish(lease.offload)
