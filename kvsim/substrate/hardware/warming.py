"""Estimates how a GPU warms up from the times of equal steps."""

from collections.abc import Sequence
from statistics import covariance, fmean, variance

from kvsim.substrate.simulated.warmth import Coldness

TIMES_S = [0.05 * 1.2**power for power in range(22)]
"""Candidate time constants, up to 2.3 seconds."""
FEWEST = 9
"""Fewest steps needed for an estimate."""


def warming(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the time of a step on a rested GPU as a share of that on a busy GPU, and the time constant in seconds.

    ``steps`` have equal work: when each began and how long it took, in order; the first follows a rest. The model, fitted by
    least squares: a step takes its time on a busy GPU minus a gain times the mean of ``Coldness`` while it runs. Returns 1 and
    the longest time constant if rest makes no step faster.
    """
    if len(steps) < FEWEST:
        return 1.0, TIMES_S[-1]
    step_s, fits = [seconds for _, seconds in steps], []
    for time_s in TIMES_S:
        cold = coldness(steps, time_s)
        gain_s = -covariance(cold, step_s) / variance(cold)
        warm_s = fmean(step_s) + gain_s * fmean(cold)
        error = sum((seconds - warm_s + gain_s * c) ** 2 for c, seconds in zip(cold, step_s, strict=True))
        fits.append((error, 1.0 - gain_s / warm_s, time_s))
    _, share, time_s = min(fits)
    return (share, time_s) if 0 < share < 1 else (1.0, TIMES_S[-1])


def coldness(steps: Sequence[tuple[float, float]], time_s: float) -> list[float]:
    """Return the mean coldness during each step, for this time constant."""
    state, means = Coldness(time_s), []
    for begin_s, seconds in steps:
        means.append(state.over(begin_s, seconds) / seconds)
        state.work(begin_s, seconds)
    return means
