"""Statistics over seeds: means with 95 % confidence intervals by Student's t, and paired comparisons."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

CONFIDENCE = 0.95


class Mean(NamedTuple):
    """A mean of ``number`` values; ``half_width`` is half of its 95 % interval, None for a single value."""

    mean: float
    half_width: float | None
    number: int


def mean_of(values: Sequence[float]) -> Mean | None:
    """Return the mean of values; None without values."""
    number = len(values)
    if not number:
        return None
    if len(set(values)) == 1:
        return Mean(values[0], None if number == 1 else 0.0, number)
    mean = math.fsum(values) / number
    variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
    return Mean(mean, student_t(number - 1) * math.sqrt(variance / number), number)


def paired_difference(one: Mapping[int, float], other: Mapping[int, float]) -> Mean | None:
    """Return the mean of ``one - other`` over the seeds that both have; None with fewer than two of them."""
    common = [seed for seed in one if seed in other]
    return mean_of([one[seed] - other[seed] for seed in common]) if len(common) > 1 else None


def is_distinguishable(difference: Mean | None) -> bool:
    """Return whether a paired difference is known and its interval excludes zero."""
    return difference is not None and difference.half_width is not None and abs(difference.mean) > difference.half_width


@cache
def student_t(freedom: int) -> float:
    """Return the value that Student's t with ``freedom`` degrees of freedom exceeds in size with probability 5 %."""
    low, high = 0.0, 100.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if probability_within(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def probability_within(t: float, freedom: int) -> float:
    """Return the probability that Student's t lies between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(1 + is_odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
