"""A recording can be replayed, tells no content, and survives whatever ends its writer."""

import errno
import json
import os
from pathlib import Path

import pytest

from kvsim.errors import UsageError
from kvsim.pages.extents import count_pages
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.recording import Recording
from kvsim.shadow.sources.salt import Salt
from kvsim.trace.mooncake import Mooncake

SALT = Salt(b"s" * 32)
A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")
FIRST = LiveRequest(1000.0, (A, B), 33, (C,), 20, session="alice", cached_tokens=0)
SECOND = LiveRequest(1000.5, (A, B, C), 50, (), 0, session="alice")
OTHER = LiveRequest(999.0, (A, D), 40, (), 1)


def opened(path: Path, *, goes_on: bool = False, page_tokens: int = 16) -> Recording:
    return Recording(path, page_tokens, SALT, lambda: "", goes_on=goes_on)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_a_recording_is_a_trace_with_the_same_shared_pages(path: Path) -> None:
    record = opened(path)
    for request in (FIRST, SECOND, OTHER):
        record.write(request)
    record.close()
    first, second, other = Mooncake(path=str(path), block_tokens=16).load(16).requests
    assert [request.arrival_s for request in (first, second, other)] == [0.0, 0.5, 0.5]
    assert [request.prompt_tokens for request in (first, second, other)] == [33, 50, 40]
    assert (first.session, second.session, other.session, first.output_tokens) == (0, 0, -1, 20)
    assert first.output_runs is not None and count_pages(first.output_runs) == 1
    assert second.runs == ((0, 3),) and first.runs == ((0, 2),) and first.output_runs == ((2, 1),)
    assert other.runs == ((0, 1), (3, 1)) and record.lines == 3


def test_a_recording_has_neither_keys_nor_names(path: Path) -> None:
    record = opened(path)
    record.write(FIRST)
    record.close()
    text = path.read_text()
    fields = json.loads(text)
    assert "alice" not in text and A.hex() not in text and str(int.from_bytes(A[:8], "big")) not in text
    assert fields.keys() == {
        "timestamp", "block_size", "session_id", "input_length", "output_length", "hash_ids", "output_hash_ids",
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_line_is_there_as_soon_as_it_is_written(path: Path) -> None:
    record = opened(path)
    for number in range(1, 4):
        record.write(FIRST)
        assert path.read_bytes().count(b"\n") == number and path.read_bytes().endswith(b"}\n")


def test_a_recording_goes_on_where_a_killed_one_has_ended(path: Path) -> None:
    record = opened(path)
    record.write(FIRST)
    record.close()
    path.write_bytes(path.read_bytes() + b'{"timestamp": 12, "inp')
    again = opened(path, goes_on=True)
    again.write(OTHER._replace(arrival_s=0.0))
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2 and lines[1]["timestamp"] == 1_000_000.0 and "block_size" not in lines[1]
    assert lines[1]["hash_ids"][0] == lines[0]["hash_ids"][0]


@pytest.mark.parametrize(
    ("content", "goes_on", "page_tokens", "problem"),
    [
        (b"{}\n", False, 16, "exists, and its hashes have another salt: choose another name"),
        (b"{}\n", True, 16, "is no recording of kvsim shadow"),
        (b"no newline", True, 16, "is no recording of kvsim shadow"),
        (b'{"block_size": 16, "timestamp": 1}\n', True, 32, "has pages of 16 tokens, not 32"),
    ],
)
def test_a_file_that_cannot_go_on_is_refused_and_kept(
    content: bytes, goes_on: bool, page_tokens: int, problem: str, path: Path
) -> None:
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"shadow.record: {path} {problem}"):
        opened(path, goes_on=goes_on, page_tokens=page_tokens)
    assert path.read_bytes() == content


def test_a_full_disk_costs_the_line_and_no_half_of_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, write = opened(path), os.write
    record.write(FIRST)
    whole = path.read_bytes()
    room = [10]

    def short(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: room.pop()])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(UsageError, match=rf"shadow.record: cannot write {path}: No space left on device"):
        record.write(SECOND)
    assert path.read_bytes() == whole
    monkeypatch.setattr(os, "write", write)
    record.write(SECOND)
    assert path.read_bytes().startswith(whole) and path.read_bytes().count(b"\n") == 2


def test_a_device_without_room_is_said_in_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    record = opened(Path("/dev/full"))
    with pytest.raises(UsageError, match=r"shadow.record: cannot write /dev/full: No space left on device"):
        record.write(FIRST)


def test_a_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"shadow.record: cannot write .*: No such file or directory"):
        opened(tmp_path / "missing" / "trace.jsonl")
