"""Hashes of blocks as vLLM and SGLang compute them by default, so that equal prompts have the ids that a real engine tells.

Each is a chain: the hash of a block depends on its tokens and on the hash of the block before it.
"""

import pickle
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

MASK = (1 << 64) - 1
SEED = "vllm-none-hash"
"""What vLLM hashes for the block before the first one (DEFAULT_NONE_HASH_SEED), unless PYTHONHASHSEED is set."""


class BlockHashing(NamedTuple):
    """How an engine hashes blocks, and what it tells of a hash."""

    digest: Callable[[bytes | None, Sequence[int], str | None], bytes]
    """Takes the digest of the block before, None for a first block; the block's tokens; and the cache salt."""
    told: Callable[[bytes], int]
    """Turns a digest into the integer that events have."""


def vllm_digest(parent: bytes | None, tokens: Sequence[int], salt: str | None = None) -> bytes:
    """vLLM 0.33 with ``--prefix-caching-hash-algo sha256``, its default: SHA-256 of a pickle of parent, tokens and extra keys.

    The salt is an extra key of the first block only.
    """
    extra_keys = (("cache_salt", salt),) if salt and parent is None else None
    return _of_pickle((NO_PARENT if parent is None else parent, tuple(tokens), extra_keys))


def vllm_told(digest: bytes) -> int:
    """The last 64 bits (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES, vLLM's default), without a sign."""
    return int.from_bytes(digest, "big") & MASK


def sglang_digest(parent: bytes | None, tokens: Sequence[int], salt: str | None = None) -> bytes:
    """SGLang 0.5.23: SHA-256 of the parent's digest, or that of the salt, and of the tokens as little-endian 32-bit words."""
    if parent is None and salt is not None:
        parent = sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    return sha256((parent or b"") + b"".join([(token & 0xFFFFFFFF).to_bytes(4, "little") for token in tokens])).digest()


def sglang_told(digest: bytes) -> int:
    """The first 64 bits, with a sign."""
    return int.from_bytes(digest[:8], "big", signed=True)


def _of_pickle(value: object) -> bytes:
    return sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


NO_PARENT = _of_pickle(SEED)
VLLM = BlockHashing(vllm_digest, vllm_told)
SGLANG = BlockHashing(sglang_digest, sglang_told)
