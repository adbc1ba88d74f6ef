"""Each engine's messages are read, whatever their age; what is written is read back."""

import pytest
from hypothesis import given, settings
from msgspec import msgpack, structs

from kvsim.errors import UsageError
from kvsim.kv_events.codec import decode
from kvsim.kv_events.dialects import DIALECTS, Dialect, dialect_named, encode
from kvsim.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, EventError, tier_of
from tests.kv_events.written import BATCHES

BLOCK = BlockStored((11, 12), 10, (1, 2, 3, 4), 2)
LONG = b"\x0b" * 32


def read(batch: object) -> EventBatch:
    return decode(msgpack.encode(batch))


def only(event: object) -> Event:
    return read([1.5, [event], 0]).events[0]


WRITTEN: dict[str, tuple[object, BlockStored]] = {
    "vLLM 0.9": (["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None], BLOCK),
    "vLLM 0.11": (["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, 7, "GPU"], structs.replace(BLOCK, lora_id=7, medium="GPU")),
    "vLLM 0.12": (
        ["BlockStored", [LONG], None, [1, 2], 2, None, "GPU", "sql"],
        BlockStored((LONG,), None, (1, 2), 2, medium="GPU", lora_name="sql"),
    ),
    "vLLM 0.23": (
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", None, [["salt"], None], 1, "sliding_window", 4096],
        structs.replace(
            BLOCK,
            medium="GPU",
            extra_keys=(("salt",), None),
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=4096,
        ),
    ),
    "vLLM 0.33": (
        {
            "type": "BlockStored",
            "block_hashes": [11, 12],
            "parent_block_hash": 10,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "session_id": "chat",
            "lookahead_token_ids": [[3], [5]],
        },
        structs.replace(BLOCK, medium="GPU", group_idx=0, session_id="chat", lookahead_token_ids=((3,), (5,))),
    ),
    "vLLM 0.33, offloaded": (
        {
            "type": "BlockStored",
            "block_hashes": [11],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
        },
        BlockStored((11,), None, (), 0, medium="CPU"),
    ),
    "SGLang 0.5.18, salted": (
        ["BlockStored", [-11, 12], 10, [1, 2, 3, 4], 2, None, "CPU_PINNED", {"cache_salt": "mine"}],
        structs.replace(BLOCK, block_hashes=(-11, 12), medium="CPU_PINNED", cache_salt="mine"),
    ),
    "SGLang 0.5.23": (
        {
            "type": "BlockStored",
            "block_hashes": [11, 12],
            "parent_block_hash": 10,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "DISK",
            "cache_salt": "mine",
        },
        structs.replace(BLOCK, medium="DISK", cache_salt="mine"),
    ),
    "SGLang, EAGLE": (
        ["BlockStored", [11], None, [[1, 2], [2, 3]], 2, None, "GPU"],
        BlockStored((11,), None, ((1, 2), (2, 3)), 2, medium="GPU"),
    ),
    "a later one": (
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, None, None, None, None, None, None, None, None, None, None, None, 9],
        BLOCK,
    ),
    "a later one, a map": (
        {
            "type": "BlockStored",
            "block_hashes": [11, 12],
            "parent_block_hash": 10,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "z": {},
        },
        BLOCK,
    ),
}


@pytest.mark.parametrize(("written", "event"), WRITTEN.values(), ids=WRITTEN)
def test_stored_blocks_are_read(written: object, event: BlockStored) -> None:
    assert only(written) == event
    assert type(only(written)) is BlockStored


@pytest.mark.parametrize(
    ("written", "event"),
    [
        (["BlockRemoved", [11]], BlockRemoved((11,))),
        (["BlockRemoved", [LONG], "CPU"], BlockRemoved((LONG,), "CPU")),
        (["BlockRemoved", [11], "GPU", 2], BlockRemoved((11,), "GPU", 2)),
        ({"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}, BlockRemoved((11,), "GPU")),
        (
            {"type": "BlockRemoved", "block_hashes": [11], "medium": "STORAGE", "locality": "REMOTE", "ownership": "fs"},
            BlockRemoved((11,), "STORAGE", None, "REMOTE", "fs"),
        ),
        (["AllBlocksCleared"], AllBlocksCleared()),
        ({"type": "AllBlocksCleared"}, AllBlocksCleared()),
    ],
)
def test_other_events_are_read(written: object, event: Event) -> None:
    assert only(written) == event
    assert type(only(written)) is type(event)


def test_a_batch_is_an_array_or_a_map() -> None:
    assert read([1.5, []]) == EventBatch(1.5, (), None)
    assert read([3, [], 2]) == EventBatch(3.0, (), 2)
    assert read([1.5, [], None, "more"]) == EventBatch(1.5, (), None)
    for events in ([{"type": "AllBlocksCleared"}], [["AllBlocksCleared"]]):
        assert read({"ts": 1.5, "events": events, "data_parallel_rank": 3}) == EventBatch(1.5, (AllBlocksCleared(),), 3)
        assert read({"ts": 1.5, "events": events}).rank is None


def known_to(dialect: Dialect, event: Event) -> Event:
    """The event without what the dialect has no field for."""
    fields = {BlockStored: dialect.stored, BlockRemoved: dialect.removed}.get(type(event), ())  # type: ignore[call-overload]
    if dialect.salt_in_map and isinstance(event, BlockStored):
        fields = (*fields, "cache_salt")
    return type(event)(**{field: getattr(event, field) for field in fields})


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@settings(max_examples=40)
@given(batch=BATCHES)
def test_what_is_written_is_read_back(dialect: Dialect, batch: EventBatch) -> None:
    rank = batch.rank if dialect.has_rank else None
    assert decode(encode(batch, dialect)) == EventBatch(
        batch.ts_s, tuple(known_to(dialect, event) for event in batch.events), rank
    )


def test_maps_have_the_fields_that_an_engine_always_writes() -> None:
    batch = EventBatch(1.5, (BLOCK, BlockRemoved((1,)), AllBlocksCleared()), 0)
    _, vllm, rank = msgpack.decode(encode(batch, DIALECTS["vllm"]))
    hashes, tokens = [11, 12], [1, 2, 3, 4]
    stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": 10, "token_ids": tokens, "block_size": 2}
    assert rank == 0
    assert vllm == [
        {**stored, "lora_id": None, "medium": None, "lora_name": None},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": None},
        {"type": "AllBlocksCleared"},
    ]
    _, sglang, _ = msgpack.decode(encode(batch, DIALECTS["sglang"]))
    assert sglang == [{**stored, "lora_id": None}, {"type": "BlockRemoved", "block_hashes": [1]}, {"type": "AllBlocksCleared"}]


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ([1.5, [["BlockMoved", [1]]], 0], "Invalid value 'BlockMoved'"),
        ([1.5, [{"type": "BlockStored", "block_hashes": [1]}], 0], "missing required field `parent_block_hash`"),
        ([1.5, [["BlockStored", [1], None, ["text"], 16]], 0], "at `$[1][0][3][0]`"),
        ([1.5, [["BlockStored", ["1"], None, [1], 1]], 0], "at `$[1][0][1][0]`"),
        ([1.5, [["BlockStored", [1], None, [1], -1]], 0], ">= 0"),
        ([1.5, [["BlockRemoved", [1], "GPU", -1]], 0], ">= 0"),
        ([float("nan"), [], 0], "its time is no number"),
        ([float("inf"), [], 0], "its time is no number"),
        ([1.5], "at least length 2"),
        ("text", "got `str`"),
        ({"ts": 1.5}, "missing required field `events`"),
    ],
)
def test_a_message_that_is_none_is_said_in_one_line(batch: object, problem: str) -> None:
    with pytest.raises(EventError) as caught:
        read(batch)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_media_have_tiers() -> None:
    assert [tier_of(medium) for medium in (None, "GPU", "CPU", "cpu", "CPU_PINNED")] == ["gpu", "gpu", "cpu", "cpu", "cpu"]
    assert [tier_of(medium) for medium in ("STORAGE", "DISK", "EXTERNAL", "Tape")] == ["disk", "disk", "external", "tape"]


def test_an_unknown_dialect_is_said_in_one_line() -> None:
    assert dialect_named("vllm") is DIALECTS["vllm"]
    with pytest.raises(UsageError, match=r"one of vllm, .*, not 'vlm'; did you mean vllm"):
        dialect_named("vlm")
