"""Axes that show differences, and lines that can be told apart."""

import pytest

from kvsim.report.figure import Styles, fitted_range, laid_out, value_axis
from kvsim.report.template import compact, in_script
from kvsim.results.rates import size


def test_an_axis_is_fitted_to_its_values() -> None:
    (low, high), _ = fitted_range([0.36, 0.41])
    assert 0.35 < low < 0.36 and 0.41 < high < 0.42


def test_bounds_are_on_the_axis_only_while_the_values_fill_a_third_of_it() -> None:
    assert fitted_range([0.2, 0.6], [0.7])[1]
    axis, has_bounds = fitted_range([0.36, 0.41], [0.70])
    assert not has_bounds and axis[1] < 0.5


def test_equal_values_have_an_axis_around_them() -> None:
    (low, high), _ = fitted_range([0.5, 0.5])
    assert low < 0.5 < high
    assert fitted_range([0.0])[0] == [0.0, 0.01]


def test_capacities_stand_at_their_sizes() -> None:
    gib = 2**30
    axis = value_axis([gib * capacity for capacity in (10, 40, 100)], size)
    assert axis == {"type": "log", "tickvals": [10 * gib, 40 * gib, 100 * gib], "ticktext": ["10 GiB", "40 GiB", "100 GiB"]}
    assert value_axis([0, 40 * gib, 100 * gib], size)["type"] == "linear"
    crowded = value_axis([gib * capacity for capacity in range(10, 110)], size)["ticktext"]
    assert 4 <= len(crowded) <= 10 and crowded[0] == "10 GiB"


def test_no_two_of_many_lines_look_alike_and_known_policies_always_look_the_same() -> None:
    names = [f"policy {number}" for number in range(30)]
    styles = Styles(["lru", *names])
    looks = [(line["color"], line["dash"]) for line in map(styles.line, ["lru", *names])]
    assert len(set(looks)) == len(looks)
    assert Styles(["arc", "lru"]).line("lru") == Styles(["mine", "lru"]).line("lru") != Styles(["mine", "lru"]).line("mine")


def test_traces_over_the_same_places_share_them_and_nothing_ends_the_script() -> None:
    x = [1, 2]
    figure = compact(laid_out([{"x": x, "y": [1, 1]}, {"x": [1, 2], "y": [2, 2]}, {"x": [3], "name": "</script>"}], "", ""))
    assert [trace.get("x_of") for trace in figure["data"]] == [None, 0, None]
    assert "x" not in figure["data"][1]
    assert "<" not in in_script(figure)
    with pytest.raises(ValueError, match="JSON"):
        in_script([float("nan")])
