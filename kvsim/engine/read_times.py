"""How long the reads from the tiers below the GPU take, request by request."""

from collections.abc import Sequence
from math import nan

import numpy as np

from kvsim.core.transfer import Transfer


class ReadTimes:
    """The spans of time in which each request's own reads were under way, by the tier that they read from.

    A read is a load to the GPU, or what precedes it: a fetch from disk for a request that waits, or a read from disk into the
    CPU tier for one that runs. It begins when it is handed to its link, where it may queue, and ends when its last page has
    landed or it is cancelled. Reads of other requests, for which this one waits too, do not count.
    """

    def __init__(self) -> None:
        self._spans: dict[int, dict[int, list[tuple[float, float]]]] = {}
        """By level of the source and index of the request."""

    def add(self, transfer: Transfer, ended_s: float) -> None:
        """Record the end of a transfer; ignored unless it is a read that has begun."""
        if transfer.request is not None and not transfer.goes_down and transfer.begun_s <= ended_s:
            spans = self._spans.setdefault(transfer.source.level, {})
            spans.setdefault(transfer.request.index, []).append((transfer.begun_s, ended_s))

    def seconds(self, requests: int, levels: Sequence[int]) -> np.ndarray:
        """Return the seconds with at least one read under way: one row per request, one column for each of these levels."""
        times = np.zeros((requests, len(levels)))
        for column, level in enumerate(levels):
            for index, spans in self._spans.get(level, {}).items():
                times[index, column] = covered_s(spans)
        return times


def covered_s(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of time spans (begin, end)."""
    total, reached = 0.0, nan
    for begin, end in sorted(spans):
        if not begin <= reached:
            reached = begin
        if end > reached:
            total += end - reached
            reached = end
    return total
