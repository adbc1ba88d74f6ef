"""What a trace file may cost: a line, a stretch of blanks and the lengths in it have limits, and errors name the place."""

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from kvsim.api import load_trace, replay
from kvsim.cli import main
from kvsim.core.request import Request
from kvsim.errors import TraceError, UsageError
from kvsim.trace.arrays import DEEPEST
from kvsim.trace.base import Trace
from kvsim.trace.lengths import Lengths
from kvsim.trace.memory import trace_from_tokens
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.records import read_records
from kvsim.trace.synthetic import Synthetic
from kvsim.trace.tokens import Tokens
from kvsim.trace.weka import Weka
from kvsim.trace.words import Words

MIB = 1 << 20


def problem(path: str, max_line_bytes: int = MIB) -> str:
    with pytest.raises(TraceError) as caught:
        list(read_records(path, max_line_bytes=max_line_bytes))
    return str(caught.value).removeprefix(path)


@pytest.mark.parametrize("line", [b"x", b"{", b"{}\n{", b'{"a":"', b'{"a":[1,', b"9", b"\x00"])
def test_a_line_has_a_limit(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line + line[-1:] * 2 * MIB)
    assert problem(str(path)).endswith(": is too long: more than 1,048,576 bytes (trace.max_line_bytes)")
    path.write_bytes(b'{"a": "%s"}\n' % (b"x" * MIB))
    assert problem(str(path)).startswith(":1: is too long")
    assert len(next(read_records(str(path), max_line_bytes=2 * MIB)).fields["a"]) == MIB


def test_an_element_of_an_array_has_the_limit_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'[{"a": 1}, {"a": "%s"}]' % (b']}\\",' * MIB))
    assert problem(str(path)) == ", element 2: is too long: more than 1,048,576 bytes (trace.max_line_bytes)"
    assert [len(record.fields["a"]) for record in list(read_records(str(path)))[1:]] == [4 * MIB]


