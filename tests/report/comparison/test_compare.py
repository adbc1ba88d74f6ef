"""Many runs beside each other: what differs, what is best, the bounds, the page."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.engine.outcome import Outcome
from kvsim.report.comparison.compare import Comparison
from kvsim.report.comparison.csv_text import comparison_csv
from kvsim.report.comparison.differing import differing, labels
from kvsim.report.comparison.html import render_comparison
from kvsim.report.comparison.pictures import pareto
from kvsim.results.result import summarize
from kvsim.results.runs import Run, read_runs


def run_of(outcome: Outcome, name: str, config: dict[str, Any], **bounds: Any) -> Run:
    names = {kind: f"{kind}-1" for kind in bounds}
    result = summarize(
        outcome, command="simulate", config=config, choices=choices_of(config), seed=0, warmup=0, load_s=0,
        versions={"kvsim": "1"}, command_line=f"kvsim simulate {name}", bounds=names, page_bytes=2**20,
    )  # fmt: skip
    return Run(name=name, folder=Path(name), result=result, bounds=bounds)


def choices_of(config: dict[str, Any]) -> dict[str, str]:
    """The choices that made such a configuration: each policy lies in the file of its name."""
    return {
        name: node["_target_"].split(".")[-2] for name, node in config.items() if isinstance(node, dict) and "_target_" in node
    }


def config(eviction: str, capacity: str = "4pages", **more: Any) -> dict[str, Any]:
    return {"page_tokens": 10, "eviction": {"_target_": f"kvsim.policies.eviction.{eviction}.X"},
            "tiers": {"gpu": {"capacity": capacity}}, **more}  # fmt: skip


class Text(HTMLParser):
    """What a browser without JavaScript shows: cells of tables, and the tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.bold: list[str] = []
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th", "b") and self.cells:
            self.cells[-1] += data.rstrip("\n")
        if self.tags and self.tags[-1] == "b":
            self.bold.append(data)


def test_a_policy_is_called_by_its_choice_and_settings_stand_beside_it():
    slru = {"_target_": "kvsim.policies.eviction.slru.SegmentedLRU", "protected_hits": 3}
    config = {"eviction": slru, "tiers": {"cpu": {"eviction": slru}}, "model": {"layers": 2}, "warmup": 0.1}
    choices = {"eviction": "mine", "eviction@tiers.cpu.eviction": "yours", "model": "tiny", "preset": "sglang"}
    assert labels(config, choices) == {
        "eviction": "mine", "eviction.protected_hits": "3", "tiers.cpu.eviction": "yours",
        "tiers.cpu.eviction.protected_hits": "3", "model": "tiny", "model.layers": "2", "preset": "sglang", "warmup": "0.1",
    }  # fmt: skip


def test_settings_that_follow_from_a_choice_are_not_shown_unless_set():
    small, large = {"model": "a", "model.layers": "2", "seed": "1"}, {"model": "b", "model.layers": "4", "seed": "1"}
    assert differing([small, large]) == ["model"]
    assert differing([small, large], {"model.layers"}) == ["model", "model.layers"]
    assert differing([small, large, large | {"model.layers": "5"}]) == ["model", "model.layers"]


def test_settings_that_only_some_have_do_not_differ_but_tiers_policies_do():
    one = {"eviction": "lru", "tiers.gpu.capacity": "1pages"}
    other = {"eviction": "slru", "eviction.protected_hits": "2", "tiers.gpu.capacity": "1pages", "tiers.cpu.eviction": "arc"}
    assert differing([one, other]) == ["tiers.cpu.eviction", "eviction"]
    assert differing([other, other | {"eviction.protected_hits": "3"}]) == ["eviction.protected_hits"]


def test_the_table_is_framed_and_the_best_is_bold(simulated: Outcome, replayed: Outcome):
    belady, unlimited = {"hit_rate": 0.6, "page_hit_rate": 0.6}, {"hit_rate": 0.7, "page_hit_rate": 0.7}
    runs = [
        run_of(simulated, "0", config("lru"), belady=belady, unlimited=unlimited),
        run_of(replayed, "1", config("arc"), belady=belady, unlimited=unlimited),
    ]
    comparison = Comparison(runs)
    assert [row.name for row in comparison.rows()] == ["no cache", "0", "1", "belady", "unlimited"]
    assert comparison.keys == ["eviction"]
    column = [measure.key for measure in comparison.measures].index("hit_rate")
    assert [row.cells[column] for row in comparison.rows()] == ["0.00%", "33.33%", "55.56%", "60.00%", "70.00%"]
    assert (1, column) in comparison.best() and (0, column) not in comparison.best()
    shown = Text(render_comparison(runs, "kvsim report a b"))
    assert "55.56%" in shown.bold and "33.33%" not in shown.bold
    assert {"no cache", "belady", "unlimited", "lru", "arc"} <= set(shown.cells)


def test_a_run_that_rejects_more_is_not_the_best(simulated: Outcome, replayed: Outcome):
    runs = [run_of(simulated, "0", config("lru")), run_of(replayed, "1", config("arc")), run_of(simulated, "2", config("fifo"))]
    assert runs[1].result is not None and runs[2].result is not None
    runs[1].result["rejected"] += 1
    runs[2].result["hit_rate"] = 0.1
    comparison = Comparison(runs)
    column = [measure.key for measure in comparison.measures].index("hit_rate")
    assert {place for place, at in comparison.best() if at == column} == {0}


