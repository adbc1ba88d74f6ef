import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvsim.engine.outcome import Outcome
from kvsim.report.folder import write_run
from kvsim.results.result import summarize

FILES = ["report.html", "requests.csv.gz", "result.json"]


def write(folder: Path, outcome: Outcome) -> None:
    write_run(folder, summarize(outcome, command="replay", config={}, seed=0, warmup=0.5, load_s=0, versions={}), outcome)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with gzip.open(folder / "requests.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def test_every_request_has_a_row_those_of_the_warmup_too(tmp_path: Path, replayed: Outcome):
    write(tmp_path, replayed)
    with gzip.open(tmp_path / "requests.csv.gz", "rt") as file:
        assert file.read().splitlines() == [
            "request,prompt_pages,hit_pages_gpu,hit_pages_cpu,hit_pages_disk,prompt_tokens,output_tokens,"
            "hit_tokens_gpu,hit_tokens_cpu,hit_tokens_disk,arrival_s,ttft_s,tpot_s,e2e_s,"
            "first_token_s,last_token_s,cpu_load_s,disk_load_s,retractions,status,engine,session,turn,type,queue_s,load_s,prefill_s",
            "0,4,0,0,0,40,5,0,0,0,,,,,,,,,,finished,,,,,,,",
            "1,4,2,2,0,35,5,20,15,0,,,,,,,,,,finished,,,,,,,",
            "2,9,-1,0,0,90,5,0,0,0,,,,,,,,,,rejected,,,,,,,",
            "3,6,1,0,3,60,5,10,0,30,,,,,,,,,,finished,,,,,,,",
        ]


def test_several_engines_have_columns_of_their_own(tmp_path: Path, clustered: Outcome):
    write(tmp_path, clustered)
    rows = rows_of(tmp_path)
    assert [row["engine"] for row in rows] == ["0", "1", "0", ""]
    assert "decoder" not in rows[0]


def test_the_engine_that_decodes_is_told_where_it_is_another(tmp_path: Path, handed_over: Outcome):
    write(tmp_path, handed_over)
    assert [(row["engine"], row["decoder"]) for row in rows_of(tmp_path)] == [("0", "2"), ("1", "2"), ("0", "3"), ("", "")]


def test_sessions_and_types_are_those_of_the_trace(tmp_path: Path, simulated: Outcome):
    """A type may be any text."""
    origins = (0, 0, "chat"), (0, 1, 'a "b", 100%'), (-1, 0, "agent"), (-1, 0, "")
    for request, origin in zip(simulated.requests, origins, strict=True):
        request.session, request.turn, request.kind = origin
    write(tmp_path, simulated)
    found = [(row["session"], row["turn"], row["type"]) for row in rows_of(tmp_path)]
    assert found == [("0", "0", "chat"), ("0", "1", 'a "b", 100%'), ("", "", "agent"), ("", "", "")]


def test_the_parts_of_a_time_to_first_token_are_written(tmp_path: Path, simulated: Outcome):
    simulated.columns |= {"queue_s": np.array([0.5, 1, 0, np.nan]), "load_s": np.array([0.25, 0, 2, np.nan])}
    write(tmp_path, simulated)
    rows = [tuple(row[f"{name}_s"] for name in ("queue", "load", "prefill")) for row in rows_of(tmp_path)]
    assert rows == [("0.5", "0.25", "0.25"), ("1.0", "0.0", "1.0"), ("0.0", "2.0", "4.0"), ("", "", "")]


def test_runs_over_the_same_and_other_requests_each_have_their_own_rows(tmp_path: Path, outcome_of: Callable[..., Outcome]):
    """More rows than are written at once, twice over the same trace with other hits, then over another trace."""
    for name, prompts, hits in (("a", 40, 0), ("b", 40, 2), ("c", 50, 2)):
        write(tmp_path / name, outcome_of([prompts] * 10_000, [(hits, 0, 0)] * 9_999 + [(1, 0, 0)]))
        rows = [tuple(row.values()) for row in rows_of(tmp_path / name)]
        pages, tokens = str(prompts // 10), str(prompts)
        expected = [
            (str(row), pages, str(hit), "0", "0", tokens, "5", str(10 * hit), "0", "0", *[""] * 9, "finished", *[""] * 7)
            for row, hit in enumerate([hits] * 9_999 + [1])
        ]
        assert rows == expected


def test_times_are_written_in_full_and_left_empty_for_the_rejected(tmp_path: Path, simulated: Outcome):
    simulated.ttft_s[0] = 1 / 3
    write(tmp_path, simulated)
    rows = rows_of(tmp_path)
    assert float(rows[0]["ttft_s"]) == 1 / 3
    assert [rows[3][name] for name in ("arrival_s", "ttft_s", "tpot_s", "e2e_s")] == ["3.0", "", "", ""]


def test_load_times_are_zero_without_a_load_and_empty_for_the_rejected(tmp_path: Path, simulated: Outcome):
    simulated.columns["read_s"] = np.array([[0, 0], [0.25, 0], [1.5, 3], [np.nan] * 2])
    write(tmp_path, simulated)
    columns = [(row["cpu_load_s"], row["disk_load_s"]) for row in rows_of(tmp_path)]
    assert columns == [("0.0", "0.0"), ("0.25", "0.0"), ("1.5", "3.0"), ("", "")]


def test_a_run_without_a_timeline_removes_that_of_an_earlier_one(tmp_path: Path, replayed: Outcome):
    (tmp_path / "timeline.json.gz").write_bytes(b"earlier")
    write(tmp_path, replayed)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
