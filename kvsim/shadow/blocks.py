"""Blocks as events tell of them: what each follows, and the key that it has."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from msgspec import msgpack

from kvsim.kv_events.messages import BlockHash, BlockStored
from kvsim.shadow.live import ChainKeys, token_bytes


class Block:
    """A block, and the one before it. One that has left lives on as long as others follow it."""

    __slots__ = ("depth", "generation", "is_rooted", "key", "parent")

    def __init__(self, key: bytes, parent: "Block | None", *, is_rooted: bool, generation: int) -> None:
        self.key = key
        """The chain key of its tokens and of all before them."""
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        """Blocks up to this one, as far as they are known."""
        self.is_rooted = is_rooted
        """Whether it is known from the beginning of its prompt on."""
        self.generation = generation
        """The number of gaps before it was last told of."""

    def path(self) -> list[bytes]:
        """Return the keys of the blocks up to this one."""
        keys: list[bytes] = []
        block: Block | None = self
        while block is not None:
            keys.append(block.key)
            block = block.parent
        keys.reverse()
        return keys


def new_block(keys: ChainKeys, parent: Block | None, text: bytes, event: BlockStored, generation: int) -> Block:
    """Make the block with this text (``page_texts``) after ``parent``; None is the beginning of a prompt.

    LoRA adapters and cache salts are in the hashes of engines; here they enter the key before the first block.
    """
    if parent is not None:
        return Block(keys.after(parent.key, text), parent, is_rooted=parent.is_rooted, generation=generation)
    lora, salt = event.lora_name if event.lora_name is not None else event.lora_id, event.cache_salt
    root = keys.root(None if lora is None and salt is None else (lora, salt))
    return Block(keys.after(root, text), None, is_rooted=True, generation=generation)


def contradicts(block: Block, before: Block | None) -> bool:
    """Whether a known block follows another one than ``before``, whose path is known from the beginning of its prompt on.

    What was told of it earlier was less, or nonsense. If the path of ``before`` is not known, the block's own is better.
    """
    known = block.parent
    if known is before or before is not None and not before.is_rooted:
        return False
    return known is None or before is None or known.key != before.key


def unknown_block(keys: ChainKeys, hash_: BlockHash, generation: int) -> Block:
    """Make a block of which only the engine's hash is known, so that what follows it is the same path whenever it is told."""
    key = keys.after(keys.root(), b"unknown" + msgpack.encode(hash_))
    return Block(key, None, is_rooted=False, generation=generation)


def page_texts(event: BlockStored) -> list[bytes]:
    """Return what tells each block of an event from others after the same one, and says nothing to anyone without the salt.

    These are its tokens and its extra keys (images, a salt, embeddings). The engine's hash of the block takes their place where
    it does not tell the tokens, or not those of each block.
    """
    hashes, extras = event.block_hashes, event.extra_keys or ()
    tells_tokens = event.token_ids and len(event.token_ids) == event.block_size * len(hashes)
    words = _words(event.token_ids) if tells_tokens else b""
    if not words:
        return [b"hash" + msgpack.encode(hash_) for hash_ in hashes]
    width = len(words) // len(hashes)
    texts = [words[at : at + width] for at in range(0, len(words), width)]
    for at, extra in enumerate(extras[: len(texts)]):
        if extra:
            texts[at] += msgpack.encode(extra)
    return texts


def _words(tokens: Sequence[Any]) -> bytes:
    """Return tokens, or pairs of them, as bytes; nothing if they are none."""
    try:
        return token_bytes(tokens if type(tokens[0]) is int else tuple(chain.from_iterable(tokens)))
    except (TypeError, ValueError):
        return b""
