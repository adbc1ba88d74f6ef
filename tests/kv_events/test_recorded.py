"""Recorded streams are read as they were written, by kvsim or by a few lines without it."""

import gzip
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import UsageError
from kvsim.kv_events.recorded import MAGIC, Message, RecordedWriter, read_recorded, write_recorded

MESSAGES = [
    Message(1.5, 0, 0, b"", b"one"),
    Message(2.5, 1, 3, b"kv@", b""),
    Message(2.5, (1 << 64) - 1, 65535, b"t", b"\0" * 5000),
]
ANY = st.builds(
    Message,
    received_s=st.floats(0, 2e9),
    sequence=st.integers(0, (1 << 64) - 1),
    rank=st.integers(0, 65535),
    topic=st.binary(max_size=9),
    payload=st.binary(max_size=99),
)


def test_messages_are_read_as_they_were_written(tmp_path: Path) -> None:
    @given(st.lists(ANY, max_size=5))
    def check(messages: list[Message]) -> None:
        write_recorded(tmp_path / "stream.gz", messages)
        assert list(read_recorded(tmp_path / "stream.gz")) == messages

    check()


def test_a_script_without_kvsim_writes_them(tmp_path: Path) -> None:
    """As the file's description says."""
    with gzip.open(tmp_path / "events.kvev.gz", "wb") as file:
        file.write(b"KVEVENTS1\n")
        file.write(struct.pack(">dQHHI", 3.0, 7, 0, len(b"kv"), len(b"payload")) + b"kv" + b"payload")
    assert list(read_recorded(tmp_path / "events.kvev.gz")) == [Message(3.0, 7, 0, b"kv", b"payload")]


def test_what_was_flushed_is_there_when_the_writer_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "stream.gz"
    with path.open("wb") as file:
        writer = RecordedWriter(file)
        for message in MESSAGES:
            writer.write(message)
        writer.flush()
        flushed = path.stat().st_size
        writer.write(MESSAGES[0])
        writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:flushed])
    assert list(read_recorded(path)) == MESSAGES


def test_a_file_cut_off_anywhere_has_the_messages_before(tmp_path: Path) -> None:
    path = tmp_path / "stream.gz"
    write_recorded(path, MESSAGES)
    whole = path.read_bytes()
    lengths = set()
    for end in range(len(whole) - 1, 40, -1):
        path.write_bytes(whole[:end])
        read = list(read_recorded(path))
        assert read == MESSAGES[: len(read)]
        lengths.add(len(read))
    assert lengths >= {0, 3}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"KVEVENTS1\n", "Not a gzipped file"),
        (gzip.compress(b"something else"), "not a recorded stream"),
        (gzip.compress(b""), "not a recorded stream"),
        (gzip.compress(MAGIC + struct.pack(">dQHHI", 1.0, 5, 0, 0, 1 << 31)), "after sequence number 5: damaged"),
        (gzip.compress(MAGIC)[:12] + b"\xff\xff\xff" + gzip.compress(MAGIC)[15:], "damaged|not a recorded stream|CRC"),
    ],
    ids=["not packed", "other text", "empty", "huge", "damaged"],
)
def test_what_is_no_recorded_stream_is_said_in_one_line(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "stream.gz"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=problem) as caught:
        list(read_recorded(path))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        list(read_recorded(tmp_path / "none.gz"))
