"""How long the reads from the tiers below the GPU take, request by request."""

from array import array
from collections.abc import Sequence
from math import nan

import numpy as np

from kvsim.core.transfer import Transfer


class Reads:
    """All reads from tiers of one level, in the order in which they ended."""

    def __init__(self) -> None:
        self.requests = array("q")
        """Indices of the requests that they were for."""
        self.begins_s = array("d")
        self.ends_s = array("d")

    def seconds(self, requests: int) -> np.ndarray:
        """Return the seconds of each request, by its index, with at least one read under way."""
        index, begins_s, ends_s = np.frombuffer(self.requests, np.int64), np.frombuffer(self.begins_s), np.frombuffer(self.ends_s)
        times = np.bincount(index, weights=ends_s - begins_s, minlength=requests)
        several = np.flatnonzero(np.bincount(index, minlength=requests)[index] > 1)
        several = several[np.argsort(index[several], kind="stable")]
        for spans in np.split(several, np.flatnonzero(np.diff(index[several])) + 1) if several.size else ():
            times[index[spans[0]]] = covered_s(list(zip(begins_s[spans].tolist(), ends_s[spans].tolist(), strict=True)))
        return times


class ReadTimes:
    """The spans of time in which each request's own reads were under way, by the tier that they read from.

    A read is a load to the GPU, or what precedes it: a fetch from disk for a request that waits, or a read from disk into the
    CPU tier for one that runs. It begins when it is handed to its link, where it may queue, and ends when its last page has
    landed or it is cancelled. Reads of other requests, for which this one waits too, do not count.
    """

    def __init__(self) -> None:
        self._reads: dict[int, Reads] = {}
        """By level of the source."""

    def add(self, transfer: Transfer, ended_s: float) -> None:
        """Record the end of a transfer; ignored unless it is a read that has begun."""
        if transfer.request is not None and not transfer.goes_down and transfer.begun_s <= ended_s:
            level = transfer.source.level
            reads = self._reads.get(level)
            if reads is None:
                reads = self._reads[level] = Reads()
            reads.requests.append(transfer.request.index)
            reads.begins_s.append(transfer.begun_s)
            reads.ends_s.append(ended_s)

    def seconds(self, requests: int, levels: Sequence[int]) -> np.ndarray:
        """Return the seconds with at least one read under way: one row per request, one column for each of these levels."""
        times = np.zeros((requests, len(levels)))
        for column, level in enumerate(levels):
            if level in self._reads:
                times[:, column] = self._reads[level].seconds(requests)
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
