"""Requests that share a time because the clock of a log is coarse, and ``spread``, which takes them apart."""

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import numpy as np

from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.errors import TraceError

FEWEST = 1.5
"""Requests for each time, on average, from which on the clock of a trace is called coarse."""


class SharedTimes(NamedTuple):
    """How coarse the clock of a trace is."""

    requests: float
    """Requests that arrive at one time, on average."""
    step_s: float
    """The median time from one arrival time to the next."""

    def warning(self) -> str:
        """Say what it does to the times of a simulation, and what helps."""
        return (
            f"{self.requests:.1f} requests share a time, and times step by {self.step_s:.3g} s: they arrive at once at any "
            "trace.rate and wait for each other. trace.spread=true spreads them evenly over the step"
        )


def shared_times(requests: Sequence[Request]) -> SharedTimes | None:
    """Return how coarse the clock of the requests is; None for a fine one, and if they all arrive at one time.

    Requests that wait for others have no time of their own.
    """
    arrivals = zip(values_of(requests, "arrival_s"), values_of(requests, "after"), strict=True)
    times, counts = np.unique([arrival_s for arrival_s, after in arrivals if after < 0], return_counts=True)
    if len(times) < 2 or counts.mean() < FEWEST:
        return None
    return SharedTimes(float(counts.mean()), float(np.median(np.diff(times))))


def spread_arrivals(requests: Sequence[Request], path: str) -> None:
    """Spread requests with equal arrivals evenly over the time to the next arrival, at most the median of these times.

    The first of them keeps its time, their order stays, and the last ones take the median. Requests that wait for others keep
    the recorded time, which only orders them, but none comes before one that it waits for. ``after`` and ``joins`` are
    positions in ``requests``. Raises TraceError where no two requests share a time, or all do.
    """
    timed = [request for request in requests if request.after < 0]
    times, group, counts = np.unique([request.arrival_s for request in timed], return_inverse=True, return_counts=True)
    if len(times) == len(timed):
        raise TraceError(path, None, "spread has no effect: no two requests have the same time; leave out trace.spread")
    if len(times) == 1:
        raise TraceError(
            path, None, "spread has no effect: all requests have the same time, so there is no step to spread them over; "
            "leave out trace.spread"
        )  # fmt: skip
    gaps = np.diff(times)
    usual_s = float(np.median(gaps))
    steps_s = np.append(np.minimum(gaps, usual_s), usual_s)
    order = np.argsort(group, kind="stable")
    place = np.empty(len(timed), dtype=np.int64)
    place[order] = np.arange(len(timed)) - np.repeat(np.cumsum(counts) - counts, counts)
    arrivals = times[group] + steps_s[group] * place / counts[group]
    _spread_resets(timed, order, arrivals)
    for request, arrival_s in zip(timed, arrivals.tolist(), strict=True):
        request.arrival_s = arrival_s
    for request in requests:
        if request.after >= 0:
            request.arrival_s = max(request.arrival_s, *(requests[before].arrival_s for before in request.predecessors))


def _spread_resets(timed: Sequence[Request], order: np.ndarray, arrivals: np.ndarray) -> None:
    """Keep each reset between the arrival of the request before its own and its own."""
    last_s = 0.0
    for position in order.tolist():
        request = timed[position]
        request.resets = tuple(
            reset if isnan(reset.at_s) else reset._replace(at_s=max(reset.at_s, last_s)) for reset in request.resets
        )
        last_s = float(arrivals[position])
