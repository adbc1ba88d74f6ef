"""Estimates how durations vary from rounds of repeated identical actions."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvsim.hardware.noise import Variation

PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
FEWEST = 3
"""Fewest durations of a round that tell how they vary."""
MOST_CORRELATION = 0.95
ERROR_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median of normal values, relative to that of their mean."""


def varied(rounds: Sequence[Sequence[float]]) -> Variation | None:
    """Return how durations vary: each round's median from the others', and each duration from its round's median.

    ``rounds`` have the durations of one action, in order. What medians differ by because a round has few durations is not
    counted as a difference between runs. Returns None for rounds of fewer than ``FEWEST``.
    """
    rounds = [durations for durations in rounds if len(durations) >= FEWEST]
    if not rounds:
        return None
    medians = [statistics.median(durations) for durations in rounds]
    ratios = [[duration / median for duration in durations] for durations, median in zip(rounds, medians, strict=True)]
    quantiles = np.quantile(np.concatenate(ratios), PROBABILITIES).tolist()
    return Variation(
        run=_between(medians, ratios),
        correlation=statistics.fmean(_correlation(some) for some in ratios),
        each=[list(row) for row in zip(PROBABILITIES, quantiles, strict=True)],
    )


def _between(medians: Sequence[float], ratios: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of the logarithms of the rounds' medians beyond the error of a median."""
    if len(medians) < 2:
        return 0.0
    found = statistics.variance([math.log(median) for median in medians])
    errors = [(ERROR_OF_MEDIAN * _width(some)) ** 2 / len(some) for some in ratios]
    return min(0.99, math.sqrt(max(0.0, found - statistics.fmean(errors))))


def _width(ratios: Sequence[float]) -> float:
    """Return half the width of the middle 68 % of the logarithms: the standard deviation if they were normal."""
    low, high = np.quantile(np.log(ratios), (0.16, 0.84)).tolist()
    return float(high - low) / 2


def _correlation(values: Sequence[float]) -> float:
    """Return the correlation of each value's normal score with the next one's, from 0 to ``MOST_CORRELATION``."""
    if min(values) == max(values):
        return 0.0
    normal, count = statistics.NormalDist(), len(values)
    ranks = np.argsort(np.argsort(values, kind="stable")).tolist()
    scores = [normal.inv_cdf((rank + 0.5) / count) for rank in ranks]
    products = math.fsum(one * other for one, other in pairwise(scores)) / (count - 1)
    return min(MOST_CORRELATION, max(0.0, products * count / math.fsum(score * score for score in scores)))
