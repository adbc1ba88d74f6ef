"""The pictures of a run: what is too little to say much, and what a colour means."""

import pytest

from kvsim.engine.outcome import Outcome
from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.report.pictures import ENGINE_COLOURS, FEW, PHASE_COLOURS, merged, pictures_of, summed
from kvsim.report.template import compact
from kvsim.report.tier_looks import look_of
from kvsim.results.result import summarize


def test_bins_are_merged_until_they_hold_enough_requests() -> None:
    assert FEW == 20
    assert merged([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], served=50) == [(0, 2, 20.0), (2, 4, 20.0), (4, 5, 10.0)]
    assert merged([0.0, 1.0, 2.0], served=50) == [(0, 1, 25.0), (1, 2, 25.0)]


def test_bins_of_one_instant_are_merged_with_others() -> None:
    assert merged([0.0, 3.0, 3.0, 3.0], served=90) == [(0, 3, 90.0)]
    assert merged([3.0, 3.0, 6.0], served=60) == [(0, 2, 60.0)]


def test_merged_rates_are_those_of_all_tokens() -> None:
    assert summed([1.0, 0.0, 0.5], [1, 3, 10], [(0, 2, 20.0), (2, 3, 20.0)]) == [0.25, 0.5]


def test_a_step_of_few_requests_is_pale(simulated: Outcome) -> None:
    record = summarize(simulated, command="simulate", config={}, seed=0, warmup=0, load_s=0, versions={})
    picture = pictures_of(record)[0]
    assert picture.figure is not None
    gpu = picture.figure["data"][0]
    assert gpu["type"] == "bar" and gpu["marker"]["opacity"] == [0.35], "three requests, in one step"
    assert sum(trace["y"][0] for trace in picture.figure["data"]) == pytest.approx(40 / 120, abs=1e-4)


def test_steps_of_several_tiers_have_their_places_and_widths_once(simulated: Outcome) -> None:
    record = summarize(simulated, command="simulate", config={}, seed=0, warmup=0, load_s=0, versions={})
    picture = pictures_of(record)[0]
    assert picture.figure is not None
    first, second = compact(picture.figure)["data"]
    assert "width" in first and (second["width_of"], second["x_of"]) == (0, 0) and "width" not in second


def test_a_colour_of_a_runs_page_means_one_thing() -> None:
    colours = [*ENGINE_COLOURS, *PHASE_COLOURS.values(), *(look_of(tier).colour for tier in ALWAYS)]
    assert len(set(colours)) == len(colours)
