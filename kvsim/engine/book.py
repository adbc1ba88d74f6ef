"""The record of a run, request by request, which the engines write."""

from math import nan

from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.engine.outcome import FINISHED, REJECTED
from kvsim.engine.read_times import ReadTimes


class Book:
    """What has become of each request: lists with one entry per request, in trace order. See ``Outcome``."""

    def __init__(self, requests: list[Request]) -> None:
        count = len(requests)
        self.requests = requests
        self.status = [FINISHED] * count
        self.hits = [(0, 0, 0)] * count
        self.retractions = [0] * count
        self.engines = [-1] * count
        """Number of the engine that admitted the request first, where its hits are; -1 if none has."""
        self.decoders = [-1] * count
        """Number of the engine that has decoded the answer."""
        self.arrival_s, self.ttft_s, self.tpot_s, self.e2e_s = ([nan] * count for _ in range(4))
        self.queue_s, self.load_s = [nan] * count, [nan] * count
        """The parts of ``ttft_s`` in which the request waited for its turn and for pages that were being loaded."""
        self.read_times = ReadTimes()

    def reject(self, request: Request) -> None:
        """Record that a request could not run even alone."""
        self.status[request.index] = REJECTED
        self.hits[request.index] = (0, 0, 0)

    def landed(self, transfer: Transfer, now: float) -> None:
        """Record the end of a transfer: the time that a read took."""
        if transfer.done and not transfer.goes_down:
            self.read_times.add(transfer, now)
