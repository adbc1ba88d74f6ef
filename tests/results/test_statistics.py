"""Means over seeds, their intervals, and comparisons by seed: numbers checked by hand or against published tables."""

import pytest

from kvsim.results.statistics import Mean, is_distinguishable, mean_of, paired_difference, student_t


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423), (120, 1.9799)],
)
def test_students_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, abs=5e-5)


def test_a_mean_has_an_interval_by_students_t() -> None:
    mean = mean_of([1.0, 2.0, 3.0])  # standard deviation 1, of the mean 1 / sqrt(3)
    assert mean is not None and mean.mean == 2.0 and mean.number == 3
    assert mean.half_width == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert mean_of([]) is None
    assert mean_of([0.1]) == Mean(0.1, None, 1)
    assert mean_of([0.1, 0.1, 0.1]) == Mean(0.1, 0.0, 3)


def test_seeds_in_common_are_compared_pair_by_pair() -> None:
    """The seeds differ by far more than the policies: only pairs show that one policy is always better."""
    one, other = {0: 0.10, 1: 0.50, 2: 0.90}, {0: 0.08, 1: 0.47, 2: 0.88}
    difference = paired_difference(one, other)
    assert difference is not None and difference.mean == pytest.approx(0.07 / 3)
    assert difference.half_width == pytest.approx(4.3027 * 0.0057735 / 3**0.5, abs=1e-4)
    assert is_distinguishable(difference)
    assert not is_distinguishable(paired_difference({0: 0.1, 1: 0.3, 2: 0.2}, {0: 0.2, 1: 0.2, 2: 0.2}))
    assert paired_difference({0: 0.1}, {0: 0.2}) is None
    assert paired_difference({0: 0.1, 1: 0.2}, {2: 0.2, 3: 0.3}) is None
