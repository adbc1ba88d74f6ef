"""What repeated durations tell of a machine's noise: drawn noise is found again."""

import numpy as np
import pytest

from kvsim.calibration.variation import FEWEST, PROBABILITIES, varied
from kvsim.hardware.noise import Variation
from kvsim.substrate.simulated.noise import Factors

HEAVY = [[0, 0.9], [0.25, 0.98], [0.5, 1.0], [0.9, 1.05], [0.99, 1.5], [1, 4.0]]


def rounds(variation: Variation, count: int, each: int) -> list[list[float]]:
    """Durations of an action that takes 3 ms."""
    made = [Factors(variation, np.random.default_rng(seed)) for seed in range(count)]
    return [[0.003 * factors.draw() for _ in range(each)] for factors in made]


def test_quantiles_are_relative_to_the_median_of_their_round() -> None:
    found = varied([[2.0, 1.0, 3.0], [20.0, 30.0, 10.0]])
    assert found is not None
    quantiles = dict(found.each)
    assert (quantiles[0.0], quantiles[0.5], quantiles[1.0]) == (0.5, 1.0, 1.5)
    assert tuple(quantiles) == PROBABILITIES


@pytest.mark.parametrize(("run", "correlation"), [(0.0, 0.0), (0.1, 0.0), (0.05, 0.6)])
def test_noise_that_was_drawn_is_found_again(run: float, correlation: float) -> None:
    found = varied(rounds(Variation(each=HEAVY, run=run, correlation=correlation), 60, 300))
    assert found is not None
    assert found.run == pytest.approx(run, rel=0.25, abs=0.006) and found.correlation == pytest.approx(correlation, abs=0.05)
    quantiles = dict(found.each)
    expected = np.interp((0.1, 0.25, 0.75, 0.9, 0.99), *np.transpose(HEAVY))
    assert [quantiles[p] for p in (0.1, 0.25, 0.75, 0.9, 0.99)] == pytest.approx(expected, rel=0.03)
    assert quantiles[1.0] > 2


def test_medians_that_differ_because_a_round_is_short_are_no_difference_between_runs() -> None:
    """Of twenty durations each, which are up to a quarter from the median in two of three cases."""
    wide = Variation(each=[[0, 0.5], [0.16, 0.8], [0.5, 1.0], [0.84, 1.25], [1, 2.0]])
    found = varied(rounds(wide, 200, 20))
    assert found is not None and found.run < 0.03
    medians = [float(np.log(np.median(some))) for some in rounds(wide, 200, 20)]
    assert np.std(medians) > 0.05


def test_too_few_durations_tell_nothing() -> None:
    assert varied([[1.0] * (FEWEST - 1)] * 9) is None and varied([]) is None
    alone = varied([[1.0] * FEWEST])
    assert alone is not None and (alone.run, alone.correlation) == (0, 0)
