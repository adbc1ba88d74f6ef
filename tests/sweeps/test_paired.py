"""The difference of two runs and its noise, against the definition and against draws."""

import numpy as np
import pytest

from kvsim.sweeps.paired import difference


def test_a_difference_is_one_of_ratios_of_sums() -> None:
    own, other, weights = np.array([4.0, 1.0, 0.0]), np.array([2.0, 1.0, 1.0]), np.array([10.0, 5.0, 5.0])
    assert difference(own, other, weights).value == pytest.approx((5 - 4) / 20)
    assert difference(own, other, weights).standard_error is None, "three requests say nothing of the noise"


def test_requests_without_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="no weight"):
        difference(np.ones(2), np.ones(2), np.zeros(2))


def test_equal_gains_have_no_noise() -> None:
    weights = np.full(100, 8.0)
    found = difference(np.full(100, 3.0), np.full(100, 1.0), weights)
    assert found.value == pytest.approx(0.25)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)


def test_the_standard_error_by_hand() -> None:
    # Two parts of two requests each: gains 2 and 6 of weights 10 and 10, so the rate is .4 and the rests are -2 and 2.
    found = difference(np.array([1.0, 1.0, 3.0, 3.0]), np.zeros(4), np.full(4, 5.0), parts=2)
    assert found.value == pytest.approx(0.4)
    assert found.standard_error == pytest.approx((2 / 1 * (4 + 4)) ** 0.5 / 20)


def test_intervals_cover_the_truth_nineteen_times_in_twenty() -> None:
    draws = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        weights = draws.integers(1, 50, 400).astype(float)
        gains = weights * draws.normal(0.1, 0.5, 400)
        found = difference(gains, np.zeros(400), weights)
        assert found.standard_error is not None
        covered += abs(found.value - 0.1) < 2.09 * found.standard_error  # Student's t with 19 degrees of freedom
    assert 0.92 <= covered / 400 <= 0.98
