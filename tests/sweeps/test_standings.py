"""The order of a leaderboard, by hand."""

from dataclasses import replace
from math import sqrt

import pytest

from kvsim.sweeps.paired import Difference
from kvsim.sweeps.standings import Cell, noise_of, standings, verdict


def cell(policy: str, trace: str, gain: float | None, noise: float | None = 0.1, cost: float = 1.0, reason: str = "") -> Cell:
    return Cell(policy=policy, trace=trace, capacity="1", value=gain, gain=gain, noise=noise, cost=cost, reason=reason)


def test_the_best_mean_gain_comes_first_and_equal_ones_go_by_name() -> None:
    cells = [cell("lru", "a", 0.0), cell("b", "a", 2.0), cell("a", "a", 2.0), cell("worst", "a", -1.0)]
    assert [one.policy for one in standings(cells)] == ["a", "b", "lru", "worst"]


def test_a_policy_that_failed_somewhere_is_last_with_the_reason() -> None:
    cells = [cell("lru", "a", 0.0), cell("lru", "b", 0.0), cell("mine", "a", 5.0), cell("mine", "b", None, reason="no sessions")]
    last = standings(cells)[-1]
    assert (last.policy, last.gain, last.missing, last.reason, last.best) == ("mine", None, 1, "no sessions", 5.0)


def test_means_worst_best_and_costs() -> None:
    (one,) = standings([cell("p", "a", 1.0, cost=2.0), cell("p", "a", -3.0, cost=8.0)])
    assert (one.gain, one.worst, one.best) == (-1.0, -3.0, 1.0)
    assert one.cost == pytest.approx(4.0), "the geometric mean"


def test_a_share_of_the_bound_is_not_ruled_by_cells_with_next_to_nothing_to_gain() -> None:
    """1 of 4 and -0.1 of 0.01, and nothing of nothing: 0.9 of 4.01, not -488%."""
    cells = [replace(cell("p", "a", 1.0), most=4.0), replace(cell("p", "b", -0.1), most=0.01), cell("p", "c", 0.0)]
    (one,) = standings(cells)
    assert one.headroom == pytest.approx(0.9 / 4.01)


def test_noise_adds_up_within_a_trace_and_by_squares_between_traces() -> None:
    (one,) = standings([cell("p", "a", 1.0, 0.3), cell("p", "a", 1.0, 0.3), cell("p", "b", 1.0, 0.8), cell("p", "b", 1.0, 0.0)])
    assert one.noise == pytest.approx(sqrt(0.6**2 + 0.8**2) / 4)
    (short,) = standings([cell("p", "a", 1.0, 0.3), cell("p", "b", 1.0, None)])
    assert short.noise is None


@pytest.mark.parametrize(("gain", "noise", "best"), [(1.0, 0.5, "p"), (1.0, 1.5, "lru"), (1.0, None, "p"), (-1.0, 0.1, "lru")])
def test_only_a_gain_above_its_noise_is_taken(gain: float, noise: float | None, best: str) -> None:
    places = standings([cell("lru", "a", 0.0, 0.0), cell("p", "a", gain, noise)])
    assert verdict(places, "lru")[0] == best


def test_twenty_parts_have_students_interval() -> None:
    assert noise_of(Difference(1.0, 0.1)) == pytest.approx(0.2093, abs=1e-4), "t(0.975, 19), of printed tables"
    assert noise_of(Difference(1.0, None)) is None


def test_what_knows_the_future_is_never_the_one_to_take() -> None:
    places = standings([cell("lru", "a", 0.0, 0.0), cell("oracle", "a", 9.0), cell("p", "a", 1.0)])
    assert [one.policy for one in places] == ["oracle", "p", "lru"]
    assert verdict(places, "lru", ["oracle"])[0] == "p"


def test_no_noise_is_claimed_that_is_not_known() -> None:
    places = standings([cell("lru", "a", 0.0, None), cell("p", "a", 1.0, None)])
    assert verdict(places, "lru")[1] == "p has the largest gain over lru, on traces too short to tell how much is noise"


def test_without_the_baseline_there_is_no_gain_to_speak_of() -> None:
    places = standings([cell("lru", "a", None, reason="no request fits"), cell("p", "a", None, reason="the baseline failed")])
    assert verdict(places, "lru") == ("lru", "lru, with which all are compared, failed: no request fits")
