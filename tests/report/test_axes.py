"""Logarithmic axes: ticks at round numbers, said in full, none on another."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.report.axes import MOST_GAPS, log_axis, number_text, seconds_text


def test_times_are_said_in_full() -> None:
    texts = [seconds_text(time) for time in (2e-5, 0.005, 0.02, 0.1, 2.0, 8000.0)]
    assert texts == ["20 us", "5 ms", "20 ms", "0.1 s", "2 s", "8,000 s"]
    assert [number_text(value) for value in (0.015625, 0, 1, 12_000, 1.5, 1e-12)] == [
        "0.015625",
        "0",
        "1",
        "12,000",
        "1.5",
        "1e-12",
    ]


def test_ticks_are_round_numbers_between_the_values() -> None:
    assert log_axis([0.004, 0.3], seconds_text)["ticktext"] == ["5 ms", "10 ms", "20 ms", "50 ms", "0.1 s", "0.2 s"]
    assert log_axis([2, 236])["ticktext"] == ["2", "5", "10", "20", "50", "100", "200"]
    assert log_axis([0.001, 1e5])["ticktext"] == ["0.001", "0.01", "0.1", "1", "10", "100", "1,000", "10,000", "100,000"]
    assert len(log_axis([1130, 1889])["ticktext"]) >= 2, "no power of ten is between them"
    assert log_axis([10, 14])["ticktext"] == ["10", "11", "12", "13", "14"]
    assert log_axis([10, 20])["ticktext"] == ["10", "12", "14", "16", "18", "20"]
    assert log_axis([10, 30])["ticktext"] == ["10", "20", "30"]


@pytest.mark.parametrize("value", [1.0, 3.3, 1e-9])
def test_a_single_value_has_an_axis(value: float) -> None:
    low, high = log_axis([value, value])["range"]
    assert low < math.log10(value) < high


@given(st.lists(st.floats(1e-9, 1e12), min_size=2))
def test_no_tick_is_near_another(values: list[float]) -> None:
    axis = log_axis(values)
    places = [math.log10(tick) for tick in axis["tickvals"]]
    low, high = axis["range"]
    assert low - 1e-4 <= min(places) and max(places) <= high + 1e-4
    assert all((other - one) * (MOST_GAPS + 1) >= high - low for one, other in pairwise(places))
    assert len(set(axis["ticktext"])) == len(places)
