"""What one engine has, by its own events: its blocks by group of layers and medium."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvsim.kv_events.messages import GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, tier_of
from kvsim.shadow.blocks import Block, contradicts, new_block, page_texts, unknown_block
from kvsim.shadow.live import ChainKeys

Place = tuple[int, str]
"""A group of layers and a tier."""


class Told(NamedTuple):
    """What a BlockStored has told."""

    parent: Block | None
    """None at the beginning of a prompt."""
    blocks: list[Block]
    known: int
    """How many of its first blocks were in that medium before."""
    known_below: int
    """How many of its blocks, from the first one that was not, were in another medium."""

    @property
    def is_report(self) -> bool:
        """Whether it tells of nothing new from the beginning of a prompt on: blocks that were reused."""
        return self.parent is None and self.known == len(self.blocks) > 0


class EngineTree:
    """The blocks of one engine, or of one data-parallel rank of it.

    A block is in a medium from a BlockStored on until a BlockRemoved. vLLM stores a block on the GPU a second time if it has to
    compute it again, as the last one of a prompt that it has as a whole, and then removes it twice, so copies on the GPU are
    counted. A report of reused blocks is no copy. Groups, whose hashes may be the same, are kept apart.

    An event of offloaded blocks may name neither their tokens nor what they follow (vLLM); then they are known by their hashes,
    or not at all.

    After a gap, blocks may be missing here, and others may be gone there. The tree counts as known again when it was cleared, or
    when every block from before the gap has been told of again or removed, and as many blocks have been removed since as it has.
    """

    def __init__(self, keys: ChainKeys) -> None:
        self.stored = self.removed = self.cleared = 0
        """Blocks in events of that kind, those told again included; events of all being cleared."""
        self.unknown_parents = self.unknown_removed = 0
        self.gaps = self.lost_batches = 0
        self.forgotten = 0
        """Blocks forgotten because memory was short."""
        self.places: dict[Place, dict[BlockHash, int]] = {}
        """The copies of each block by group and tier."""
        self._keys = keys
        self._blocks: dict[int, dict[BlockHash, Block]] = {}
        """By group, the blocks that are anywhere."""
        self._generation = 0
        self._stale = 0
        """Blocks that were not told of since the last gap."""
        self._removed_at_gap: int | None = None
        """``removed`` at the last gap; None if there was none since the tree was empty for certain."""

    # --- events --------------------------------------------------------------------------------------------------------------

    def store(self, event: BlockStored) -> Told:
        """Take blocks that are stored."""
        hashes, group, tier = event.block_hashes, event.group_idx or 0, tier_of(event.medium)
        if not hashes:
            return Told(None, [], 0, 0)
        blocks, here = self._blocks.setdefault(group, {}), self.places.setdefault((group, tier), {})
        parent = self._parent(event.parent_block_hash, blocks)
        known = _leading(hashes, [here])
        others = [held for place, held in self.places.items() if place[0] == group and held is not here]
        below = _leading(hashes[known:], others) if others else 0
        told = Told(parent, [], known, below)
        adds_copies = tier == GPU and not (event.parent_block_hash is None and known == len(hashes))
        before, is_blind = parent, parent is None and not event.token_ids
        for hash_, text in zip(hashes, page_texts(event), strict=True):
            block = blocks.get(hash_)
            if block is not None and block.generation < self._generation:
                block.generation = self._generation
                self._stale -= 1
            if is_blind:
                block = blocks[hash_] = block or unknown_block(self._keys, hash_, self._generation)
            elif block is None or contradicts(block, before):
                block = blocks[hash_] = new_block(self._keys, before, text, event, self._generation)
            here[hash_] = here.get(hash_, 0) + 1 if adds_copies else 1
            told.blocks.append(block)
            before = block
        self.stored += len(hashes)
        return told

    def _parent(self, hash_: BlockHash | None, blocks: dict[BlockHash, Block]) -> Block | None:
        """Return the block before the first one of an event."""
        if hash_ is None:
            return None
        parent = blocks.get(hash_)
        if parent is None:
            self.unknown_parents += 1
            parent = unknown_block(self._keys, hash_, self._generation)
        return parent

    def remove(self, event: BlockRemoved) -> list[Block | None]:
        """Take blocks that are no longer in a medium; of those stored twice, a copy. Returns them; None for one not known."""
        group, gone = event.group_idx or 0, list[Block | None]()
        here = self.places.get((group, tier_of(event.medium)), {})
        for hash_ in event.block_hashes:
            copies = here.get(hash_, 0)
            gone.append(self._blocks[group][hash_] if copies else None)
            if copies > 1:
                here[hash_] = copies - 1
            elif copies:
                del here[hash_]
                self._leave(hash_, group)
            else:
                self.unknown_removed += 1
        self.removed += len(event.block_hashes)
        if not here:
            self._tidy()
        return gone

    def clear(self, event: AllBlocksCleared) -> None:
        """Take note that no block is left, or none in a medium."""
        self.cleared += 1
        if event.medium is None:
            self.restart()
            return
        for (group, tier), held in self.places.items():
            if tier == tier_of(event.medium):
                gone = list(held)
                held.clear()
                for hash_ in gone:
                    self._leave(hash_, group)
        self._tidy()

    def _tidy(self) -> None:
        """Keep no place in which nothing is left: there may be any number of names."""
        self.places = {place: held for place, held in self.places.items() if held}
        self._blocks = {group: blocks for group, blocks in self._blocks.items() if blocks}

    def restart(self) -> None:
        """Take note that the engine has nothing, for certain."""
        self.places.clear()
        self._blocks.clear()
        self._stale, self._removed_at_gap = 0, None

    def lose(self, batches: int) -> None:
        """Take note that events were lost."""
        self.gaps += 1
        self.lost_batches += batches
        self._generation += 1
        self._stale, self._removed_at_gap = self.blocks, self.removed

    def _leave(self, hash_: BlockHash, group: int) -> None:
        """Forget a block that has left a medium, if it is in no other."""
        for place, held in self.places.items():
            if place[0] == group and hash_ in held:
                return
        block = self._blocks[group].pop(hash_)
        self._stale -= block.generation < self._generation

    # --- what is known -------------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Number of blocks, each once for all media."""
        return sum(map(len, self._blocks.values()))

    @property
    def stale(self) -> int:
        """Number of blocks that were not told of since the last gap."""
        return self._stale

    @property
    def is_known(self) -> bool:
        """Whether this is all that the engine has, as far as anyone can tell."""
        at_gap = self._removed_at_gap
        return at_gap is None or not self._stale and self.removed - at_gap >= max(1, self.blocks)

    def pages(self) -> dict[str, int]:
        """Return the copies by medium and, if there are several groups, by group."""
        has_groups = len({group for (group, _), held in self.places.items() if held}) > 1
        return {
            f"{tier}, group {group}" if has_groups else tier: sum(held.values())
            for (group, tier), held in sorted(self.places.items())
            if held
        }

    def forget_oldest(self, blocks: int) -> None:
        """Forget blocks, those known for longest first; the tree is then not all that the engine has."""
        left = blocks
        for group, known in self._blocks.items():
            for hash_ in list(islice(known, left)):
                left -= 1
                self.forgotten += 1
                for place, held in self.places.items():
                    if place[0] == group:
                        held.pop(hash_, None)
                self._stale -= known.pop(hash_).generation < self._generation
        self._tidy()
        self._removed_at_gap = self.removed

    def check(self) -> None:
        """Recount everything. Raises AssertionError."""
        stale = 0
        for group, blocks in self._blocks.items():
            held = [here for place, here in self.places.items() if place[0] == group]
            for hash_, block in blocks.items():
                assert any(hash_ in here for here in held), f"{hash_!r} is nowhere"
                parent = block.parent
                assert block.depth == (1 if parent is None else parent.depth + 1), f"{hash_!r}: depth"
                assert parent is None or block.is_rooted == parent.is_rooted, f"{hash_!r}: root"
                stale += block.generation < self._generation
            assert all(hash_ in blocks for here in held for hash_ in here), "a block in a medium is unknown"
        assert all(copies > 0 for here in self.places.values() for copies in here.values()), "a block without copies"
        assert all(self.places.values()) and all(self._blocks.values()), "a place without blocks"
        assert stale == self._stale, f"{self._stale} stale blocks, but {stale} counted"


def _leading(hashes: Sequence[BlockHash], places: Sequence[dict[BlockHash, int]]) -> int:
    """Return how many of the first blocks are in any of these places."""
    for at, hash_ in enumerate(hashes):
        for held in places:
            if hash_ in held:
                break
        else:
            return at
    return len(hashes)
