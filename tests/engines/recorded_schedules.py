"""Schedules of vLLM with CPU offloading and with async scheduling that lie beside the repository."""

import csv
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDER = ("golden", "schedule_vllm_offload")
CASES = (
    "load", "load.async", "load.chunk4", "answers", "full-hit", "full-hit.async", "last-block", "flush", "flush.async",
    "flush-hit", "same-load", "two-loads", "two-loads.async", "preempt", "preempt.async", "threshold", "cpu-full", "re-offer",
    "recency", "recency.arc", "holding-first", "reserved", "async-end", "async-preempt",
)  # fmt: skip
RUNS = (
    "stress2_r2.2_c20000_cpu80000",
    "stress2_r2.2_c20000_cpu40000_thr2_load5_store8",
    "stress2_r4_c60000_cpu240000_chunk4_async",
    "stress2_r1.2_c12000_cpu60000_arc_answers_load2_store3",
    "mooncake_n1000_r0.3_c300000_cpu1500000_load12",
    "mooncake_n1000_r0.3_c200000_cpu2000000_thr2_chunk8_load5_async",
    "stress2_r2.2_c20000_async",
    "stress2_r4_c60000_async",
    "mooncake_n1000_r0.3_c300000_async",
)
BLOCK_BYTES = 2 * 2**20
Row = tuple[int, int, int, float, float]
"""Tokens hit on the GPU and in CPU memory, preemptions, and when the first and the last token were there."""


class Recorded(NamedTuple):
    """One run of the engine."""

    settings: Mapping[str, str]
    trace: Path
    rows: list[Row]
    steps: list[tuple[float, float, int, int]]
    """Start, end, prompt tokens, decoding requests; only of the small cases."""
    copies: list[tuple[float, float, bool, int]]
    """Start, end, whether it loads, and blocks; only of the small cases."""


def recorded(shared: Path, name: str) -> Recorded:
    """A recorded schedule; skips the test where it is absent."""
    folder = shared.joinpath(*FOLDER, *(["cases"] if name in CASES else []))
    if not folder.is_dir():
        pytest.skip(f"compares with recorded schedules that are not part of the repository: ../shared/{'/'.join(FOLDER)}")
    with (folder / "cases.csv").open() as file:
        settings = next(row for row in csv.DictReader(file) if row["name"] == name)
    if name in CASES:
        rows, steps, copies = (folder / f"{name}.vllm.txt").read_text().split("start_s,end_s,")
    else:
        rows, steps, copies = gzip.decompress((folder / f"{name}.requests.csv.gz").read_bytes()).decode(), "", ""
    return Recorded(
        settings,
        _trace(shared, folder, settings["trace"]),
        [(int(gpu), int(cpu), int(count), float(first), float(last)) for _, _, gpu, cpu, first, last, count in _table(rows)],
        [(float(start), float(end), int(tokens), int(decoding)) for start, end, tokens, decoding, *_ in _table(steps)],
        [(float(start), float(end), way == "load", int(blocks)) for start, end, way, blocks in _table(copies)],
    )


def _table(text: str) -> list[list[str]]:
    return [line.split(",") for line in text.splitlines()[1:]]


def _trace(shared: Path, folder: Path, name: str) -> Path:
    known = {
        "mooncake": shared / "traces" / "mooncake_conversation_trace.jsonl.gz",
        "stress2": shared / "golden" / "schedule" / "stress2.jsonl",
    }
    return known.get(name, folder / f"{name}.jsonl")


def assert_same_rows(rows: list[Row], expected: list[Row]) -> None:
    """Hits and preemptions are equal, and times within a microsecond."""
    assert [row[:3] for row in rows] == [row[:3] for row in expected]
    assert [row[3:] for row in rows] == [pytest.approx(row[3:], rel=0, abs=1e-6) for row in expected]
