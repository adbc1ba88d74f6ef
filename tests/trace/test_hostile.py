"""Whatever a trace file contains: requests that can be played, or one line that names the file."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given

from kvsim.errors import UsageError
from kvsim.plans.build import build_run, build_trace
from kvsim.run.play import replay, simulate
from kvsim.settings.configuration import compose
from kvsim.trace.base import TraceSource
from kvsim.trace.check import check_requests
from kvsim.trace.convert import as_lines
from kvsim.trace.statistics import reuse_statistics, trace_statistics
from tests.mutations import bomb, changed_bytes, few, memory_budget, packed, work_budget
from tests.trace.hostile import BLOCKS, LENGTHS, LOGS, RECORDS, changed_records
from tests.trace.models import make_model

EXAMPLES = int(os.environ.get("KVSIM_TRACE_EXAMPLES", 5))
MAX_TOKENS = 50_000
LIMITS = [f"trace.max_tokens={MAX_TOKENS}", "trace.max_line_bytes=100000"]
FEW = few(EXAMPLES)


@cache
def plan(command: str, page_tokens: int) -> Any:
    """Two small tiers."""
    sizes = ["tiers.gpu.capacity=1000tokens", "tiers.cpu.capacity=2000tokens"]
    overrides = [*sizes, f"page_tokens={page_tokens}", "trace=words", "trace.prompts=[a]"]
    return build_run(compose(overrides), command=command)


@cache
def source(name: str, path: str, model: str) -> TraceSource:
    """The reader of this format for a path."""
    own = {"trace.block_tokens": BLOCKS.get(name)}
    own |= {"trace.prefixes": 0.5} if name == "lengths" else {}
    own |= {"trace.tokenizer": model} if name in ("openai", "sharegpt", "proxy_log", "spans", "aiperf_inputs", "dag") else {}
    given = [f"{key}={value}" for key, value in own.items() if value is not None]
    return build_trace(compose([f"trace={name}", f"trace.path={path}", *LIMITS, *given]))[0]


def play(reader: TraceSource, page_tokens: int) -> str:
    """Load a trace and do with it what commands do. Return the error if it cannot be loaded; anything else must work."""
    try:
        trace = reader.load(page_tokens)
    except UsageError as error:
        return str(error)
    check_requests(trace.requests, MAX_TOKENS)
    trace_statistics(trace)
    reuse_statistics(trace)
    assert len(list(as_lines(trace, packed=True))) >= len(trace.requests)
    for run, command in ((replay, "replay"), (simulate, "simulate")):
        outcome = run(plan(command, page_tokens), trace.requests)
        assert len(outcome.status) == len(trace.requests)
    return ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for one file at a time, with a tokenizer."""
    folder = tmp_path_factory.mktemp("hostile")
    make_model(folder / "model")
    return folder


def check(content: bytes, name: str, place: Path, file: str = "trace.jsonl") -> None:
    """Read and play a file, or find one line that names it."""
    path = place / file
    path.write_bytes(content)
    reader = source(name, str(path), str(place / "model"))
    with work_budget(), memory_budget():
        problem = play(reader, BLOCKS.get(name, 4))
    assert problem.isprintable() and (not problem or str(path) in problem)
    assert len(problem) < 1_000


@pytest.mark.parametrize("name", RECORDS)
def test_changed_records_are_played_or_refused(name: str, place: Path) -> None:
    @FEW
    @given(changed_records(RECORDS[name]))
    def run(content: bytes) -> None:
        check(content, "lengths" if name in LENGTHS else name, place)

    run()


@pytest.mark.parametrize("name", [*RECORDS, *LOGS])
def test_changed_bytes_are_played_or_refused(name: str, place: Path) -> None:
    whole = LOGS[name] if name in LOGS else "".join(f"{json.dumps(record)}\n" for record in RECORDS[name]).encode()

    @FEW
    @given(changed_bytes(whole))
    def run(content: bytes) -> None:
        check(content, "lengths" if name in LENGTHS else name, place)

    run()


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_changed_bytes_of_a_packed_trace_are_played_or_refused(ending: str, place: Path) -> None:
    lines = "".join(f"{json.dumps(record)}\n" for record in RECORDS["mooncake"]).encode()
    whole = packed(lines) if ending == ".gz" else zstandard.ZstdCompressor().compress(lines)

    @FEW
    @given(changed_bytes(whole))
    def run(content: bytes) -> None:
        check(content, "mooncake", place, f"trace.jsonl{ending}")

    run()


def test_a_packed_trace_that_unpacks_to_more_than_memory_is_refused(place: Path) -> None:
    for begins in (b"", b"[", b'{"timestamp": 0, "hash_ids": ['):
        check(bomb(begins), "mooncake", place, "bomb.jsonl.gz")
