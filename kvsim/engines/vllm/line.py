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


class Turns:
    """The order in which passes try the requests that do not run: those ahead of the queue, as they were tried last, then others.

    Ahead are requests that wait for their loads. With ``passed_go_first``, so is every one that has had to wait for something,
    such as the load of another one; without, it keeps its place in the queue.
    """

    def __init__(self, queue: ArrivalLine, *, passed_go_first: bool) -> None:
        self._queue = queue
        self._passed_go_first = passed_go_first
        self._ahead: dict[Job, None] = {}
        self._tried: dict[Job, None] = {}
        """Those ahead of the queue that have been tried in this pass."""
        self._passed: dict[Job, None] = {}
        """Those of the queue that have been tried in this pass."""

    def begin(self) -> None:
        """Begin a pass."""
        self._ahead = {**self._tried, **self._ahead}
        self._tried, self._passed = {}, {}

    def next(self) -> Job | None:
        """Return the request that is to be tried next; None if all have been."""
        return next(iter(self._ahead), None) or next((job for job in self._queue if job not in self._passed), None)

    @property
    def has_passed(self) -> bool:
        """Whether a request of the queue has been passed over in this pass."""
        return bool(self._passed)

    def passes(self, job: Job, *, is_loading: bool) -> None:
        """A request that has been tried has to wait for its load or for something else."""
        self._ahead.pop(job, None)
        if is_loading or self._passed_go_first:
            self._tried[job] = None
        if not is_loading:
            self._passed[job] = None

    def leave(self, job: Job) -> None:
        """A request has been admitted, or has ended."""
        for jobs in (self._ahead, self._tried, self._passed):
            jobs.pop(job, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._ahead, self._tried, self._passed = {}, {}, {}
