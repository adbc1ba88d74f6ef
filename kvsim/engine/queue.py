"""The requests that wait to be admitted, in the order of a scheduling policy."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from kvsim.core.answers import rank_number
from kvsim.engine.job import Job

if TYPE_CHECKING:
    from kvsim.policies.scheduling.base import SchedulingPolicy


class WaitingQueue:
    """Jobs that wait: ``first`` is tried next, and ``remove`` takes out one that has been admitted or rejected."""

    def __init__(self, policy: "SchedulingPolicy") -> None:
        self._policy: Any = policy
        """Typed so that its answers may be anything."""
        self._policy_name = f"the scheduling policy {type(policy).__name__}"
        self._heap: list[tuple[float, tuple[int, int], Job]] = []
        """(rank, place, job)."""

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs from the first to the last."""
        return iter([job for _, _, job in sorted(self._heap)])

    def push(self, job: Job) -> None:
        """Add a job that begins to wait."""
        job.is_queued = True
        rank = rank_number(self._policy_name, "rank()", self._policy.rank(job))
        heappush(self._heap, (rank, job.place, job))

    def first(self) -> Job:
        """Return the job to try next; there must be one."""
        return self._heap[0][2]

    def remove(self, job: Job) -> None:
        """Take out a job that waits."""
        heap = self._heap
        if heap[0][2] is job:
            heappop(heap)
        else:
            heap[:] = [entry for entry in heap if entry[2] is not job]
            heapify(heap)
