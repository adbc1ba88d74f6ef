"""The page over many runs: the pivot table, ties, seeds, identical results, pictures, names that look like markup."""

import csv
import io
import json
import re
from copy import deepcopy
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.engine.outcome import Outcome
from kvsim.report.comparison.compare import BEST, NEAR, TIE, Comparison
from kvsim.report.comparison.csv_text import means_csv
from kvsim.report.comparison.findings import answers
from kvsim.report.comparison.head import tiles, title_of
from kvsim.report.comparison.html import render_comparison
from kvsim.report.comparison.pictures import binned, pictures_of
from kvsim.report.comparison.pivot import pivots
from kvsim.report.headline import Tile
from kvsim.report.html import render
from kvsim.results.fields import BY_KEY
from kvsim.results.result import summarize
from kvsim.results.runs import Run

HIT_RATE = BY_KEY["hit_rate"]


class Maker:
    """Makes runs from one outcome, with hit rates of the test's choice."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.made = 0

    def __call__(
        self, eviction: str, rate: float | None, pages: int = 4, seed: int = 0, belady: float | None = None, **more: Any
    ) -> Run:
        settings = {
            "seed": seed, "trace": {"_target_": "kvsim.trace.synthetic.Synthetic", "seed": seed},
            "eviction": {"_target_": f"kvsim.policies.eviction.{eviction}.X"}, "tiers": {"gpu": {"capacity": f"{pages}pages"}},
        }  # fmt: skip
        bounds = {} if belady is None else {"belady": {"hit_rate": belady, "page_hit_rate": belady}}
        result = summarize(
            self.outcome, command="replay", config=settings | more, choices={"eviction": eviction, "trace": "synthetic"},
            seed=seed, warmup=0, load_s=0, versions={"kvsim": "1"}, bounds={kind: f"{kind}-{pages}-{seed}" for kind in bounds},
            page_bytes=2**20,
        )  # fmt: skip
        result = deepcopy(result) | {"hit_rate": rate}
        result["tiers"]["gpu"]["capacity_pages"] = pages
        self.made += 1
        return Run(name=str(self.made - 1), folder=Path(str(self.made - 1)), result=result, bounds=bounds)


@pytest.fixture
def run(replayed: Outcome) -> Maker:
    del replayed.tiers["cpu"]
    return Maker(replayed)


def figures_of(runs: list[Run]) -> dict[str, dict[str, Any]]:
    return {picture.title: picture.figure for picture in pictures_of(Comparison(runs)) if picture.figure is not None}


def test_a_pivot_has_policies_by_capacity_with_the_gap_and_the_best_and_empty_holes(run: Maker) -> None:
    runs = [run("lru", 0.30, 4, belady=0.5), run("arc", 0.40, 4, belady=0.5), run("lru", 0.55, 16, belady=0.6)]
    [pivot] = pivots(Comparison(runs))
    assert pivot.columns == ["4pages", "16pages"]
    lru, arc, belady = pivot.rows
    assert [cell.text for cell in lru.cells] == ["30.00%", "55.00%"]
    assert [(cell.more, cell.share) for cell in lru.cells] == [("60% of the bound", "60%"), ("92% of the bound", "92%")]
    assert [cell.text for cell in arc.cells] == ["40.00%", ""]
    assert "best-of-column" in arc.cells[0].classes and "best-of-column" not in lru.cells[0].classes
    assert belady.is_bound and [cell.text for cell in belady.cells] == ["50.00%", "60.00%"]


def test_columns_of_a_pivot_are_in_order_of_size_however_they_are_written(run: Maker) -> None:
    runs = [run(policy, 0.1 * place + pages / 100, pages) for place, policy in enumerate(("lru", "arc")) for pages in (16, 4, 8)]
    assert pivots(Comparison(runs))[0].columns == ["4pages", "8pages", "16pages"]


def test_one_differing_setting_needs_no_pivot(run: Maker) -> None:
    assert pivots(Comparison([run("lru", 0.3), run("arc", 0.4)])) == []
    assert pivots(Comparison([run("lru", 0.3)])) == []


def test_values_that_look_alike_are_a_tie(run: Maker) -> None:
    comparison = Comparison([run("lru", 0.400001), run("arc", 0.400002), run("fifo", 0.3)])
    assert comparison.standing(HIT_RATE) == {0: TIE, 1: TIE}
    assert (
        answers(comparison)[0].startswith("Highest hit rate: 1: arc, 0: lru with 40.00% each (a tie)")
        or "each (a tie)" in answers(comparison)[0]
    )
    assert Comparison([run("lru", 0.4), run("arc", 0.3)]).standing(HIT_RATE) == {0: BEST}
    assert Comparison([run("lru", 0.4), run("arc", 0.4)]).standing(HIT_RATE) == {}


def test_runs_that_differ_in_the_seed_are_one_configuration(run: Maker) -> None:
    runs = [run("lru", rate, seed=seed) for seed, rate in enumerate((0.1, 0.2, 0.3))]
    runs += [run("arc", rate, seed=seed) for seed, rate in enumerate((0.2, 0.3, 0.4))]
    runs += [run("fifo", rate, seed=seed) for seed, rate in enumerate((0.2, 0.4, 0.3))]
    comparison = Comparison(runs)
    assert [case.name for case in comparison.cases] == ["0-2", "3-5", "6-8"]
    assert comparison.keys == ["eviction"]
    column = [measure.key for measure in comparison.measures].index("hit_rate")
    half = 4.3027 * 0.1 / 3**0.5  # standard deviation 0.1
    assert [row.cells[column] for row in comparison.rows()[1:3]] == [f"20.00±{half:.2%}", f"30.00±{half:.2%}"]
    assert comparison.standing(HIT_RATE) == {1: TIE, 2: TIE}
    [row, *_] = list(csv.DictReader(io.StringIO(means_csv(runs) or "")))
    assert (row["jobs"], row["seeds"], float(row["hit_rate"])) == ("0 1 2", "3", pytest.approx(0.2))
    assert float(row["hit_rate_half_width"]) == pytest.approx(half, abs=1e-5)


def test_policies_are_compared_seed_by_seed(run: Maker) -> None:
    """lru loses to arc by one point on every seed; fifo loses, on average by more, but not on every seed."""
    rates = {"arc": (0.2, 0.3, 0.4), "lru": (0.19, 0.29, 0.39), "fifo": (0.1, 0.35, 0.39)}
    comparison = Comparison([run(policy, rate, seed=seed) for policy, own in rates.items() for seed, rate in enumerate(own)])
    assert comparison.standing(HIT_RATE) == {0: BEST, 2: NEAR}
    assert answers(comparison)[0].endswith("(95 %, by seed); not distinguishable from the best: 6-8: fifo.")


def test_a_seed_of_the_trace_that_was_set_is_a_setting(run: Maker) -> None:
    runs = [run("lru", 0.1, seed=seed, trace={"_target_": "kvsim.trace.synthetic.S", "seed": 7}) for seed in (0, 1)]
    [case] = Comparison(runs).cases
    assert case.settings["trace.seed"] == "7" and case.settings["seed"] == "0-1"
    assert Comparison(runs).same_results() == ["The seed made no difference to any configuration."]


def test_identical_results_are_named(run: Maker) -> None:
    lines = Comparison([run("lru", 0.3), run("arc", 0.3), run("fifo", 0.2), run("lru", 0.3, 8)]).same_results()
    assert lines == [
        "Identical results in everything, so what differs within each set had no effect: 0, 1 (lru, arc) at gpu 4pages."
    ]


def test_a_picture_that_shows_no_difference_is_left_out(run: Maker) -> None:
    alike = [run("lru", 0.3), run("arc", 0.2)]
    assert "Peak use of tiers" not in figures_of(alike)
    assert alike[1].result is not None
    alike[1].result["tiers"]["gpu"]["peak_pages"] = 1
    assert "Peak use of tiers" in figures_of(alike)


def test_hit_rates_stand_on_a_fitted_axis_over_sizes_with_whiskers(run: Maker) -> None:
    runs = [
        run(policy, 0.36 + pages / 1000 + seed / 500 + (policy == "arc") / 100, pages, seed, belady=0.9)
        for policy in ("lru", "arc") for pages in (4, 16, 40) for seed in (0, 1)
    ]  # fmt: skip
    pictures = {picture.title: picture for picture in pictures_of(Comparison(runs))}
    picture = pictures["Hit rate by gpu capacity"]
    assert picture.figure is not None
    layout, data = picture.figure["layout"], picture.figure["data"]
    assert 0.3 < layout["yaxis"]["range"][0] < 0.36 and layout["yaxis"]["range"][1] < 0.5
    assert layout["xaxis"]["type"] == "log" and layout["xaxis"]["ticktext"] == ["4 MiB", "16 MiB", "40 MiB"]
    assert [trace["name"] for trace in data] == ["lru", "arc"] and all(trace["error_y"]["array"] for trace in data)
    assert "The bounds, at 90.00%, lie outside" in picture.note


def test_bins_are_merged_by_tokens() -> None:
    hits = {"edges": list(range(101)), "prompt_tokens": [1, 3] * 50, "hit_rate": {"gpu": [1.0, 0.0] * 50, "cpu": [0.0, 0.5] * 50}}
    x, y = binned(hits)
    assert len(x) == 50 and x[0] == 1.0 and set(y) == {(1 + 1.5) / 4}


def test_goodput_phases_and_warnings_are_shown_where_results_have_them(run: Maker) -> None:
    runs = [run("lru", 0.3), run("arc", 0.2)]
    for number, each in enumerate(runs):
        assert each.result is not None
        each.result["slo"] = {
            "ttft_s": 1.0,
            "tpot_s": None,
            "classes": [],
            "attainment": 0.9,
            "goodput_requests_per_s": 3.0 + number,
        }
        each.result["phases_s"] = {name: {"mean": 0.1 * (number + 1)} for name in ("queue", "load", "prefill")}
        each.result["warnings"] = ["The queue grows without end."] if number else []
    page = unescape(render_comparison(runs, "kvsim"))
    assert "1: The queue grows without end." in page
    assert "Highest goodput: 1: arc with 4.00 requests/s." in page
    assert "SLO attainment" in page and "queue mean (s)" in page and "Where the time to first token goes" in page
    assert runs[1].result is not None
    own = render(runs[1].result)
    assert "The queue grows without end." in own and "Where the time to first token goes" in own


def test_names_cannot_break_a_page(run: Maker) -> None:
    evil = "<script>alert(1)</script><b>"
    trace = {"_target_": "x.Y", "path": f"/tmp/{evil}.jsonl", "seed": 0}
    runs = [run(evil, 0.3 + pages / 100, pages, trace=trace) for pages in (4, 8)] + [run("lru", 0.1, trace=trace)]
    runs.append(Run(name=evil, folder=Path("x"), error=evil, overrides=[evil]))
    for result in (each.result for each in runs if each.result is not None):
        result["warnings"] = [evil]
    assert runs[0].result is not None
    for page in (render_comparison(runs, evil, shared_script="plotly.min.js"), render(runs[0].result, "../plotly.min.js")):
        assert "alert(1)</script>" not in page and '<b>"' not in page
        assert page.count("<script") == page.count("</script>") == 3
        figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
        assert figures is not None
        names = [trace.get("name", "") for figure in json.loads(figures[1]) for trace in figure["data"]]
        assert names and not any("<" in name for name in names)


def test_the_pages_of_a_sweep_share_a_script_and_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("trace.sessions=20", "tiers.cpu.capacity=4GiB", "tiers.disk.capacity=9GiB", "placement=write_back")
    assert main(["simulate", "-m", *small, "tiers.gpu.capacity=8GiB,9", "output=sweep"]) == 2
    page, job = (Path("sweep", name).read_text() for name in ("report.html", "0/report.html"))
    assert '<script src="plotly.min.js">' in page and '<script src="../plotly.min.js">' in job
    assert Path("sweep/plotly.min.js").stat().st_size > 1e6
    assert len(page) < 100_000 and len(job) < 50_000, "40 jobs take less than 2 MB"
    assert "Failed jobs" in page and "9 has no unit" in page and '<a href="0/report.html">0</a>' in page
    assert main(["report", "sweep", "output=alone.html"]) == 0
    assert "<script src" not in Path("alone.html").read_text() and "plotly.js v" in Path("alone.html").read_text()


def test_the_head_names_the_best_values_and_their_runs(run: Maker) -> None:
    comparison = Comparison([run("lru", 0.3), run("arc", 0.4), run("fifo", 0.4)])
    assert title_of(comparison) == "synthetic: 3 runs by eviction"
    [hit_rate] = tiles(comparison)
    assert hit_rate == Tile("highest hit rate", "40.00%", "1: arc, 2: fifo")
    assert tiles(Comparison([run("lru", 0.3), run("arc", 0.3)]))[0] == Tile("highest hit rate", "30.00%", "all are equal")


def test_only_unbeaten_points_are_named_and_those_at_one_place_once(run: Maker) -> None:
    """A trade of memory for hits: 4 and 8 pages are unbeaten, and at 8 pages lru and arc are the same point."""
    runs = [run("lru", 0.3, 4), run("lru", 0.5, 8), run("arc", 0.5, 8), run("arc", 0.2, 4), run("fifo", 0.4, 8)]
    for each in runs:
        assert each.result is not None
        each.result["ttft_s"] = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0 - each.result["hit_rate"]}
    figure = figures_of(runs)["TTFT p99 (s) by total capacity of all tiers"]
    _, others, best = figure["data"]  # drawn in this order, so that no beaten point covers one that is not
    assert best["text"] == ["gpu 4pages lru", "gpu 8pages lru and 1 more", ""]
    assert best["textposition"][:2] == ["top right", "bottom left"]
    assert others["mode"] == "markers" and others["hovertext"] == ["3: gpu 4pages arc", "4: gpu 8pages fifo"]


def test_a_colour_is_a_policy_and_a_dash_a_capacity_and_few_lines_show_at_first(run: Maker) -> None:
    rates = {"lru": 0.2, "slru": 0.3, "lfu": 0.4}
    runs = [run(policy, rate + pages / 100, pages) for policy, rate in rates.items() for pages in (4, 8)]
    lines = {trace["name"]: trace for trace in figures_of(runs)["Hit rate over the run"]["data"]}
    assert lines["0: gpu 4pages lru"]["line"]["color"] == lines["1: gpu 8pages lru"]["line"]["color"]
    assert lines["0: gpu 4pages lru"]["line"]["dash"] == lines["4: gpu 4pages lfu"]["line"]["dash"] == "solid"
    assert lines["1: gpu 8pages lru"]["line"]["dash"] == "dash"
    shown = {name for name, trace in lines.items() if trace.get("visible", True)}
    assert shown == {"5: gpu 8pages lfu", "0: gpu 4pages lru", "1: gpu 8pages lru"}, (
        "the best, the worst, and LRU beside the best"
    )
    few = figures_of(runs[:3])["Hit rate over the run"]["data"]
    assert all("visible" not in trace for trace in few)


def test_pictures_and_rows_name_cases_alike_so_that_both_can_be_filtered(run: Maker) -> None:
    runs = [run("lru", 0.1, 4), run("lru", 0.2, 8), run("arc", 0.15, 4), run("arc", 0.3, 8)]
    page = render_comparison(runs, "kvsim report")
    assert re.findall(r'data-case="(\d+)" data-runs="(\d+)"', page) == [("0", "0"), ("1", "1"), ("2", "2"), ("3", "3")]
    [by_capacity, *_] = figures_of(runs).values()
    assert {trace["name"]: trace["meta"]["cases"] for trace in by_capacity["data"]} == {"lru": [0, 1], "arc": [2, 3]}
    comparison = Comparison(runs)
    over_the_run = figures_of(runs)["Hit rate over the run"]
    assert [trace["name"] for trace in over_the_run["data"]] == [
        comparison.label(trace["meta"]["case"]) for trace in over_the_run["data"]
    ]
    assert 'class="filter"' not in page
    more = [*runs, run("fifo", 0.1, 4), run("fifo", 0.2, 8)]
    assert 'class="filter" hidden' in render_comparison(more, "kvsim report"), "without JavaScript it has no effect"
