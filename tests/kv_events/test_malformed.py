"""Whatever arrives as a message is read or refused in one line, and nothing else happens."""

from random import Random

import pytest
from msgspec import msgpack

from kvsim.kv_events.codec import decode
from kvsim.kv_events.dialects import DIALECTS, encode
from kvsim.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventError
from tests.kv_events.written import EXAMPLE

SEED, MESSAGES = 37, 10_000
VALID = [encode(EXAMPLE, dialect) for dialect in DIALECTS.values()]


def flipped(random: Random, data: bytearray) -> bytes:
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def cut(random: Random, data: bytearray) -> bytes:
    start, end = sorted(random.choices(range(len(data)), k=2))
    return bytes(data[:start] + data[end:])


def doubled(random: Random, data: bytearray) -> bytes:
    start, end = sorted(random.choices(range(len(data)), k=2))
    return bytes(data[:end] + data[start:])


def crossed(random: Random, data: bytearray) -> bytes:
    other = random.choice(VALID)
    return bytes(data[: random.randrange(len(data))]) + other[random.randrange(len(other)) :]


def noise(random: Random, data: bytearray) -> bytes:
    return random.randbytes(random.randrange(len(data)))


def replaced(random: Random, data: bytearray) -> bytes:
    """A value of another type in the place of an event or a field."""
    values = (None, True, -1, 1e300, "\x00\n", b"\xff", [], {}, [[]], {"type": 1}, {1: [2]}, 1 << 63)
    batch = msgpack.decode(bytes(data))
    events = batch[1]
    at = random.randrange(len(events))
    if random.random() < 0.2:
        events[at] = random.choice(values)
    elif isinstance(events[at], dict):
        events[at][random.choice([*events[at], "new"])] = random.choice(values)
    else:
        events[at][random.randrange(len(events[at]))] = random.choice(values)
    return msgpack.encode(batch)


DAMAGES = (flipped, cut, doubled, crossed, noise, replaced)


def check(batch: EventBatch) -> None:
    """What has been read is of the types that it is said to be."""
    assert isinstance(batch.ts_s, float) and isinstance(batch.rank, int | None) and isinstance(batch.events, tuple)
    for event in batch.events:
        assert isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared)
        if isinstance(event, BlockStored | BlockRemoved):
            assert all(isinstance(block, int | bytes) for block in event.block_hashes)
            assert isinstance(event.medium, str | None) and isinstance(event.group_idx, int | None)
        if isinstance(event, BlockStored):
            assert isinstance(event.parent_block_hash, int | bytes | None) and event.block_size >= 0
            assert all(isinstance(token, int) or len(token) == 2 for token in event.token_ids)
            assert all(isinstance(text, str | None) for text in (event.lora_name, event.cache_salt, event.session_id))


def outcome(data: bytes) -> str:
    try:
        check(decode(data))
    except EventError as error:
        return "refused" if str(error).isprintable() and len(str(error)) < 250 else f"refused in other words: {error}"
    return "read"


def test_ten_thousand_malformed_messages_are_read_or_refused() -> None:
    random = Random(SEED)
    outcomes = [outcome(random.choice(DAMAGES)(random, bytearray(random.choice(VALID)))) for _ in range(MESSAGES)]
    assert set(outcomes) == {"refused", "read"}
    assert outcomes.count("refused") > MESSAGES // 2
    assert outcomes.count("read") > MESSAGES // 100, "some damage leaves a message"


def test_each_beginning_of_a_message_is_refused() -> None:
    for data in VALID:
        assert {outcome(data[:end]) for end in range(len(data))} == {"refused"}
        assert outcome(data) == "read"
        assert outcome(data + b"\x00") == "refused"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\x92\xcb" + b"\x00" * 8 + b"\xdd\xff\xff\xff\xff",
        b"\x91" * 200_000,  # depth
        b"\x93\x01\x91\x99\xabBlockStored\x91\x01\xc0\x90\x00\xc0\xc0\xc0\x91" + b"\x91" * 200_000 + b"\xc0",  # in what is any
        msgpack.encode([1.5, [["BlockStored", [1], None, [], 0]], 0]).replace(b"BlockStored", b"Block\xff\xfe\xfdred"),
        b"\x92\x01\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\xc7\x0c\xff" + b"\xff" * 12,  # a time beyond all years
    ],
    ids=["nothing", "long", "long within", "deep", "deep within", "no text", "no time"],
)
def test_hostile_messages_are_refused(data: bytes) -> None:
    assert outcome(data) == "refused"
