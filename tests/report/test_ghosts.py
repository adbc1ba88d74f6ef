"""Belady's bound and an unlimited cache beside the hits of a run."""

from typing import Any

import pytest

from kvsim.engine.outcome import Outcome
from kvsim.report.html import render
from kvsim.results.result import RunRecord, summarize
from tests.report.test_html import Page

BOUNDS = {"belady": {"hit_rate": 0.5}, "unlimited": {"hit_rate": 0.625}}


def record(outcome: Outcome, names: dict[str, str] | None = None) -> RunRecord:
    """A third of its 120 prompt tokens are hits."""
    return summarize(outcome, command="replay", config={}, seed=0, warmup=0, load_s=0, versions={}, bounds=names)


def test_the_bounds_are_drawn_to_scale_with_what_they_mean(simulated: Outcome) -> None:
    page = render(record(simulated), bounds=BOUNDS)
    assert '<div class="ghost"><i class="belady" style="width:50.00%"></i></div>' in page
    assert '<div class="ghost"><i class="unlimited" style="width:62.50%"></i></div>' in page
    text = Page(page).text
    assert "Belady's bound 50.00%" in text and "unlimited cache 62.50%" in text
    assert "Belady's bound: the most page hits that any policies can get" in text
    assert "of 120 prompt tokens, 67% of Belady's bound" in text


@pytest.mark.parametrize("bounds", [{}, {"belady": {"hit_rate": None}, "unlimited": {"hit_rate": None}}])
def test_a_run_without_bounds_has_no_word_of_them(bounds: dict[str, Any], simulated: Outcome) -> None:
    page = render(record(simulated), bounds=bounds)
    assert 'class="ghost"' not in page and "elady" not in Page(page).text


def test_where_bounds_hold_and_are_not_given_the_page_says_where_they_are(simulated: Outcome) -> None:
    text = Page(render(record(simulated, {"belady": "belady-1"}))).text
    assert "on the page that kvsim report makes of it" in text and "the most page hits" not in text


def test_a_bound_of_zero_has_no_share(simulated: Outcome) -> None:
    assert "of Belady" not in Page(render(record(simulated), bounds={"belady": {"hit_rate": 0.0}})).text
