"""The record of a run, request by request, which the engines write."""

from math import nan

from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.engine.job import Job
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

    def unread(self, request: Request, pages: int) -> None:
        """Take pages that a load did not bring, or that cannot be used without them, out of a request's hits, lowest first."""
        gpu_pages, cpu_pages, disk_pages = self.hits[request.index]
        from_disk = min(pages, disk_pages)
        from_cpu = min(pages - from_disk, cpu_pages)
        from_gpu = pages - from_disk - from_cpu
        self.hits[request.index] = gpu_pages - from_gpu, cpu_pages - from_cpu, disk_pages - from_disk

    def waited(self, job: Job) -> None:
        """Record for how long a request has waited until its prompt was computed."""
        self.queue_s[job.request.index], self.load_s[job.request.index] = job.times.queue_s, job.times.load_s

    def finished(self, job: Job, engine: int, now: float) -> None:
        """Record the end of a request, or of one of its samples, that an engine has decoded."""
        request, index = job.request, job.request.index
        if not request.sample:
            self.ttft_s[index] = job.times.first_token_s - job.arrival_s
        if request.output_tokens > 1:
            self.tpot_s[index] = (now - job.times.first_token_s) / (request.output_tokens - 1)
        self.e2e_s[index] = now - job.arrival_s
        self.decoders[index] = engine

    def landed(self, transfer: Transfer, now: float) -> None:
        """Record the end of a transfer: the time that a read took."""
        if transfer.done and not transfer.goes_down:
            self.read_times.add(transfer, now)
