"""How far two runs of the same requests are apart, and how much of that is chance."""

from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PARTS = 20
"""Consecutive parts of a trace that stand for draws of it."""
Numbers = npt.NDArray[np.float64]


class Difference(NamedTuple):
    """A run's rate minus that of another, and its standard error; None if the trace is too short for one."""

    value: float
    standard_error: float | None


def difference(own: Numbers, other: Numbers, weights: Numbers, parts: int = PARTS) -> Difference:
    """Compare the sums of ``own`` and ``other`` per unit of weight, request by request.

    All three have an element for each request, in order of arrival: hit tokens with prompt tokens as weights, or seconds with
    ones. Both runs see the same requests, so what is hard for both cancels. The
    standard error is that of a ratio of sums over batches (batch means; Law, Simulation Modeling and Analysis, 2015, 9.5.3): the
    requests are cut into ``parts`` of equal length, which are taken for independent draws. It is what another stretch of the same
    traffic would change, not what another service would. Raises ValueError if the weights sum to 0.
    """
    total = float(weights.sum())
    if not total:
        raise ValueError("the requests have no weight")
    gains = own - other
    rate = float(gains.sum()) / total
    if len(gains) < 2 * parts:
        return Difference(rate, None)
    cuts = np.linspace(0, len(gains), parts, endpoint=False).astype(int)
    rests = np.add.reduceat(gains, cuts) - rate * np.add.reduceat(weights, cuts)
    return Difference(rate, sqrt(parts / (parts - 1) * float((rests**2).sum())) / total)