def test_simulated_and_measured_runs_of_one_configuration_stand_side_by_side(simulated: Outcome):
    runs = [run_of(simulated, name, config("lru", substrate=name)) for name in ("simulated", "hardware")]
    for latency in ("mean", "p99"):
        assert runs[1].result is not None
        runs[1].result["ttft_s"][latency] = 2.0
    shown = Text(render_comparison(runs, "kvsim"))
    start = shown.cells.index("simulated, hardware: TTFT mean (s)")
    assert shown.cells[start : start + 4] == ["simulated, hardware: TTFT mean (s)", "3.00", "2.00", "+50.0%"]
    assert "Simulated against measured" not in render_comparison(runs[:1], "kvsim")


def test_the_front_has_what_nothing_beats_in_both():
    assert pareto([(3, 1.0), (1, 5.0), (2, 5.0), (2, 3.0), (4, 1.0)]) == [(1, 5.0), (2, 3.0), (3, 1.0)]


def test_the_csv_has_plain_numbers_and_failures(simulated: Outcome):
    failed = Run(name="1", folder=Path("1"), error="no room, at all", overrides=["eviction=arc"])
    runs = [run_of(simulated, "0", config("lru"), belady={"hit_rate": 0.5, "page_hit_rate": 0.5}), failed]
    rows = list(csv.DictReader(io.StringIO(comparison_csv(runs))))
    assert [row["status"] for row in rows] == ["finished", "failed"]
    assert float(rows[0]["hit_rate"]) == pytest.approx(40 / 120)
    assert (rows[0]["belady_hit_rate"], rows[0]["ttft_s_mean"]) == ("0.5", "3.0")
    assert rows[1]["error"] == "no room, at all"


def test_report_reads_runs_and_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    small = ("trace.sessions=20", "tiers.gpu.capacity=3000pages")
    assert main(["replay", *small, "output=one"]) == 0
    assert main(["replay", "-m", *small, "eviction=arc,fifo", "output=sweep"]) == 0
    capsys.readouterr()
    assert main(["report", "one", "sweep", "output=pages/all.html"]) == 0
    assert "<title>llama3_8b, synthetic: 3 runs by eviction</title>" in Path("pages/all.html").read_text()
    shown = capsys.readouterr().out
    assert "belady" in shown and "sweep/1" in shown and shown.rstrip().endswith("pages/all.html")
    runs = read_runs([Path("one"), Path("sweep")])
    assert [run.name for run in runs] == ["one", "sweep/0", "sweep/1"]


def test_the_report_of_one_run_is_the_page_that_the_run_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "trace.sessions=20", "tiers.gpu.capacity=3000pages", "output=one"]) == 0
    page = Path("one/report.html").read_text()
    shown = capsys.readouterr().out
    Path("one/report.html").unlink()
    assert main(["report", "one"]) == 0
    assert Path("one/report.html").read_text() == page
    table = shown[shown.index("tier ") : shown.index("\n\n", shown.index("tier "))]
    again = capsys.readouterr().out
    assert table in again and re.search(r"^Belady's bound \d+\.\d\d%, unlimited cache \d+\.\d\d%$", again, re.MULTILINE)


def test_a_sweep_of_one_job_is_reported_as_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """On its page and on the terminal alike, with its bounds."""
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "-m", "trace.sessions=20", "tiers.gpu.capacity=3000pages", "eviction=arc", "output=sweep"]) == 0
    page = Path("sweep/report.html").read_text()
    capsys.readouterr()
    assert main(["report", "sweep"]) == 0
    assert Path("sweep/report.html").read_text() == page
    assert re.search(r"^belady ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["empty"], "empty: no result.json there"),
        (["output=x.html"], "name the folders to report on"),
        (["old"], "old/result.json: not a result of schema 1"),
        (["broken"], "broken/result.json: not a valid result"),
    ],
)
def test_report_says_in_one_line_what_is_wrong(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for name, text in (("old", json.dumps({"schema": 0})), ("broken", "{")):
        Path(name).mkdir()
        Path(name, "result.json").write_text(text)
    Path("empty").mkdir()
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvsim: {message}")
    assert error.count("\n") == 1


def test_bounds_of_tiers_whose_sizes_no_setting_says_are_told_apart(simulated: Outcome) -> None:
    runs = []
    for gpus, pages in ((1, 100), (2, 300)):
        run = run_of(simulated, str(gpus), config("lru", "auto", hardware={"gpus": gpus}), belady={"hit_rate": 0.5})
        assert run.result is not None
        run.result["bounds"] = {"belady": f"belady-{pages}"}
        run.result["tiers"] = {"gpu": run.result["tiers"]["gpu"] | {"capacity_pages": pages}}
        runs.append(run)
    names = [row.name for row in Comparison(runs).rows() if row.is_bound]
    assert names == ["no cache", "belady 100 MiB", "belady 300 MiB"]
    assert [row.name for row in Comparison(runs[:1]).rows() if row.is_bound] == ["no cache", "belady"]
