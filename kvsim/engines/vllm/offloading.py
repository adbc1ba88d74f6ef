"""vLLM's GPU block pool and its CPU pool as an engine in time calls them."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from kvsim.core.lease import Lease
from kvsim.core.plain_lower import PlainLower
from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Edge, Tier
from kvsim.engines.vllm.block_numbers import BlockNumbers
from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.copies import BlockCopy
from kvsim.engines.vllm.offload import OffloadingCounts, OffloadTier
from kvsim.engines.vllm.stepped import SteppedCache
from kvsim.engines.vllm.versions import Version
from kvsim.pages.extents import Extent, count_pages, every_last, split_extents
from kvsim.policies.eviction.offload_order import OffloadUse

NO_CHUNKS: list[Extent] = []


class Loadable(NamedTuple):
    """What a request can load: chunks from the one at position ``first`` of its path on, ``pages`` pages beyond the GPU's hit."""

    chunks: list[Extent]
    first: int
    pages: int


NOTHING = Loadable(NO_CHUNKS, 0, 0)


class OffloadingCache(SteppedCache):
    """The cache of vLLM's scheduler V1 (0.33) with CPU offloading (``OffloadingConnector``).

    loadable    chunks that a request can load behind its hit on the GPU; None: it has to ask again
    begin_load  takes the blocks for them, which have no names before ``end_load``
    offer       offers a request's next chunks; the store that comes of it reads the GPU's blocks until it is reported

    GPU slots are numbered, since a step waits for stores that read blocks which others get (``reads_handed``).
    """

    def __init__(self, tiers: Sequence[Tier], edge: Edge, rules: Rules, page_tokens: int, *, chunk_pages: int,
                 prompt_only: bool, version: Version) -> None:  # fmt: skip
        gpu = tiers[0]
        if gpu.pool.capacity == UNLIMITED:
            raise ValueError("tiers.gpu.capacity=unlimited has no blocks that CPU offloading could read: set a size")
        gpu.pool = BlockNumbers(gpu.pool.capacity)
        super().__init__(gpu, rules, page_tokens, tiers=len(tiers), counts_last_admission=version.counts_last_admission)
        self.row = version
        self.tiers = list(tiers)
        self.residency.counts = counts = OffloadingCounts()
        self.edge = edge
        self.chunk_pages = chunk_pages
        self.prompt_only = prompt_only
        self.offload = OffloadTier(edge, counts, chunk_pages, version=version)
        if not self.offload.capacity:
            raise ValueError(f"tiers.cpu.capacity is less than one chunk of {chunk_pages} pages: set it higher")
        self.lower = PlainLower(gpu, self.watches)
        self.uses: dict[Request, OffloadUse] = {}
        """What requests are to the CPU pool, from their first look-up to their finish."""

    def use_of(self, request: Request) -> OffloadUse:
        """Return what a request is to the CPU pool."""
        use = self.uses.get(request)
        if use is None:
            path = self._path(request)
            size = self.chunk_pages
            full = split_extents(path, count_pages(path) // size * size)[0]
            use = self.uses[request] = OffloadUse(full if size == 1 else tuple(every_last(full, size)))
        return use

    # --- loads -----------------------------------------------------------------------------------------------------------

    def loadable(self, lease: Lease, tokens: int) -> Loadable | None:
        """Return what a request of ``tokens`` known tokens can load; the lease must be fresh from ``match``.

        None: it has to ask again, since chunks that it finds are still being written, or loaded for another request.
        """
        path = self._known_chunks(lease.request, tokens)
        found = self._found(lease, path, tokens // self.page_tokens // self.chunk_pages)
        self.offload.order.look_up(path)
        return found

    def _known_chunks(self, request: Request, tokens: int) -> tuple[Extent, ...]:
        """Return the full chunks of a request's first ``tokens`` tokens."""
        return split_extents(self.use_of(request).path, tokens // self.page_tokens // self.chunk_pages)[0]

    def _found(self, lease: Lease, path: tuple[Extent, ...], last: int) -> Loadable | None:
        size, hit_pages = self.chunk_pages, lease.gpu_pages
        if last * size - hit_pages < size:
            return NOTHING
        first = hit_pages // size
        found = self.offload.look_up(path, first)
        if found.is_written:
            return None
        pages = (first + count_pages(found.chunks)) * size - hit_pages
        if pages < size:
            return NOTHING
        return None if found.is_read else Loadable(found.chunks, first, pages)

    def moves(self, request: Request) -> bool:
        """Whether chunks of a request are being stored or loaded."""
        return self.offload.is_busy(self.use_of(request).path)

    def begin_load(self, lease: Lease, loadable: Loadable) -> BlockCopy:
        """Take the blocks for a load, which the caller has found room for; the lease has just been admitted."""
        has_room = self.pool.take(cast(BlockLease, lease), loadable.pages)
        assert has_room, "a load was decided without room for it"
        lease.loaded_pages = loadable.pages
        self.counts.loaded_pages += loadable.pages
        self.offload.begin_load(self.use_of(lease.request), loadable.chunks, loadable.first)
        return BlockCopy(lease.request, self.edge, self.tree, loadable.chunks, loadable.pages, None)

    # --- stores ----------------------------------------------------------------------------------------------------------

    def offer(self, request: Request, first: int, tokens: int, known: int) -> tuple[int, BlockCopy | None]:
        """Offer the full chunks of a request from position ``first`` on, among its first ``tokens`` of ``known`` tokens.

        Returns where the next offer begins, and the store, if any. Where there is nothing to offer, that may be before ``first``.
        """
        if self.prompt_only:
            tokens = min(tokens, request.prompt_tokens)
        size, use = self.chunk_pages, self.use_of(request)
        last = min(tokens // self.page_tokens // size, count_pages(use.path))
        if last <= first:
            return last, None
        stored = self.offload.offer(use, first, last, self._known_chunks(request, known))
        if stored is None:
            return first, None
        if not stored:
            return last, None
        chunks = [run for run, _ in stored]
        places = [place for _, place in stored]
        return last, BlockCopy(request, self.edge, self.tree, chunks, count_pages(chunks) * size, places)

    def next_offer(self, request: Request, first: int) -> int:
        """Return the number of tokens with which the chunk at position ``first`` is offered; ``UNLIMITED`` if there is none."""
        tokens = (first + 1) * self.chunk_pages * self.page_tokens
        if self.prompt_only and tokens > request.prompt_tokens or first >= count_pages(self.use_of(request).path):
            return UNLIMITED
        return tokens

    def slots_of(self, lease: Lease) -> list[int]:
        """Return the GPU's slots of a request's pages with names."""
        held = [node.slots[self.gpu.index] for node in self.pool.held(cast(BlockLease, lease))]
        return [slot for slots in held for slot in slots]

    def begin_pass(self) -> None:
        """Note from now on which blocks requests get."""
        self.pool.handed = []

    def reads_handed(self, copy: BlockCopy, held: list[int]) -> bool:
        """Whether a store reads a block that has been given to a request, anew or as a hit, since ``begin_pass``.

        ``held`` are the slots of its request's path.
        """
        handed = [slot for slots in self.pool.handed or () for slot in slots]
        if not handed:
            return False
        size = self.chunk_pages
        reads = zip(copy.chunks, copy.places or (), strict=True)
        return not set(handed).isdisjoint([slot for run, at in reads for slot in held[at * size : (at + run[1]) * size]])

    def report(self, copy: BlockCopy) -> None:
        """Let the end of a copy take effect in the CPU pool."""
        if copy.is_load:
            self.offload.end_load(copy.chunks)
        else:
            self.offload.end_store(copy.chunks)

    def forget(self, request: Request) -> None:
        """End a request that has finished and has made its last offer."""
        self.offload.finish(self.use_of(request))
        del self.uses[request]

    def reset(self, gpu: Tier | None = None, now: float = 0.0) -> None:
        self.offload.reset()
        super().reset(gpu, now)

    def held_pages(self, name: str) -> tuple[int, int] | None:
        return None
