"""Forecasts of the next interval of a series, as NVIDIA Dynamo's planner has them (``planner/core/load/predictors.py``)."""

from abc import ABCMeta, abstractmethod
from collections import deque

LEVEL_NOISE, TREND_NOISE, OBSERVATION_NOISE = 1.0, 0.1, 10.0
"""Variances of the Kalman filter: Dynamo's defaults."""
FIRST_VARIANCE = 1000.0


class Forecast(metaclass=ABCMeta):
    """Predicts the next value of a series. Values of 0 before the first other one are no part of it."""

    def __init__(self) -> None:
        self._has_begun = False

    def add(self, value: float) -> None:
        """Take the value of an interval."""
        if value or self._has_begun:
            self._has_begun = True
            self.take(value)

    @abstractmethod
    def take(self, value: float) -> None:
        """Take a value of the series."""

    @abstractmethod
    def next(self) -> float:
        """Return what is expected next; 0 before the first value."""


class Constant(Forecast):
    """The last value again."""

    def __init__(self) -> None:
        super().__init__()
        self._last = 0.0

    def take(self, value: float) -> None:
        self._last = value

    def next(self) -> float:
        return self._last


class MovingAverage(Forecast):
    """The mean of the last values."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self._values: deque[float] = deque(maxlen=values)

    def take(self, value: float) -> None:
        self._values.append(value)

    def next(self) -> float:
        return sum(self._values) / len(self._values) if self._values else 0.0


class Kalman(Forecast):
    """A level and a trend, which drift: the local linear trend model, filtered. The level goes on by the trend."""

    def __init__(self) -> None:
        super().__init__()
        self._level = self._trend = 0.0
        self._is_first = True
        self._variances = (FIRST_VARIANCE, 0.0, FIRST_VARIANCE)
        """Of the level, of both together, and of the trend."""

    def take(self, value: float) -> None:
        if self._is_first:
            self._is_first, self._level = False, value
            return
        level, trend = self._level + self._trend, self._trend
        p, q, r = self._variances
        p, q, r = p + 2.0 * q + r + LEVEL_NOISE, q + r, r + TREND_NOISE
        of_level, of_trend = p / (p + OBSERVATION_NOISE), q / (p + OBSERVATION_NOISE)
        surprise = value - level
        self._level, self._trend = level + of_level * surprise, trend + of_trend * surprise
        self._variances = ((1.0 - of_level) * p, (1.0 - of_level) * q, r - of_trend * q)

    def next(self) -> float:
        return max(0.0, self._level + self._trend)


def forecast_of(name: str, values: int) -> Forecast:
    """Return a forecast by its name; ``values`` are how many a moving average has. Raises ValueError."""
    if name == "constant":
        return Constant()
    if name == "moving_average":
        return MovingAverage(values)
    if name == "kalman":
        return Kalman()
    raise ValueError(f"predictor must be one of constant, moving_average, kalman, not {name}")
