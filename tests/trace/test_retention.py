"""Retention directives in the lines of a trace."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.errors import TraceError
from kvsim.trace.retention import fields_of

LINE = {"token_ids": [*range(40)], "output_length": 8}
BLOCKS = {"timestamp": 0, "input_length": 40, "output_length": 8, "hash_ids": [1, 2, 3], "block_size": 16}


def read(tmp_path: Path, **fields: Any) -> Any:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    return kvsim.load_trace("auto", path=path, page_tokens=16).requests[0].retention


@pytest.mark.parametrize("line", [LINE, BLOCKS])
def test_ranges_are_in_order_and_end_with_the_prompt(tmp_path: Path, line: dict[str, Any]) -> None:
    said = {"retention": [[20, None, 10, 1500], [0, 16, 100, None]], "decode_retention": [5, None]}
    assert read(tmp_path, **line, **said) == ((0, 16, 100, inf), (20, 40, 10, 1.5), (40, 1 << 60, 5, inf))
    assert read(tmp_path, **line) == ()
    assert read(tmp_path, **line, retention=None, decode_retention=None) == ()
    assert read(tmp_path, **line, retention=[[30, 99, 1, 0]]) == ((30, 40, 1, 0.0),)
    assert read(tmp_path, **line, retention=[[50, 99, 1, 0]]) == (), "beyond the prompt"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("retention", 3, "retention must be a list"),
        ("retention", [[0, 8, 101, None]], r"a priority from 0 to 100, not \[0, 8, 101, null\]"),
        ("retention", [[0, 8, 5]], "retention must be a list of"),
        ("retention", [[8, 8, 5, None]], "begin < end"),
        ("retention", [[-1, 8, 5, None]], "begin < end"),
        ("retention", [[0, 8, 5, -1]], "retention must be"),
        ("retention", [[0, True, 5, 1]], "retention must be"),
        ("retention", [[0, 9, 5, None], [8, 10, 6, None]], "must not overlap: one begins at token 8, before 9"),
        ("retention", [[0, None, 5, None], [8, 10, 6, None]], "must not overlap"),
        ("decode_retention", [5], r"decode_retention must be \[priority, duration_ms\], not \[5\]"),
        ("decode_retention", [5.5, None], "decode_retention must be"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, field: str, value: Any, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read(tmp_path, **LINE, **{field: value})


def test_lines_written_say_the_same(tmp_path: Path) -> None:
    said = {"retention": [[0, 16, 100, None], [20, 40, 10, 1500.0]], "decode_retention": [5, 2500.0]}
    ranges = read(tmp_path, **LINE, **said)
    assert fields_of(ranges, 40) == said
    assert fields_of((), 40) == {}
