"""How far two samples of runs are apart, in view of the spread within each.

The interval around a difference of means is the wider of two. Welch's (1947) does not assume that both samples spread alike, so
real runs that spread more than their simulation widen it. But a few real runs can be close by chance, for example where a race
mostly ends in one of two ways. Student's, with a common spread, then has that of the simulations. An error is thus only what
neither the spread of the real runs nor that of all runs together explains.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvsim.results.statistics import student_t

ROUNDING = 1e-9
"""Differences below this share of the values are rounding."""


class Distance(NamedTuple):
    """A distance between two samples; it is ``half_width`` around it with 95 % confidence."""

    distance: float
    half_width: float

    @property
    def is_off(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.distance) > self.half_width

    @property
    def low(self) -> float:
        return self.distance - self.half_width

    @property
    def high(self) -> float:
        return self.distance + self.half_width


def mean(values: Sequence[float]) -> float:
    """Return the mean; exact if all values are equal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 for a single value."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / max(1, len(values) - 1))


def distance_of_means(simulated: Sequence[float], measured: Sequence[float]) -> Distance:
    """Return by how much the mean of the simulations exceeds that of the measurements, two or more.

    A single simulation counts as one more run of the machine: only the measurements tell how far runs are apart.
    """
    return _with_interval(mean(simulated) - mean(measured), simulated, measured)


def distance_of_pairs(
    alike: Callable[[int, int], float], simulations: int, measurements: int
) -> tuple[Distance, list[list[float]]]:
    """Return by how much a measure of pairs is larger between a simulation and a measurement than between two measurements.

    ``alike`` takes the numbers of two runs, the simulations first, and is symmetric. Its values are not independent, since each
    run is part of many pairs. So the interval is that of the sum of what each run contributes to the distance (the first
    projection of the U-statistic; Hoeffding, 1948). Also returned are, for each simulation, its mean over the measurements and,
    for each measurement, its mean over the other ones.
    """
    places = range(simulations, simulations + measurements)
    crossing = [[alike(simulation, measured) for measured in places] for simulation in range(simulations)]
    of_simulations = [mean(row) for row in crossing]
    of_measured = [mean([row[place] for row in crossing]) for place in range(measurements)]
    among = {(one, other): alike(one, other) for one in places for other in places if one < other}
    own = [mean([value for pair, value in among.items() if place in pair]) for place in places]
    contributions = [2 * within - across for within, across in zip(own, of_measured, strict=True)]
    found = _with_interval(mean(of_simulations) - mean(own), of_simulations, contributions)
    return found, [of_simulations, own]


def _with_interval(distance: float, simulated: Sequence[float], measured: Sequence[float]) -> Distance:
    """Return a distance with the 95 % interval for the difference of two samples' means; degrees of freedom are rounded down."""
    size = max(abs(value) for value in (*simulated, *measured))
    distance = 0.0 if abs(distance) <= ROUNDING * size else distance
    samples = [(deviation(values) ** 2, len(values)) for values in (simulated, measured)]
    if all(math.sqrt(variance) <= ROUNDING * size for variance, _ in samples):
        return Distance(distance, 0.0)
    return Distance(distance, max(_welch(samples), _student(samples)))


def _welch(samples: Sequence[tuple[float, int]]) -> float:
    """Return half of Welch's interval for samples of these variances and sizes; a single value adds nothing."""
    parts = [(variance / number, number - 1) for variance, number in samples]
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / free for part, free in parts if free)
    return student_t(max(1, int(freedom + ROUNDING))) * math.sqrt(total)


def _student(samples: Sequence[tuple[float, int]]) -> float:
    """Return half of the interval of Student's t test for two samples with a common variance."""
    freedom = sum(number - 1 for _, number in samples)
    variance = sum(variance * (number - 1) for variance, number in samples) / freedom
    return student_t(freedom) * math.sqrt(variance * sum(1 / number for _, number in samples))