def test_an_array_takes_the_memory_of_one_element(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"[%s]" % b",".join([b'{"text": "%s", "inside": [{}, {"a": "[{"}]}' % (b"a" * 50_000)] * 200))
    tracemalloc.start()
    assert sum(len(record.fields["text"]) for record in read_records(str(path))) == 200 * 50_000
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 6 * MIB < path.stat().st_size


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_blank_lines_are_passed_at_once_and_have_a_limit(name: str, tmp_path: Path) -> None:
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    path = tmp_path / name
    path.write_bytes(compress(b'\n \r\n{"a": 1}\n' + b"\n" * (MIB // 2) + b'{"a": 2}\n'))
    assert [record.line for record in read_records(str(path), max_line_bytes=MIB)] == [3, MIB // 2 + 4]
    path.write_bytes(compress(b'{"a": 1}\n' + b" \n" * MIB))
    assert "is nothing but blanks: more than 1,048,576 bytes" in problem(str(path))


def test_a_small_file_that_decompresses_to_much_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as stream:
        for _ in range(64):
            stream.write(b"\n" * (4 * MIB))
    tracemalloc.start()
    assert "is nothing but blanks" in problem(str(path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 140 * MIB
    assert path.stat().st_size < MIB // 4


def test_nesting_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'[{"a": ' + b"[" * 2 * DEEPEST)
    assert problem(str(path)) == ", element 1: is nested too deeply"
    path.write_bytes(b'{"a": ' + b"[" * 9_000)
    assert problem(str(path)) == ":1: not JSON that can be read: nested too deeply"


def test_what_can_be_read_only_once_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        assert problem(path) == ": is not a file: pipe its content into kvsim and set trace.path=-"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 3)
    records = read_records(str(path))
    next(records)
    path.write_bytes(b'{"a": 1}\n')
    with pytest.raises(TraceError, match="changed while it was read: run again"):
        list(records)


@pytest.mark.parametrize("name", ["a\0b", "a\udcffb"])
@pytest.mark.parametrize("format_name", [None, "mooncake"])
def test_the_name_of_a_file_is_text(name: str, format_name: str | None) -> None:
    with pytest.raises(UsageError, match=r"^trace\.path must be "):
        load_trace(format_name, path=name)


LINE = {"timestamp": 0, "input_length": 100, "output_length": 9, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("reader", "line", "what"),
    [
        (Mooncake, LINE | {"input_length": 101}, "input_length is 101 tokens"),
        (Mooncake, LINE | {"output_length": 10**12}, "output_length is 1000000000000 tokens"),
        (Mooncake, LINE | {"output_length": 60, "n": 2}, "the answer, n=2 times, is 120 tokens"),
        (Tokens, {"token_ids": [1] * 101, "output_length": 1}, "token_ids is 101 tokens"),
        (Tokens, {"token_ids": [1], "output_length": 101}, "output_length is 101 tokens"),
        (Weka, {"requests": [{"t": 0, "in": 101, "out": 1, "hash_ids": [1]}]}, "in is 101 tokens"),
        (Weka, {"requests": [{"t": 0, "in": 64, "out": 101, "hash_ids": [1]}]}, "out is 101 tokens"),
        (Lengths, {"timestamp": 0, "input_length": 101, "output_length": 1}, "input_length is 101 tokens"),
    ],
)
def test_a_length_has_a_limit(reader, line, what, write) -> None:
    path = write(line)
    with pytest.raises(TraceError) as caught:
        reader(path=path, max_tokens=100, **({"prefixes": 0.5} if reader is Lengths else {})).load(
            512 if reader is Mooncake else 64
        )
    assert str(caught.value) == f"{path}:1: {what}, more than trace.max_tokens=100: raise that if the trace is right"


def test_the_turns_of_a_session_may_not_grow_beyond_the_limit(write) -> None:
    path = write(*({"session_id": 1, "input_length": 40, "output_length": 10} for _ in range(3)))
    with pytest.raises(
        TraceError, match=r":3: the prompt, with the turns before it, is 140 tokens, more than trace\.max_tokens=100"
    ):
        Mooncake(path=path, turns="deltas", max_tokens=100).load(16)


def test_generators_have_the_limit(write) -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens must be from 1 to 100, not 101; max_tokens sets the most"):
        Synthetic(max_tokens=100, max_prompt_tokens=101)
    with pytest.raises(ValueError, match="prompts must be of at most 2 words"):
        Words(prompts=["a b c"], max_tokens=2)
    for sessions in (10**12, 10**8):
        with pytest.raises(ValueError, match="sessions must be fewer: with the turns of mix, they make"):
            Synthetic(sessions=sessions)


def test_many_lanes_cost_nothing(write) -> None:
    path = write(*({"requests": [{"t": 0, "in": 64, "out": 1, "api_time": 1, "hash_ids": [1]}]} for _ in range(3)))
    arrivals = [
        [request.arrival_s for request in Weka(path=path, concurrent_sessions=lanes).load(64).requests]
        for lanes in (1, 2, 10**15)
    ]
    assert arrivals == [[0, 1, 2], [0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"output_tokens": 10**12}, "output_tokens, for all samples, must be from 0 to 16777216"),
        ({"samples": 10**9}, "output_tokens, for all samples, must be from 0 to 16777216"),
        ({"prompt_tokens": 0}, "prompt_tokens must be from 1 to 16777216, not 0"),
        ({"arrival_s": float("nan")}, "arrival_s must be a finite number of at least 0, not nan"),
        ({"index": 1}, "index is 1: requests are numbered in order of arrival"),
        ({"after": 0}, "after is 0: a request can wait for an earlier one only"),
        ({"runs": ((-1, 1),)}, "runs must be of page ids of 0 or more, 1 in all"),
        ({"runs": ((0, 2),)}, "runs must be of page ids of 0 or more, 1 in all"),
    ],
)
def test_requests_made_by_a_program_are_checked(change, problem) -> None:
    request = {
        "index": 0,
        "arrival_s": 0.0,
        "prompt_tokens": 16,
        "output_tokens": 1,
        "runs": ((0, 1),),
        "prompt_pages": 1,
    } | change
    with pytest.raises(UsageError, match=f"request 0 of the trace: {problem}"):
        replay(Trace(name="x", requests=[Request(**request)], page_tokens=16, block_tokens=None))


@pytest.mark.parametrize(
    "given",
    [
        {"output_tokens": 10**12},
        {"output_tokens": 2**63},
        {"arrivals_s": [float("inf")]},
        {"arrivals_s": [10**400]},
        {"arrivals_s": ["soon"]},
        {"sessions": [10**5_000]},
    ],
)
def test_a_trace_made_of_tokens_is_checked(given) -> None:
    with pytest.raises(UsageError):
        trace_from_tokens([[1, 2, 3]], **given)


def test_times_are_times_at_any_rate(write) -> None:
    path = write({"token_ids": [1], "output_length": 1, "timestamp": 0}, {"token_ids": [1], "output_length": 1, "timestamp": 1e9})
    assert Tokens(path=path, rate=1e-3).load(1).requests[1].arrival_s == 1e9
    with pytest.raises(UsageError, match=r"a request arrives after 1e\+16 s, but a trace may be 1e\+12 s long"):
        Tokens(path=path, rate=1e-10).load(1)


def test_the_limits_are_settings(write, capsys) -> None:
    path = write({"token_ids": [1] * 50, "output_length": 1})
    assert main(["trace", "info", path, "trace.max_tokens=40"]) == 2
    assert f"{path}:1: token_ids is 50 tokens, more than trace.max_tokens=40" in capsys.readouterr().err
    assert main(["trace", "info", path, "trace.max_line_bytes=40"]) == 2
    assert f"{path}:1: is too long: more than 40 bytes (trace.max_line_bytes)" in capsys.readouterr().err
    assert main(["trace", "info", path, "trace.max_tokens=50"]) == 0
