"""Estimates how a GPU warms up, and the overhead of prefill, from the times of steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvsim.substrate.simulated.warmth import Coldness

Values = NDArray[np.float64]

TIMES_S = [0.05 * 1.2**power for power in range(22)]
"""Candidate time constants, up to 2.3 seconds."""
FEWEST = 9
"""Fewest steps needed for an estimate."""


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

    ``steps`` are in order, and the first follows a rest. The model: a step takes an overhead, and what is expected of a busy GPU
    less a gain times the mean of ``Coldness`` while it runs. All three are estimated together. If the overhead were measured by
    itself, a small error in it would change the time constant, because mostly short steps follow rests. There is no factor for
    expectations that are too long or too short by some percent: the overhead takes that in, as far as it can, and then the rests.

    The sum of absolute deviations is made as small as possible, not that of their squares, because a GPU that has been busy for a
    second takes 5 to 14 % longer now and then, for a tenth of a second. They are divided by the root of what is expected, because
    noise grows with it. Neither overhead nor gain is below 0, and the gain is below 1. If too few steps count, or no gain is
    possible, nothing is found.
    """
    counts = np.array([step.counts for step in steps], dtype=bool)
    if counts.sum() < FEWEST:
        return Warming()
    took_s, busy_s = np.array([(step.took_s, step.busy_s) for step in steps])[counts].T
    weights = 1.0 / np.sqrt(busy_s)
    fits = []
    for time_s in reversed(TIMES_S):
        less_s = busy_s * np.array(coldness(steps, time_s))[counts]
        error, overhead_s, gain = least_deviations(weights, -weights * less_s, weights * (took_s - busy_s))
        if gain < 1:
            fits.append((error, overhead_s, gain, time_s))
    if not fits:
        return Warming()
    _, overhead_s, gain, time_s = min(fits, key=itemgetter(0))
    return Warming(overhead_s=overhead_s, rested_share=1.0 - gain, time_s=time_s)


def least_deviations(first: Values, second: Values, target: Values) -> tuple[float, float, float]:
    """Return the smallest sum of absolute deviations of ``a * first + b * second`` from ``target``, ``a`` and ``b``, both at
    least 0.

    At one of the best pairs, two values of ``target`` are met exactly; or one, and the other factor is 0; or both are 0.
    """
    rows, others = np.triu_indices(len(target), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        determinants = first[rows] * second[others] - first[others] * second[rows]
        both = [
            (target[rows] * second[others] - target[others] * second[rows]) / determinants,
            (first[rows] * target[others] - first[others] * target[rows]) / determinants,
        ]
        only_first, only_second = target / first, target / second
    none = np.zeros_like(target)
    tried = np.hstack([both, [only_first, none], [none, only_second], [[0.0], [0.0]]]).T
    tried = tried[np.isfinite(tried).all(axis=1) & (tried >= 0).all(axis=1)]
    sums = np.abs(tried @ [first, second] - target).sum(axis=1)
    best = int(np.argmin(sums))
    return float(sums[best]), abs(float(tried[best, 0])), abs(float(tried[best, 1]))


def coldness(steps: Sequence[TimedStep], time_s: float) -> list[float]:
    """Return the mean coldness during each step, for this time constant."""
    state, means = Coldness(time_s), []
    for step in steps:
        means.append(state.over(step.begin_s, step.busy_s) / step.busy_s)
        state.work(step.begin_s, step.took_s)
    return means
