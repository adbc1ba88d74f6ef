"""When requests and resets are due."""

from collections.abc import Iterator, Sequence
from math import isnan
from typing import Final

import numpy as np

from kvsim.core.request import Request, Reset
from kvsim.core.requests import values_of

AT_ONCE: Final = 4096
"""Arrivals that are taken out of arrays at a time."""


def due_in_order(requests: Sequence[Request], reset_at_s: Sequence[float]) -> "Iterator[tuple[float, Request | Reset]]":
    """Yield the arrivals that wait for no other request and the resets that have a time, each with that time, in order.

    At the same time, a reset comes before the request that it belongs to, and before all requests if it belongs to none. A
    request is asked for when it is due.
    """
    resets: list[Reset] = [Reset("drain", time_s) for time_s in reset_at_s]
    before = [-1] * len(resets)
    """The position of the request that each reset belongs to; -1: none."""
    for position, own in enumerate(values_of(requests, "resets")):
        timed = [reset for reset in own if not isnan(reset.at_s)]
        resets += timed
        before += [position] * len(timed)
    after = np.fromiter(values_of(requests, "after"), np.int64, len(requests))
    arrivals = np.fromiter(values_of(requests, "arrival_s"), np.float64, len(requests))
    free = np.flatnonzero(after < 0)
    times = np.concatenate((np.array([reset.at_s for reset in resets], dtype=np.float64), arrivals[free]))
    places = np.concatenate((np.array(before, dtype=np.int64), free))
    is_request = np.arange(len(times)) >= len(resets)
    order = np.lexsort((is_request, places, times))
    for begin in range(0, len(order), AT_ONCE):
        part = order[begin : begin + AT_ONCE]
        for number, place, time_s in zip(part.tolist(), places[part].tolist(), times[part].tolist(), strict=True):
            yield time_s, requests[place] if number >= len(resets) else resets[number]
