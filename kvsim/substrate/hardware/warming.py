"""What steps one after another say of a GPU that warms up."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp
from statistics import covariance, fmean, variance

TIMES_S = [0.05 * 1.2**power for power in range(17)]
"""Time constants that are tried, up to 0.92 seconds."""
FEWEST = 9
"""Steps; of fewer there is nothing to be said."""


def warming(step_s: Sequence[float]) -> tuple[float, float]:
    """(time of a step on a rested GPU as a share of that on a warm one, time constant in seconds).

    The first step follows a rest. Least squares: a step takes what it takes on a warm GPU, less a gain times the mean of
    exp(-t / time constant) while it runs. (1, the longest time constant) where rest makes no step faster.
    """
    if len(step_s) < FEWEST:
        return 1.0, TIMES_S[-1]
    fits = []
    for time_s in TIMES_S:
        left = [exp(-at_s / time_s) for at_s in accumulate(step_s, initial=0.0)]
        cold = [time_s * (a - b) / seconds for (a, b), seconds in zip(pairwise(left), step_s, strict=True)]
        gain_s = -covariance(cold, step_s) / variance(cold)
        warm_s = fmean(step_s) + gain_s * fmean(cold)
        error = sum((seconds - warm_s + gain_s * c) ** 2 for c, seconds in zip(cold, step_s, strict=True))
        fits.append((error, 1.0 - gain_s / warm_s, time_s))
    _, share, time_s = min(fits)
    return (share, time_s) if 0 < share < 1 else (1.0, TIMES_S[-1])
