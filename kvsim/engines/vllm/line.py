"""The waiting queue of vLLM's scheduler V1 by arrival."""

from collections import OrderedDict
from collections.abc import Iterator

from kvsim.engine.job import QUEUED, Job
from kvsim.engine.queue import JobQueue


class ArrivalLine(JobQueue):
    """Jobs in the order in which they came. One that was preempted goes to the head."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Job, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def push(self, job: Job) -> None:
        job.phase = QUEUED
        self._jobs[job] = None
        if job.was_running:
            self._jobs.move_to_end(job, last=False)

    def remove(self, job: Job) -> None:
        del self._jobs[job]
