"""The trace of a billion page accesses, and what is said of its runs."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import kvsim
from tests.experiments.test_studies import study


@pytest.fixture
def billion(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return study("speed", monkeypatch, script="billion")


def test_ids_count_up_and_name_their_prefix(billion: ModuleType) -> None:
    before: dict[int, int] = {}
    next_id = 0
    for _, extents in billion.prompts(3_000, np.random.default_rng(0)):
        last = -1
        for start, blocks in extents:
            assert start <= next_id
            for block in range(start, start + blocks):
                assert before.setdefault(block, last) == last
                last = block
            next_id = max(next_id, start + blocks)
    assert sorted(before) == list(range(next_id))


def test_its_size_is_that_of_the_published_traces(billion: ModuleType) -> None:
    """1,494 blocks a prompt, 212 of them new; the first requests of a conversation are shorter, so the beginning is left out."""
    lengths = [sum(blocks for _, blocks in extents) for _, extents in billion.prompts(40_000, np.random.default_rng(1))]
    assert 1_400 < np.mean(lengths[15_000:]) < 1_600
    assert max(lengths) <= billion.LONGEST_BLOCKS


def test_a_trace_is_the_same_each_time(billion: ModuleType, tmp_path: Path) -> None:
    accesses = [billion.write_lines(tmp_path / name, 50, 0) for name in ("one", "other")]
    assert accesses[0] == accesses[1] and (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert sum(line["input_length"] for line in lines) == 16 * accesses[0]


def test_both_formats_have_the_same_requests(billion: ModuleType, tmp_path: Path) -> None:
    found = []
    for kind, (name, write) in billion.WRITERS.items():
        accesses = write(tmp_path / name, 50, 0)
        trace = kvsim.load_trace(kind, path=str(tmp_path / name), block_tokens=16, page_tokens=16)
        found.append([(r.runs, r.prompt_tokens, r.output_tokens, r.session, round(r.arrival_s, 4)) for r in trace.requests])
        assert sum(tokens for _, tokens, *_ in found[-1]) == 16 * accesses
    assert found[0] == found[1]


@pytest.mark.parametrize(("processor_s", "peak", "verdicts"), [(600, 250, [True, True]), (601, 251, [False, False])])
def test_claims(billion: ModuleType, processor_s: int, peak: int, verdicts: list[bool]) -> None:
    def run(requests: int, peak_bytes: int) -> object:
        return billion.Measured(
            requests=requests, accesses=9, megabytes=1, processor_s=processor_s, elapsed_s=1, peak_bytes=peak_bytes, load_s=1,
            run_s=1, page_hit_rate=0.5,
        )  # fmt: skip

    small, large = run(1_000, 5_000), run(2_000, 5_000 + 1_000 * peak)
    assert [row.holds for row in billion.rows_of("replay", small, large, 1.0) if row.claim] == verdicts
    assert [row.holds for row in billion.rows_of("simulate", small, large, 1.0) if row.claim] == verdicts[1:]


@pytest.mark.long
def test_a_small_part_is_measured(billion: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands in processes of their own."""
    monkeypatch.setattr(billion, "REQUESTS", 400)
    monkeypatch.setattr(billion, "YARDSTICK", tmp_path / "none")
    monkeypatch.setattr(sys, "argv", ["billion.py", "--share", "0.5", "--output", str(tmp_path)])
    assert billion.main() == 0
    text = (tmp_path / "billion.md").read_text()
    assert "## Replay of 50%" in text and "| requests | 200 |" in text and "| processor time |" in text
