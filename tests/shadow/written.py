"""Events for tests: of an engine whose pages are letters, named by the word that they end."""

from kvsim.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

PAGE_TOKENS = 4


def stored(word: str, of: int = 0, **about: object) -> BlockStored:
    """The blocks of a word from the one after ``of`` on: ``stored("abcd", 2)`` stores c and d after ab."""
    return BlockStored(
        block_hashes=tuple(hash_of(word[: end + 1]) for end in range(of, len(word))),
        parent_block_hash=hash_of(word[:of]) if of else None,
        token_ids=tuple(ord(letter) for letter in word[of:] for _ in range(PAGE_TOKENS)),
        block_size=PAGE_TOKENS,
        **about,  # type: ignore[arg-type]
    )


def removed(*words: str, **about: object) -> BlockRemoved:
    """The last block of each word."""
    return BlockRemoved(block_hashes=tuple(map(hash_of, words)), **about)  # type: ignore[arg-type]


def batch(at_s: float, *events: Event, rank: int | None = None) -> EventBatch:
    return EventBatch(ts_s=at_s, events=events, rank=rank)


def hash_of(word: str) -> bytes:
    return b"engine's " + word.encode()


CLEARED = AllBlocksCleared()
