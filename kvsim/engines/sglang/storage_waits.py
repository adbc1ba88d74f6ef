"""Requests in the queue of SGLang's scheduler that wait for storage, and those for which it is asked again."""

from math import nan
from typing import Final

from kvsim.core.pool import UNLIMITED
from kvsim.engine.job import Job
from kvsim.engine.queue import JobQueue
from kvsim.engines.sglang.storage_lines import Read

RETRY_PASSES: Final = 8
"""Passes after which storage is asked again for a request for which nothing was read
(--hicache-storage-prefetch-retry-poll-interval)."""
MOST_RETRIES: Final = 8
"""How often it is asked again (--hicache-storage-prefetch-retry-max-attempts)."""


class Waiter:
    """A request in the queue, as far as storage matters for it."""

    __slots__ = (
        "asked_pages", "brought_pages", "deadline_s", "due_pass", "first_page", "found_pages", "is_expired", "others_pages",
        "read", "retries",
    )  # fmt: skip

    def __init__(self) -> None:
        self.read: Read | None = None
        """What is asked for or read for it."""
        self.asked_pages = 0
        """Pages that ``read`` asks for, whether storage has them or not: those count as in flight."""
        self.others_pages = 0
        """Pages that counted as in flight for others when storage was asked."""
        self.found_pages = 0
        """Pages on GPU and host when storage was last asked."""
        self.deadline_s = nan
        """Until when it waits for storage; nan before its turn has come."""
        self.is_expired = False
        """Whether it has waited for that long, so that nothing is read for it any more."""
        self.retries = 0
        """How often storage has been asked again."""
        self.due_pass = 0
        """The pass in which that is due; 0: it is set in the next pass."""
        self.first_page = 0
        """Position of the first page that storage has brought for it."""
        self.brought_pages = 0


class Retries:
    """The requests for which storage is asked again, since nothing was read for them.

    That is 8 passes after the first pass that finds it to be done, and up to 8 times. The first request of the queue need not be
    asked for again.
    """

    def __init__(self) -> None:
        self._waiters: dict[Job, Waiter] = {}
        self._passes = 0
        self._soonest_pass = 0
        """No request is due before this pass."""

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def quiet_passes(self) -> int:
        """For how many passes from the next one on no request is due, if the queue stays as it is."""
        return max(0, self._soonest_pass - self._passes - 1) if self._waiters else UNLIMITED

    def left_out(self, passes: int) -> None:
        """Count quiet passes that did not take place."""
        self._passes += passes

    def later(self, job: Job, waiter: Waiter) -> None:
        """Ask for a request again."""
        waiter.due_pass = self._soonest_pass = 0
        self._waiters[job] = waiter

    def cancel(self, job: Job) -> None:
        """Do not ask for a request again."""
        self._waiters.pop(job, None)

    def clear(self) -> None:
        """Do not ask for any request again."""
        self._waiters.clear()

    def take_due(self, queue: JobQueue) -> list[tuple[Job, Waiter]]:
        """Count a pass. Returns the requests that are due in it, in the order of the queue."""
        self._passes += 1
        if not self._waiters or not len(queue):
            return []
        jobs = list(queue)
        self.cancel(jobs[0])
        if self._soonest_pass > self._passes:
            return []
        due: list[tuple[Job, Waiter]] = []
        for job in jobs:
            waiter = self._waiters.get(job)
            if waiter is None:
                continue
            waiter.due_pass = waiter.due_pass or self._passes + RETRY_PASSES
            if waiter.retries >= MOST_RETRIES:
                self.cancel(job)
            elif waiter.due_pass <= self._passes:
                self.cancel(job)
                due.append((job, waiter))
        self._soonest_pass = min([waiter.due_pass for waiter in self._waiters.values()], default=0)
        return due
