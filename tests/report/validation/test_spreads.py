"""How far two samples of runs are apart: numbers small enough to check by hand."""

import numpy as np
import pytest

from kvsim.report.validation.spreads import deviation, distance_of_means, distance_of_pairs, mean
from kvsim.results.statistics import student_t


def test_mean_and_deviation() -> None:
    assert (mean([1, 2, 6]), deviation([1, 2, 6])) == (3, pytest.approx(7**0.5))
    assert mean([0.1] * 3) == 0.1 and deviation([0.1] * 3) == deviation([5.0]) == 0


def test_measurements_that_spread_more_widen_the_interval() -> None:
    """Welch's: variances 0 and 4, two simulations and three measurements; 4/3 in all, and 2 degrees of freedom."""
    found = distance_of_means([12, 12], [8, 10, 12])
    assert found.distance == 2 and found.half_width == pytest.approx(student_t(2) * (4 / 3) ** 0.5)
    assert not found.is_off and (found.low, found.high) == pytest.approx((2 - found.half_width, 2 + found.half_width))


def test_measurements_that_are_close_by_chance_do_not_narrow_it() -> None:
    """Student's: variances 4/3 (four simulations) and 0 (two measurements), so 1 in common, with 4 degrees of freedom."""
    found = distance_of_means([1, 1, 3, 3], [3, 3])
    assert found.distance == -1 and found.half_width == pytest.approx(student_t(4) * (1 / 4 + 1 / 2) ** 0.5)
    assert not found.is_off


def test_a_single_simulation_is_one_more_run() -> None:
    """All spread is that of the three runs: variance 1, freedom 2."""
    assert distance_of_means([20], [9, 10, 11]).half_width == pytest.approx(student_t(2) * (1 + 1 / 3) ** 0.5)
    assert distance_of_means([20], [9, 10, 11]).is_off and not distance_of_means([12], [9, 10, 11]).is_off


def test_without_spread_any_difference_is_off_but_rounding_is_none() -> None:
    assert distance_of_means([0.3] * 4, [0.2] * 2).is_off
    same = distance_of_means([0.1 + 0.2] * 4, [0.3] * 2)
    assert (same.distance, same.half_width) == (0, 0) and not same.is_off
    assert not distance_of_means([0.0], [0.0, 0.0]).is_off


def test_pairs_are_compared_with_pairs_of_measurements() -> None:
    """Likeness of numbers is how far they are apart: 2 between the runs 0 and 2, and 1 from the simulation 1 to each."""
    runs = [1, 0, 2]
    found, (simulated, measured) = distance_of_pairs(lambda one, other: abs(runs[one] - runs[other]), 1, 2)
    assert (simulated, measured, found.distance) == ([1], [2, 2], -1)
    assert found.half_width == 0, "both runs contribute 2 * 2 - 1"


def test_a_run_counts_in_every_pair_it_is_in() -> None:
    """Apart from one another 1, 3 and 4 (means 2, 2.5, 3.5), and 0, 1, 4 from the simulation: contributions 4, 4, 3."""
    runs = [0, 0, 1, 4]
    found, (_, measured) = distance_of_pairs(lambda one, other: abs(runs[one] - runs[other]), 1, 3)
    assert measured == [2.5, 2, 3.5] and found.distance == pytest.approx(5 / 3 - 8 / 3)
    contributions = [2 * 2.5 - 0, 2 * 2 - 1, 2 * 3.5 - 4]
    assert found.half_width == pytest.approx(student_t(2) * deviation(contributions) * (1 + 1 / 3) ** 0.5)


@pytest.mark.parametrize(("simulations", "measurements"), [(20, 3), (5, 5)])
def test_equal_machines_are_seldom_off(simulations: int, measurements: int) -> None:
    """At most about 5 in 100, also where the simulation spreads less than the machine."""
    rng = np.random.default_rng(1)
    for spread in (1.0, 0.3):
        draws = [(spread * rng.normal(size=simulations), rng.normal(size=measurements)) for _ in range(1000)]
        assert sum(distance_of_means(one.tolist(), other.tolist()).is_off for one, other in draws) / 1000 < 0.075
        assert sum(distance_of_means(one.tolist(), (other + 5).tolist()).is_off for one, other in draws) / 1000 > 0.8


def test_equal_machines_are_seldom_off_in_pairs() -> None:
    """A run deviates from the usual in one choice of ten; those of another machine share further deviations."""
    rng, off, found = np.random.default_rng(2), 0, 0
    for _ in range(300):
        runs = rng.random((13, 60)) < 0.1
        off += closer(runs)
        runs[10:] ^= rng.random(60) < 0.3
        found += closer(runs)
    assert off / 300 < 0.1 and found / 300 > 0.8


def closer(runs: np.ndarray) -> bool:
    """Whether the last three of 13 runs are more alike than they are like the others."""
    distance, _ = distance_of_pairs(lambda one, other: float((runs[one] == runs[other]).mean()), 10, 3)
    return distance.high < 0
