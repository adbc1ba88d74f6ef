"""A trace may come from standard input, also for a sweep."""

import errno
import gzip
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import zstandard

from kvsim.api import load_trace
from kvsim.cli import main
from kvsim.settings.standard_input import saved_input

LINES = b'{"token_ids": [1, 2, 3, 4], "output_length": 1}\n' * 2


class Pipe:
    """Standard input that is not a terminal."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)

    def isatty(self) -> bool:
        return False


@pytest.fixture
def pipe(monkeypatch):
    """Puts bytes into standard input."""
    saved_input.cache_clear()
    yield lambda content: monkeypatch.setattr(sys, "stdin", Pipe(content))
    saved_input.cache_clear()


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_it_may_be_compressed(pipe, compress):
    pipe(compress(LINES))
    trace = load_trace(path="-", page_tokens=2)
    assert [request.runs for request in trace.requests] == [((0, 2),), ((0, 2),)]


def test_every_job_of_a_sweep_reads_it(pipe, tmp_path):
    pipe(LINES)
    arguments = ["replay", "-m", "trace.path=-", "page_tokens=2", "tiers.gpu.capacity=100pages,200pages", f"output={tmp_path}"]
    assert main(arguments) == 0
    rates = [json.loads(path.read_text())["hit_rate"] for path in tmp_path.glob("*/result.json")]
    assert rates == [0.25, 0.25]


def test_info_describes_it(pipe, capsys):
    pipe(LINES)
    assert main(["trace", "info", "-"]) == 0
    assert "stdin.jsonl (trace=tokens)" in capsys.readouterr().out


def test_a_terminal_has_no_trace(pipe, monkeypatch, capsys):
    monkeypatch.setattr(Pipe, "isatty", lambda self: True)
    pipe(b"")
    assert main(["replay", "trace.path=-"]) == 2
    assert "standard input is a terminal" in capsys.readouterr().err


def test_a_full_disk_is_no_traceback(pipe, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    pipe(LINES)
    assert main(["replay", "trace.path=-"]) == 2
    assert "No space left on device; set TMPDIR to a larger disk" in capsys.readouterr().err


def test_the_copy_is_empty_for_an_empty_input(pipe, capsys):
    pipe(b"")
    assert main(["replay", "trace.path=-"]) == 2
    assert "the file is empty: it contains no requests" in capsys.readouterr().err
    assert Path(saved_input()).read_bytes() == b""
