"""Estimates how a GPU warms up, and the overhead of prefill, from the times of steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvsim.substrate.simulated.warmth import Coldness

TIMES_S = [0.05 * 1.2**power for power in range(22)]
"""Candidate time constants, up to 2.3 seconds."""
FEWEST = 9
"""Fewest steps needed for an estimate."""
ODD = 0.2
"""Steps whose ratio of measured to expected time exceeds the median by more than this were interrupted."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step with prefill."""

    begin_s: float
    took_s: float
    busy_s: float
    """Time that a busy GPU is expected to take."""
    counts: bool = True
    """Whether the step's time tells anything; if not, the step still warms the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warming:
    """How steps with prefill depend on what the GPU did before."""

    overhead_s: float = 0.0
    """Time that each step takes beyond what is expected of it."""
    rested_share: float = 1.0
    """Expected time of a step on a rested GPU, as a share of that on a busy GPU."""
    time_s: float = TIMES_S[-1]
    """Time constant of becoming busy or rested."""


def warming(steps: Sequence[TimedStep]) -> Warming:
    """Return the estimate that predicts ``steps`` best.

    ``steps`` are in order, and the first follows a rest. The model, fitted by least squares, a second of a step counting as much
    as any other: a step takes an overhead, and what is expected of a busy GPU less a gain times the mean of ``Coldness`` while it
    runs. All three are estimated together: where short steps follow rests and long ones do not, an overhead that is measured by
    itself, and is a little off, passes for another time constant. Neither overhead nor gain is below 0; without a gain, the time
    constant is the longest.
    """
    ratios = np.array([step.took_s / step.busy_s for step in steps])
    counts = np.array([step.counts for step in steps], dtype=bool)
    if counts.any():
        counts &= ratios <= (1.0 + ODD) * np.median(ratios[counts])
    if counts.sum() < FEWEST:
        return Warming()
    busy_s = np.array([step.busy_s for step in steps])[counts]
    weights = np.sqrt(busy_s)
    target, constant = weights * (ratios[counts] - 1.0), weights / busy_s
    fits = []
    for time_s in reversed(TIMES_S):
        columns = np.column_stack([constant, -weights * np.array(coldness(steps, time_s))[counts]])
        error, (overhead_s, gain) = positive_fit(columns, target)
        fits.append((error, overhead_s, gain, time_s))
    _, overhead_s, gain, time_s = min(fits, key=itemgetter(0))
    return (
        Warming(overhead_s=overhead_s, rested_share=1.0 - gain, time_s=time_s) if 0 < gain < 1 else Warming(overhead_s=overhead_s)
    )


def positive_fit(columns: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[float, tuple[float, float]]:
    """Return the sum of squared errors and the two factors, neither below 0, that fit two columns to ``target`` best."""
    fits = []
    for used in ([0, 1], [0], [1], []):
        factors = np.zeros(2)
        factors[used] = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        if factors.min() >= 0:
            fits.append((float(np.sum((columns @ factors - target) ** 2)), (float(factors[0]), float(factors[1]))))
    return min(fits)


def coldness(steps: Sequence[TimedStep], time_s: float) -> list[float]:
    """Return the mean coldness during each step, for this time constant."""
    state, means = Coldness(time_s), []
    for step in steps:
        means.append(state.over(step.begin_s, step.busy_s) / step.busy_s)
        state.work(step.begin_s, step.took_s)
    return means
