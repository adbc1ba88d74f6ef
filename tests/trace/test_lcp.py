"""libCacheSim's binary format of prompts as paths of blocks; files are made by the description of its layout."""

import gzip
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvsim.__main__ import main
from kvsim.api import load_trace
from kvsim.errors import TraceError, UsageError
from kvsim.trace import stored
from kvsim.trace.bailian import Bailian
from kvsim.trace.lcp import Lcp

MAGIC = 0x6C63736C6C6D0001
TYPES = ("text", "search")
Row = tuple[int, int, float, Sequence[int], int, int, int]
"""Chat, parent chat, time (s), ids, prompt tokens, answer tokens and type of a request."""
ROWS: list[Row] = [
    (7, -1, 1000.0, [100, 101, 102], 40, 5, 0),
    (8, 7, 1002.5, [100, 101, 900], 48, 6, 1),
    (9, -1, 1001.0, [2**64 - 1], 16, 7, 0),
    (9, -1, 1003.0, [2**64 - 1, 5], 30, 8, 0),
]


def written(rows: Sequence[Row], tokens: int = 16, types: Sequence[str] = TYPES, **header: int) -> bytes:
    """A file with these requests; ``header`` replaces numbers of its header."""
    said = {
        "magic": MAGIC, "version": 1, "requests": len(rows), "blocks": sum(len(row[3]) for row in rows), "unique": 0, "most": 0,
        "first_us": 0, "last_us": 0, "tokens": tokens, "kind": 1, "next": 0, "types": len(types), "end": MAGIC,
    } | header  # fmt: skip
    content = pack("<QQ", said["magic"], said["version"])
    content += pack("<6q", *(said[name] for name in ("requests", "blocks", "unique", "most", "first_us", "last_us")))
    content += pack("<i4B", said["tokens"], said["kind"], said["next"], said["types"], 0)
    content += b"".join(name.encode().ljust(16, b"\0") for name in (*types, *[""] * (8 - len(types))))
    content += bytes(998 * 8) + pack("<Q", said["end"])
    assert len(content) == 8192
    for chat, parent, time_s, ids, prompt_tokens, output_tokens, kind in rows:
        content += pack("<QqqIIIIB7x", chat, parent, round(1e6 * time_s), len(ids), prompt_tokens, output_tokens, 1, kind)
        content += b"".join(pack("<Qq", one, -1) for one in ids)
    return content


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Writes content to a file and returns its path."""

    def write(content: bytes, name: str = "log.lcp") -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return write


def test_requests_have_their_paths_times_and_sessions(make: Any) -> None:
    trace = Lcp(path=make(written(ROWS))).load(16)
    assert [(r.arrival_s, r.runs, r.prompt_tokens, r.output_tokens, r.session, r.turn, r.kind) for r in trace.requests] == [
        (0.0, ((0, 2),), 40, 5, 0, 0, "text"),
        (1.0, ((3, 1),), 16, 7, 1, 0, "text"),
        (2.5, ((0, 3),), 48, 6, 0, 1, "search"),
        (3.0, ((3, 1),), 30, 8, 1, 1, "text"),
    ]
    assert trace.block_tokens == 16
    finer = Lcp(path=make(written(ROWS)), tail="all", limit=2).load(8).requests
    assert [request.runs for request in finer] == [((0, 5),), ((0, 4), (6, 2))]


def test_a_prompt_has_the_pages_that_the_same_lines_have(make: Any, write: Any) -> None:
    lines = [
        {"chat_id": at, "parent_chat_id": parent if parent != 9 else 2, "timestamp": time_s, "type": TYPES[kind], "turn": 1,
         "input_length": prompt, "output_length": output, "hash_ids": list(ids)}
        for at, (_, parent, time_s, ids, prompt, output, kind) in enumerate(ROWS)
    ]  # fmt: skip
    for page_tokens in (8, 16, 32):
        expected = Bailian(path=write(*lines)).load(page_tokens).requests
        found = Lcp(path=make(written(ROWS))).load(page_tokens).requests
        assert [(r.runs, r.prompt_pages, r.arrival_s) for r in found] == [(r.runs, r.prompt_pages, r.arrival_s) for r in expected]


@pytest.mark.parametrize("name", ["a.lcp", "a.lcp.zst", "a.lcsllm", "a.lcsllm.gz", "a"])
def test_a_file_is_recognised(name: str, make: Any, tmp_path: Path) -> None:
    pack_up = {".zst": zstandard.ZstdCompressor().compress, ".gz": gzip.compress}.get(Path(name).suffix, bytes)
    rows = [(*row[:4], 4 * row[4] // 16 * 16, *row[5:]) for row in [(1, -1, 0.0, [1, 2], 32, 3, 0)]]
    path = make(pack_up(written(rows, tokens=64)), name)
    assert load_trace(path=path).block_tokens == 64
    assert main(["replay", f"trace.path={path}", f"output={tmp_path / 'out'}"]) == 0


def test_a_magic_number_of_the_later_name_is_taken_if_it_is_at_both_ends(make: Any) -> None:
    later = 0x6C63700000000001
    assert len(Lcp(path=make(written(ROWS, magic=later, end=later))).load(16).requests) == 4
    with pytest.raises(TraceError, match="has no header of libCacheSim's binary format"):
        Lcp(path=make(written(ROWS, magic=later))).load(16)


def test_a_long_trace_is_stored(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(written(ROWS))
    known = Lcp(path=path).load(16).requests
    monkeypatch.setattr(stored, "MOST_IN_MEMORY", 0)
    found = Lcp(path=path).load(16).requests
    assert isinstance(found, stored.StoredRequests) and list(map(repr, found)) == list(map(repr, known))


BAD = {
    "its blocks have 64 tokens, but block_tokens is 16: set trace.block_tokens=64": written(ROWS, tokens=64),
    "has no requests": written([]),
    "request 4: the file ends within it": written(ROWS)[:-1],
    "request 4: the file ends within it: download": written(ROWS)[:-40],
    "has 3 requests with 7 blocks, but its header says 4 with 7": written(ROWS[:3], requests=4),
    "has 4 requests with 9 blocks, but its header says 4 with 8": written(ROWS, blocks=8),
    "block ids do not stand for prefixes: block_id_kind is 0, not 1": written(ROWS, kind=0),
    "binary format of prefixes, version 1: convert": written(ROWS, version=2),
    "has no header of libCacheSim": written(ROWS)[:100],
    "request 2: its type is number 1, but the header names 1, from 0": written(ROWS, types=["text"]),
    "request 1: the path has 3 ids, but input_length=20 takes 2 blocks": written([(7, -1, 0.0, [1, 2, 3], 20, 5, 0)]),
    "request 1: timestamp must be 0 or more": written([(7, -1, -1.0, [1], 16, 5, 0)]),
    "request 1: has too many blocks: more than 1,000 bytes": written([(7, -1, 0.0, [*range(90)], 1440, 5, 0)]),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_refused_in_one_line(message: str, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(BAD[message])
    with pytest.raises(TraceError) as caught:
        Lcp(path=path, max_line_bytes=1000).load(16)
    assert message in str(caught.value) and str(caught.value).startswith(path)
    assert main(["replay", "trace=lcp", f"trace.path={path}", "trace.max_line_bytes=1000"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_names_of_fields_have_no_effect() -> None:
    with pytest.raises(ValueError, match="columns has no effect on a binary file"):
        Lcp(path="a", columns={"input_length": "n"})


@given(
    st.lists(st.tuples(st.integers(0, 8300), st.binary(min_size=1, max_size=9)), max_size=3),
    st.integers(0, 8600),
)
def test_damage_is_noticed_or_harmless(tmp_path_factory: pytest.TempPathFactory, changes: Any, size: int) -> None:
    content = bytearray(written(ROWS))
    for place, put in changes:
        content[place : place + len(put)] = put
    path = tmp_path_factory.mktemp("damaged") / "a.lcp"
    path.write_bytes(content[:size])
    with suppress(UsageError):
        assert len(Lcp(path=str(path)).load(16).requests) == 4
