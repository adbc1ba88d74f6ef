"""When requests and resets are due."""

from collections.abc import Sequence
from math import isnan
from operator import itemgetter

from kvsim.core.request import Request, Reset


def due_in_order(requests: Sequence[Request], reset_at_s: Sequence[float]) -> "list[tuple[float, Request | Reset]]":
    """Return the arrivals that wait for no other request and the resets that have a time, each with that time, in order.

    At the same time, a reset comes before the request that it belongs to, and before all requests if it belongs to none.
    """
    due: list[tuple[float, int, int, Request | Reset]] = [
        (time_s, -1, number, Reset("drain", time_s)) for number, time_s in enumerate(reset_at_s)
    ]
    for request in requests:
        if request.resets:
            timed = [reset for reset in request.resets if not isnan(reset.at_s)]
            due += [(reset.at_s, request.index, number - len(timed), reset) for number, reset in enumerate(timed)]
        if request.after < 0:
            due.append((request.arrival_s, request.index, 0, request))
    due.sort(key=itemgetter(0, 1, 2))
    return [(time_s, what) for time_s, _, _, what in due]
