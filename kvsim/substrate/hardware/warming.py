"""Estimates how a GPU warms up from the times of consecutive steps."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp
from statistics import covariance, fmean, variance

TIMES_S = [0.05 * 1.2**power for power in range(17)]
"""Candidate time constants, up to 0.92 seconds."""
FEWEST = 9
"""Fewest steps needed for an estimate."""


def warming(step_s: Sequence[float]) -> tuple[float, float]:
    """Return the time of a step on a rested GPU as a share of that on a warm GPU, and the time constant in seconds.

    The first step follows a rest. The model, fitted by least squares: a step takes its time on a warm GPU minus a gain times the
    mean of exp(-t / time constant) while it runs. Returns 1 and the longest time constant if rest makes no step faster.
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
