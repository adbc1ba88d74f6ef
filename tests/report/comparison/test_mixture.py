"""Runs of different requests beside each other, and measures that are equal as shown."""

from pathlib import Path

import pytest

import kvsim
from kvsim.report.comparison.compare import Comparison
from kvsim.report.comparison.findings import answers
from kvsim.report.comparison.html import render_comparison
from kvsim.report.comparison.pictures import pictures_of
from kvsim.report.figure import fitted_range
from kvsim.results.fields import BY_KEY
from kvsim.results.runs import Run, read_runs

TIERS = "tiers.gpu.capacity=3000pages,6000pages"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The first 60 requests of a trace, and all, at two capacities each."""
    folder = tmp_path_factory.mktemp("mixture")
    for limit in (60, None):
        trace = kvsim.load_trace("synthetic", sessions=60, limit=limit)
        kvsim.sweep(trace, {"tiers.gpu.capacity": ["3000pages", "6000pages"]}, output=folder / str(limit))
    return [folder / "60", folder / "None"]


def test_a_yellow_box_says_that_the_requests_differ_and_nothing_is_called_the_best(folders: list[Path]) -> None:
    runs = read_runs(folders)
    comparison = Comparison(runs)
    (line,) = comparison.mixture()
    assert line.startswith("These runs served different requests (60, ") and "not comparable" in line
    assert answers(comparison) == []
    assert not any(comparison.standing(measure) for measure in comparison.measures)
    page = render_comparison(runs, "kvsim report")
    assert f'<div class="warning" role="note"><ul><li>{line}' in page
    assert "Highest hit rate" not in page and "trace limit" in page


def test_cases_of_the_same_requests_are_still_ranked(folders: list[Path]) -> None:
    comparison = Comparison(read_runs(folders))
    assert comparison.standing(BY_KEY["hit_rate"], [2, 3]) or len({case.first["hit_rate"] for case in comparison.cases[2:]}) == 1
    assert Comparison(read_runs(folders[1:])).mixture() == []


def test_no_line_joins_runs_of_different_requests(folders: list[Path]) -> None:
    comparison = Comparison(read_runs(folders))
    titles = {picture.title: picture.figure for picture in pictures_of(comparison)}
    by_capacity = titles["Hit rate by gpu capacity"]["data"]
    assert len(by_capacity) == 2 and {len(trace["x"]) for trace in by_capacity} == {2}
    assert not {"belady", "unlimited"} & {trace["name"] for trace in by_capacity}
    assert not any("by total capacity" in title for title in titles), "a front would compare them"


def test_a_setting_that_only_some_runs_have_is_among_what_they_differ_in(folders: list[Path]) -> None:
    assert "trace.limit" in Comparison(read_runs(folders)).keys


def test_a_measure_that_is_equal_as_shown_has_no_picture(folders: list[Path]) -> None:
    runs = read_runs(folders[1:])
    for run in runs:
        assert run.result is not None
        run.result["hit_rate"] = 0.5 + 1e-7 * int(run.name)
    titles = [picture.title for picture in pictures_of(Comparison(runs))]
    assert "Hit rate by gpu capacity" not in titles
    runs[0].result = dict(runs[0].result or {}, hit_rate=0.4)
    assert "Hit rate by gpu capacity" in [picture.title for picture in pictures_of(Comparison([*runs, *list[Run]()]))]


def test_no_axis_is_finer_than_the_digits_of_its_labels() -> None:
    """3.20 and 3.21 differ in the third digit: an axis of 0.06 has room for labels that differ, too."""
    (low, high), _ = fitted_range([3.20, 3.21])
    assert high - low >= 0.06 and low < 3.20 and high > 3.21
    (low, high), _ = fitted_range([0.1, 0.9])
    assert high - low == pytest.approx(0.8 + 2 * 0.08 * 0.8)
    (low, high), _ = fitted_range([2.0, 2.0])
    assert low < 2.0 < high
