"""A column of requests is one row; a measure of runs is one row with its formula; a further tier is where a run has it."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvsim.engine.book import Book
from kvsim.engine.columns import COLUMNS, SAME, Column, recorded
from kvsim.engine.outcome import Outcome, TierUse
from kvsim.errors import UsageError
from kvsim.report.comparison.compare import Comparison
from kvsim.report.comparison.csv_text import comparison_csv
from kvsim.report.comparison.objective import known_objectives, objective, usual_direction
from kvsim.report.folder import write_run
from kvsim.report.pictures import pictures_of
from kvsim.report.table import print_result
from kvsim.report.tier_looks import look_of
from kvsim.report.validation.recording import read_recording
from kvsim.report.validation.validation import Tolerances, compare
from kvsim.report.wandb.content import request_rows, summary
from kvsim.results.fields import FIELDS
from kvsim.results.glossary import meanings
from kvsim.results.measures import Measure
from kvsim.results.measures import Path as Place
from kvsim.results.rates import digits
from kvsim.results.records import read_requests, read_result
from kvsim.results.result import summarize
from kvsim.results.runs import read_runs
from kvsim.results.schema import Field, Number

HOPS = Column(name="hops", kind=int, missing=-1, compared=SAME, meaning="how often it moved to another engine")
MEAN_HOPS = Field(
    name="mean_hops",
    kind=Number,
    better=-1,
    of=lambda run: float(run.outcome.columns["hops"].clip(0)[run.served].mean()),
    measures=(Measure("mean_hops", "mean hops", Place("mean_hops"), digits, -1),),
    meaning="how often requests moved, on average",
)


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    """A row more in each table."""
    COLUMNS.append(HOPS)
    FIELDS.append(MEAN_HOPS)
    yield
    COLUMNS.remove(HOPS)
    FIELDS.remove(MEAN_HOPS)


@pytest.fixture
def moved(outcome_of: Callable[..., Outcome]) -> Outcome:
    """Four requests, of which the last but one moved three times; nobody knows of the first, and the last is rejected."""
    outcome = outcome_of([40] * 4, [(1, 0, 0)] * 4, rejected=[3], ttft_s=[1.0, 2.0, 3.0, np.nan])
    book = Book(outcome.requests)
    for index, hops in ((1, 0), (2, 3), (3, 5)):
        book.columns["hops"][index] = hops
    book.reject(outcome.requests[3])
    outcome.columns["hops"] = book.close([])["hops"]
    return outcome


def write(folder: Path, outcome: Outcome, **config: Any) -> dict[str, Any]:
    record = summarize(outcome, command="simulate", config=config, seed=0, warmup=0.0, load_s=0.0, versions={})
    write_run(folder, record, outcome)
    return record


def text_of(folder: Path) -> list[list[str]]:
    with gzip.open(folder / "requests.csv.gz", "rt", newline="") as file:
        return list(csv.reader(file))


def test_a_column_of_requests_is_one_row(tmp_path: Path, moved: Outcome) -> None:
    record = write(tmp_path, moved)
    header, *cells = text_of(tmp_path)
    assert header[-1] == "hops" and [row[-1] for row in cells] == ["", "0", "3", ""]
    columns = read_requests(tmp_path, record)
    assert columns["hops"].dtype == np.float64 and columns["hops"][1:3].tolist() == [0, 3]
    names, logged = request_rows(columns, list(record["hit_tokens"]), 10)
    assert names[-1] == "hops" and [row[-1] for row in logged] == [None, 0, 3, None]
    assert meanings("hops") == [("hops", "how often it moved to another engine (whole number)")]


def test_the_cells_of_a_column_are_checked_by_its_row(tmp_path: Path, moved: Outcome) -> None:
    record = write(tmp_path, moved)
    header, *cells = text_of(tmp_path)
    for wrong, problem in (("many", "hops: invalid literal"), (None, "the column hops is missing")):
        rows = [[*header[:-1], *(["hops"] if wrong else [])], *([*row[:-1], *([wrong] if wrong else [])] for row in cells)]
        with gzip.open(tmp_path / "requests.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows(rows)
        with pytest.raises(UsageError, match=rf"requests\.csv\.gz: not the requests of the run beside it: {problem}"):
            read_requests(tmp_path, record)


def test_runs_of_the_same_requests_are_equal_in_a_column_that_says_so(tmp_path: Path, moved: Outcome) -> None:
    for name, hops in (("one", 3), ("other", 4)):
        moved.columns["hops"] = np.array([0, 0, hops, 0])
        write(tmp_path / name, moved)
    one, other = read_recording(tmp_path / "one"), read_recording(tmp_path / "other")
    with pytest.raises(UsageError, match="the two runs have different requests"):
        compare(one, other, Tolerances(), "")


def test_a_measure_of_runs_is_one_row(tmp_path: Path, moved: Outcome) -> None:
    record = write(tmp_path / "a", moved, eviction="lru")
    moved.columns["hops"] = np.array([0, 0, 0, 0])
    write(tmp_path / "b", moved, eviction="arc")
    assert record["mean_hops"] == 1.0 and list(record)[-1] == "mean_hops"
    assert read_result(tmp_path / "a")["mean_hops"] == 1.0
    told = Comparison(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert [told.known[-1].key, told.measures[-1].title] == ["mean_hops", "mean hops"]
    table = list(csv.DictReader(comparison_csv(told.runs).splitlines()))
    assert [row["mean_hops"] for row in table] == ["1.0", "0.0"]
    assert told.standing(told.measures[-1]) == {1: "best"}
    assert "mean_hops" in known_objectives() and usual_direction("mean_hops") == "minimize"
    assert objective(record, "mean_hops") == summary(record)["mean_hops"] == 1.0
    assert meanings("mean_hops") == [("mean_hops", "how often requests moved, on average")]


def test_a_measure_is_checked_by_its_row(tmp_path: Path, moved: Outcome) -> None:
    record = write(tmp_path, moved)
    (tmp_path / "result.json").write_text(json.dumps(record | {"mean_hops": -1.0}))
    with pytest.raises(UsageError, match=r"Expected `float` >= 0.0 - at `\$.mean_hops`"):
        read_result(tmp_path)


def test_a_further_tier_has_its_columns_and_rows_where_a_run_has_it(tmp_path: Path, outcome_of: Callable[..., Outcome]) -> None:
    """A fourth tier takes part in the rates, the files, the comparison and the pictures by being among the run's tiers."""
    three = outcome_of([40, 40], [(1, 0, 1), (1, 0, 0)])
    hits = [(1, 0, 1, 2), (1, 0, 0, 0)]
    four = replace(
        three,
        tiers=three.tiers | {"remote": TierUse(capacity_pages=9, peak_pages=3, evicted_pages=0, inserted_pages=3)},
        columns=recorded(three.requests, 4, {"hit_pages": hits, "read_s": [(0, 1, 2), (nan, nan, nan)]}),
    )
    assert four.tier_names == ("gpu", "cpu", "disk", "remote")
    records = [write(tmp_path / name, outcome) for name, outcome in (("three", three), ("four", four))]
    assert [record["hit_pages"] for record in records] == [
        {"gpu": 2, "cpu": 0, "disk": 1},
        {"gpu": 2, "cpu": 0, "disk": 1, "remote": 2},
    ]
    assert read_result(tmp_path / "four")["tiers"]["remote"]["peak_pages"] == 3
    (first, *_), (header, one, other) = text_of(tmp_path / "three"), text_of(tmp_path / "four")
    assert set(header) - set(first) == {"hit_pages_remote", "hit_tokens_remote", "remote_load_s"}
    cells = [dict(zip(header, row, strict=True)) for row in (one, other)]
    assert [row["hit_tokens_remote"] for row in cells] == ["20", "0"] and [row["remote_load_s"] for row in cells] == ["2.0", ""]
    told = Comparison(read_runs([tmp_path / "three", tmp_path / "four"]), by_run=True)
    assert [measure.of(result) for measure in told.measures if measure.key == "hit_rate_remote" for result in told.results] == [
        None, 0.25,
    ]  # fmt: skip
    shown = io.StringIO()
    print_result(records[1], Console(file=shown, width=100))
    assert "remote 25.00%" in shown.getvalue()
    figure = pictures_of(records[1])[0].figure
    assert figure is not None
    traces = {trace["name"]: trace["marker"]["color"] for trace in figure["data"]}
    assert traces["gpu"] == look_of("gpu").colour and traces["remote"] == look_of("remote").colour
