"""Batches of events to write and to read."""

from hypothesis import strategies as st

from kvsim.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

HASHES = st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(min_size=8, max_size=32)
WORDS = st.none() | st.text(max_size=8)
INDICES = st.none() | st.integers(0, 3)
MEDIA = st.none() | st.sampled_from(["GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL", "cpu"])


def tuples(of: st.SearchStrategy[object], most: int = 4) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(of, max_size=most).map(tuple)


STORED = st.builds(
    BlockStored,
    block_hashes=tuples(HASHES),
    parent_block_hash=st.none() | HASHES,
    token_ids=tuples(st.integers(0, 1 << 20)) | tuples(st.tuples(st.integers(0, 9), st.integers(0, 9))),
    block_size=st.integers(0, 512),
    lora_id=INDICES,
    medium=MEDIA,
    lora_name=WORDS,
    extra_keys=st.none() | tuples(st.none() | tuples(st.text(max_size=3) | st.binary(max_size=3) | st.integers(0, 9))),
    group_idx=INDICES,
    kv_cache_spec_kind=WORDS,
    kv_cache_spec_sliding_window=INDICES,
    locality=WORDS,
    ownership=WORDS,
    session_id=WORDS,
    lookahead_token_ids=st.none() | tuples(tuples(st.integers(0, 9))),
    cache_salt=WORDS,
)
REMOVED = st.builds(BlockRemoved, block_hashes=tuples(HASHES), medium=MEDIA, group_idx=INDICES, locality=WORDS, ownership=WORDS)
EVENTS: st.SearchStrategy[Event] = STORED | REMOVED | st.just(AllBlocksCleared())
BATCHES = st.builds(EventBatch, ts_s=st.floats(0, 2e9), events=tuples(EVENTS), rank=INDICES)

EXAMPLE = EventBatch(
    1_700_000_000.25,
    (
        BlockStored(
            (1, b"second"),
            None,
            (5, 6, 7, 8),
            2,
            medium="GPU",
            lora_name="adapter",
            extra_keys=((b"salt", 3), None),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            session_id="session",
        ),
        BlockStored((2,), 1, (), 0, medium="CPU", cache_salt="salt"),
        BlockRemoved((1, (1 << 64) - 1), "CPU", 0),
        AllBlocksCleared(),
    ),
    1,
)
