"""The requests that wait to be admitted, in the order of a scheduling policy."""

from abc import ABCMeta, abstractmethod
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, cast

from kvsim.core.answers import PolicyError, every_one, number, rank_number, users_classes
from kvsim.core.queue_view import Round
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier, overrides
from kvsim.engine.job import QUEUED, Job

if TYPE_CHECKING:
    from kvsim.policies.scheduling.base import SchedulingPolicy


class JobQueue(metaclass=ABCMeta):
    """Jobs that wait to be admitted, as whoever adds, counts and removes them sees them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs from the first to the last."""

    @abstractmethod
    def push(self, job: Job) -> None:
        """Add a job that begins to wait."""

    @abstractmethod
    def remove(self, job: Job) -> None:
        """Take out a job that waits."""


class WaitingQueue(JobQueue):
    """Jobs that wait for one GPU tier of a cache: ``first`` is tried next, and ``remove`` takes out one that waits no more.

    A job's place is its rank. It comes from the policy when the job begins to wait, unless the policy orders the whole queue:
    then new jobs go to the end, and the policy is asked at the beginning of a round of admission if the cache or the queue
    have changed since the last time. A job that has waited for longer than the policy's bound goes before all others.
    """

    def __init__(self, policy: "SchedulingPolicy", cache: ServedCache, gpu: Tier) -> None:
        self._policy: Any = policy
        """Typed so that its answers may be anything."""
        self._policy_name = f"the scheduling policy {type(policy).__name__}"
        self._is_users = bool(users_classes(type(policy)))
        """Whether a policy that is not kvsim's decides: what it may not change is then looked at after each question."""
        self._cache = cache
        self._gpu = gpu
        self._orders = overrides(policy, "order")
        self._order_up_to = self._longest_ordered()
        self.ranks_retractions = overrides(policy, "retraction_rank")
        """Whether the policy decides which running request is retracted."""
        self._max_wait_s = self._bound_s()
        self._heap: list[tuple[float, tuple[int, int], Job]] = []
        """(rank, place, job)."""
        self._oldest: list[tuple[float, tuple[int, int], int, Job]] = []
        """(time of arrival, place, entry, job), with a bound; a job's earlier entries no longer count."""
        self._entries = 0
        self._now = 0.0
        self._is_ordered = True
        """Whether the policy has been asked in this round, or need not be."""
        self._ordered_version = -1
        self._has_changed = False
        """Whether jobs have come or gone since the policy was last asked."""

    def _bound_s(self) -> float:
        bound = self._policy.max_wait_s
        return inf if bound is None else number(self._policy_name, "max_wait_s", bound)

    def _longest_ordered(self) -> float:
        longest = self._policy.fcfs_above
        return inf if longest is None else number(self._policy_name, "fcfs_above", longest)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs from the first to the last, whatever the bound."""
        return iter([job for _, _, job in sorted(self._heap)])

    def push(self, job: Job) -> None:
        """Add a job that begins to wait."""
        job.phase = QUEUED
        self._entries += 1
        job.entry = self._entries
        rank = float(self._entries)
        if not self._orders:
            before = self._seen([job])
            rank = rank_number(self._policy_name, "rank()", self._policy.rank(job))
            self._check_unchanged("rank()", [job], before)
        heappush(self._heap, (rank, job.place, job))
        self._has_changed = True
        if self._max_wait_s < inf:
            heappush(self._oldest, (job.arrival_s, job.place, job.entry, job))

    def begin_round(self, now: float) -> None:
        """Begin a round of admission: until the next one, the policy is asked at most once."""
        self._now = now
        self._is_ordered = not self._orders

    def first(self) -> Job:
        """Return the job to try next; there must be one."""
        if not self._is_ordered:
            self._is_ordered = True
            self._order()
        if self._max_wait_s < inf:
            oldest = self._oldest
            while oldest[0][2] != oldest[0][3].entry:
                heappop(oldest)
            if self._now - oldest[0][0] > self._max_wait_s:
                return oldest[0][3]
        return self._heap[0][2]

    def remove(self, job: Job) -> None:
        """Take out a job that waits."""
        job.entry = -1
        self._has_changed = True
        heap = self._heap
        if heap[0][2] is job:
            heappop(heap)
        else:
            self._heap = [entry for entry in heap if entry[2] is not job]
            heapify(self._heap)

    def _order(self) -> None:
        """Put the jobs into the order of the policy, unless they are in it or too many."""
        if len(self._heap) > self._order_up_to:
            self._has_changed = True
            return
        version = self._cache.version
        if version == self._ordered_version and not self._has_changed:
            return
        waiting = tuple(self)
        before = self._seen(waiting)
        answer = self._policy.order(Round(waiting, self._cache, self._gpu, self._now))
        ordered = cast(Sequence[Job], every_one(self._policy_name, "order()", answer, waiting))
        self._check_unchanged("order()", waiting, before)
        first = self._entries
        self._entries += len(ordered)
        self._heap = [(float(first + at), job.place, job) for at, job in enumerate(ordered)]
        self._ordered_version = version
        self._has_changed = False

    def retraction_key(self, job: Job) -> tuple[float, float, tuple[int, int]]:
        """Return what orders running jobs if the policy does: the highest is retracted first."""
        before = self._seen([job])
        rank = rank_number(self._policy_name, "retraction_rank()", self._policy.retraction_rank(job))
        self._check_unchanged("retraction_rank()", [job], before)
        return rank, job.arrival_s, job.place

    def _seen(self, jobs: Sequence[Job]) -> list[tuple[object, ...]]:
        """Return what a policy of the user's own is about to see of these jobs; nothing for one of kvsim's."""
        return [facts(job) for job in jobs] if self._is_users else []

    def _check_unchanged(self, call: str, jobs: Sequence[Job], before: list[tuple[object, ...]]) -> None:
        """Raise PolicyError if a policy has changed a job that it was shown."""
        for job, was in zip(jobs, before, strict=False):
            now = facts(job)
            if now != was:
                changed = ", ".join(
                    [f"{name} from {old!r} to {new!r}" for name, old, new in zip(FACTS, was, now, strict=True) if old != new]
                )
                raise PolicyError(f"{self._policy_name} changed a waiting request in {call}, {changed}: it belongs to the engine")


FACTS = ("request", "place", "arrival_s", "entry", "was_running", "generated")


def facts(job: Job) -> tuple[object, ...]:
    """Return what a waiting request says of itself (``FACTS``)."""
    return job.request, job.place, job.arrival_s, job.entry, job.was_running, job.generated
