"""``kvsim trace info``."""

import json
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.commands.trace import describe

MOONCAKE = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}


def write(folder: Path, *records: object) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_overrides_change_how_the_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE, MOONCAKE)
    source, page_tokens = describe([path, "page_tokens=512"])
    assert [request.prompt_pages for request in source.load(page_tokens).requests] == [2, 2]
    source, page_tokens = describe([path, "trace.limit=1"])
    assert len(source.load(page_tokens).requests) == 1


def test_statistics_stand_beside_published_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", write(tmp_path, MOONCAKE, MOONCAKE), "page_tokens=512"]) == 0
    shown = capsys.readouterr().out
    assert "trace.jsonl (trace=mooncake), in pages of 512 tokens" in shown
    assert "0.500000" in shown
    assert "Mooncake conversation" in shown


def test_reuse_stands_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", write(tmp_path, MOONCAKE, MOONCAKE), "page_tokens=512"]) == 0
    shown = capsys.readouterr().out
    assert "50.00% of the prompt tokens are shared with an earlier request, in 50.00% of the requests." in " ".join(shown.split())
    for title in ("Reuse distance", "Working set", "Pages by the number of requests", "Prefixes whose last part"):
        assert title in shown
    assert "100.00%" in next(line for line in shown.splitlines() if line.strip().startswith("2  "))


def test_a_trace_without_reuse_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", write(tmp_path, MOONCAKE), "page_tokens=512"]) == 0
    assert "No page is used twice." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["describe"], "kvsim trace has no command 'describe'; use kvsim trace info"),
        (["info", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["info", "a", "b"], "cannot parse 'a b'"),
        (["info", "trace=synthetic", "trace.sessions=0"], "trace.sessions"),
    ],
)
def test_a_mistake_ends_with_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"kvsim: {expected}")
    assert shown.count("\n") == 1
