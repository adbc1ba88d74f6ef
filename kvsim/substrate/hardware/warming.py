"""Estimates how a GPU warms up from the times of steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def warming(steps: Sequence[TimedStep]) -> tuple[float, float]:
    """Return the time of a step on a rested GPU as a share of that on a busy GPU, and the time constant in seconds.

    ``steps`` are in order, and the first follows a rest. The model, fitted by least squares, a second of a step counting as much
    as any other: relative to what is expected of a busy GPU, a step takes a constant minus a gain times the mean of ``Coldness``
    while it runs. The constant allows for an expectation that is a little off. Returns 1 and the longest time constant if rest
    makes no step faster.
    """
    ratios = np.array([step.took_s / step.busy_s for step in steps])
    counts = np.array([step.counts for step in steps], dtype=bool)
    if counts.any():
        counts &= ratios <= (1.0 + ODD) * np.median(ratios[counts])
    if counts.sum() < FEWEST:
        return 1.0, TIMES_S[-1]
    weights, fits = np.sqrt([step.busy_s for step in steps])[counts], []
    target = weights * ratios[counts]
    for time_s in TIMES_S:
        cold = np.array(coldness(steps, time_s))[counts]
        columns = weights[:, None] * np.column_stack([np.ones(len(cold)), cold])
        busy, gain = np.linalg.lstsq(columns, target, rcond=None)[0].tolist()
        error = float(np.sum((columns @ [busy, gain] - target) ** 2))
        fits.append((error, 1.0 + gain / busy, time_s))
    _, share, time_s = min(fits)
    return (share, time_s) if 0 < share < 1 else (1.0, TIMES_S[-1])


def coldness(steps: Sequence[TimedStep], time_s: float) -> list[float]:
    """Return the mean coldness during each step, for this time constant."""
    state, means = Coldness(time_s), []
    for step in steps:
        means.append(state.over(step.begin_s, step.busy_s) / step.busy_s)
        state.work(step.begin_s, step.took_s)
    return means
