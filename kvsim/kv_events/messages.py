"""What an engine tells of its cache, whichever engine it is and however it writes it."""

from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from kvsim.errors import UsageError

BlockHash = int | bytes
"""A block and everything before it, as the engine wrote it: equal in the same engine (and group), and nothing else is certain."""
Token = int | tuple[int, int]
"""A token id; SGLang with EAGLE tells pairs of neighbours."""
Size = Annotated[int, Meta(ge=0, le=1 << 24)]
Index = Annotated[int, Meta(ge=0, le=1 << 31)]

GPU, CPU, DISK, EXTERNAL = "gpu", "cpu", "disk", "external"
TIER_OF_MEDIUM = {
    "gpu": GPU,
    "cpu": CPU,
    "cpu_pinned": CPU,
    "cpu_tier1": CPU,
    "cpu_tier2": CPU,
    "storage": DISK,
    "disk": DISK,
    "external": EXTERNAL,
}
"""Media in lower case, and where they are. vLLM: GPU, CPU, STORAGE. SGLang: GPU, CPU_PINNED, DISK, EXTERNAL. Connectors: cpu."""


class EventError(UsageError):
    """A message is not one of KV events; the text says why, in one line."""


class BlockStored(Struct, frozen=True, tag=True, gc=False):
    """Blocks, each the next one's parent, are in a medium; the same may be told again.

    ``token_ids`` are those of all blocks, so ``block_size`` for each hash. They differ where an engine leaves out blocks that
    can never be hit (vLLM with sliding windows), and are empty, with a ``block_size`` of 0, where it does not know them any more
    (vLLM's offloaded blocks unless ``self_describing_kv_events``).
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """The block before the first one; None at the beginning of a prompt."""
    token_ids: tuple[Token, ...]
    block_size: Size
    """In tokens."""
    lora_id: int | None = None
    """Superseded by ``lora_name``."""
    medium: str | None = None
    """As the engine names it; None, of engines that know one medium only, is the GPU. See ``tier_of``."""
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """vLLM: what went into each block's hash besides tokens: the adapter, (image, offset), the cache salt, embeddings."""
    group_idx: Index | None = None
    """vLLM: the group of layers that the blocks belong to. Hashes of two groups can be equal."""
    kv_cache_spec_kind: str | None = None
    """vLLM: full_attention, sliding_window, mamba, ..."""
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """vLLM: LOCAL if the publisher itself has them."""
    ownership: str | None = None
    """vLLM: the secondary tier that tells it."""
    session_id: str | None = None
    """Of the request that stored the blocks, or had them reported."""
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None
    """vLLM: tokens beyond each block that its hash depends on."""
    cache_salt: str | None = None
    """SGLang; hashes depend on it already. vLLM tells it in ``extra_keys`` of a prompt's first block."""


class BlockRemoved(Struct, frozen=True, tag=True, gc=False):
    """Blocks are no longer in a medium."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: Index | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True, gc=False):
    """No block is left: the cache has been reset."""

    medium: str | None = None
    """If given, only there. vLLM and SGLang never give it."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
KINDS: tuple[type[Event], ...] = (BlockStored, BlockRemoved, AllBlocksCleared)


class EventBatch(NamedTuple):
    """What one engine tells at a time: vLLM and SGLang, what has happened in a step."""

    ts_s: float
    """When, by the engine's clock, in seconds since 1970."""
    events: tuple[Event, ...]
    rank: int | None = None
    """The data-parallel rank that tells it; the oldest engines do not say."""


@lru_cache(64)
def tier_of(medium: str | None) -> str:
    """Return gpu, cpu, disk or external for what an engine calls a medium; an unknown one in lower case."""
    return GPU if medium is None else TIER_OF_MEDIUM.get(medium.lower(), medium.lower())
