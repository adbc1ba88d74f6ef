"""What somebody knows of a cache who only hears its events, and what the cache has."""

from collections import Counter

from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier
from kvsim.core.tree import READY
from kvsim.emulation.told_blocks import Blocks, pages_of
from kvsim.engines.sglang.stored_steps import StoredSteps
from kvsim.engines.vllm.offloading import OffloadingCache
from kvsim.kv_events.messages import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch, tier_of
from kvsim.pages.extents import pages_named


class Index:
    """A plain dictionary of blocks: how often each is in each tier. vLLM stores a block again that is computed twice."""

    def __init__(self) -> None:
        self.blocks: dict[str, Counter[BlockHash]] = {}
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.tokens: dict[BlockHash, tuple[object, ...]] = {}

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                held = self.blocks[tier_of(event.medium)]
                for block in event.block_hashes:
                    assert held[block] > 0, f"{block} is removed from {event.medium}, where it is not"
                    held[block] -= 1

    def _store(self, event: BlockStored) -> None:
        self.blocks.setdefault(tier_of(event.medium), Counter()).update(event.block_hashes)
        if not event.token_ids:
            return
        before, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for at, block in enumerate(event.block_hashes):
            own = event.token_ids[at * size : (at + 1) * size]
            assert self.parents.setdefault(block, before) == before
            assert self.tokens.setdefault(block, own) == own
            before = block

    def held(self, tier: str) -> set[BlockHash]:
        return {block for block, times in self.blocks.get(tier, Counter()).items() if times}

    def path_of(self, block: BlockHash) -> list[object]:
        """The tokens of a block and of all before it, as far back as events have told."""
        tokens = list(self.tokens[block])
        before = self.parents[block]
        return tokens if before is None else self.path_of(before) + tokens


def held_pages(cache: ServedCache, tier: Tier, known: int) -> set[int]:
    """The pages that are ready in a tier, read from the cache itself; ``known`` page ids have been given out."""
    if isinstance(cache, OffloadingCache) and tier.level:
        offload = cache.offload
        every = [(0, known)] if cache.chunk_pages == 1 else [(name, 1) for name in names_below(known, cache.chunk_pages)]
        stored = [run for run, is_here in offload.order.find(every) if is_here]
        ready = [part for part, is_written in offload._writing.pieces(stored) if is_written is None]
        return set(pages_of(pages_named(ready, cache.chunk_pages)))
    if isinstance(cache, StoredSteps) and tier.level == 2:
        return set(pages_of([run for run, is_here in cache.storage._order.pieces([(0, known)]) if is_here]))
    nodes = [node for node in cache.residency.tree.root.descendants() if node.state[tier.index] == READY and not node.is_state]
    return {page for node in nodes for page in pages_of(node.runs)}


def names_below(pages: int, share: int) -> list[int]:
    return [page % share * (1 << 48) + page // share for page in range(pages)]


def held_blocks(cache: ServedCache, tier: Tier, known: int, blocks: Blocks, *, last_only: bool) -> set[BlockHash]:
    """The same as events have it; with ``last_only``, of pages that are stored as one the last."""
    unit = 1 if last_only else tier.told_unit
    return {blocks.told(page) for last in held_pages(cache, tier, known) for page in blocks.ending_at(last, unit)}
