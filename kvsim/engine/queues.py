"""The queues of engines whose order a scheduling policy decides: by ranks, by the order of all, or by an order that it keeps."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, cast

from kvsim.core.answers import every_one, number, rank_number, refused
from kvsim.core.queue_view import LookUps, Place, Round, Waiting
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier, overrides
from kvsim.engine.job import Job
from kvsim.engine.queue import WaitingQueue
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.kept_order import KeptScheduling

SPARE: Final = 64
"""A queue is built anew when it has this many entries more than twice those that count."""
Entry = tuple[float, Place, int, Job]
"""(rank, place, number, job)."""


class RankedQueue(WaitingQueue):
    """Jobs by the rank that the policy gives each when it begins to wait.

    Those that come in order, as all do in the order of arrival, are only appended.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        super().__init__(policy)
        self._heap: list[Entry] = []
        self._in_order: deque[Entry] = deque()
        """Entries that came after all before them; the others are in the heap. One no longer counts once the job has another."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs from the first to the last, whatever the bound."""
        return iter([job for _, _, entry, job in sorted([*self._in_order, *self._heap]) if job.entry == entry])

    def push(self, job: Job) -> None:
        """Add a job that begins to wait."""
        self._enter(job)
        before = self._seen([job])
        rank = rank_number(self._policy_name, "rank()", self._policy.rank(job))
        self._check_unchanged("rank()", [job], before)
        entry = rank, job.place, job.entry, job
        if not self._in_order or self._in_order[-1] < entry:
            self._in_order.append(entry)
        else:
            heappush(self._heap, entry)
        self._size += 1

    def begin_round(self, now: float) -> None:
        self._now = now

    def first(self) -> Job:
        if self._max_wait_s < inf:
            overdue = self._overdue()
            if overdue is not None:
                return overdue
        if not self._heap or self._in_order and self._in_order[0] < self._heap[0]:
            return self._in_order[0][3]
        return self._heap[0][3]

    def remove(self, job: Job) -> None:
        """Take out a job that waits."""
        job.entry = -1
        self._size -= 1
        heap, in_order = self._heap, self._in_order
        while in_order and in_order[0][3].entry != in_order[0][2]:
            in_order.popleft()
        while heap and heap[0][3].entry != heap[0][2]:
            heappop(heap)
        if len(heap) + len(in_order) > 2 * self._size + SPARE:
            self._heap = [entry for entry in heap if entry[3].entry == entry[2]]
            heapify(self._heap)
            self._in_order = deque([entry for entry in in_order if entry[3].entry == entry[2]])


class OrderedQueue(WaitingQueue):
    """Jobs in the order that the policy has given all of them, new ones at the end.

    The policy is asked at the beginning of a round of admission, if the cache or the queue have changed since the last time and
    no more jobs wait than its limit.
    """

    def __init__(self, policy: SchedulingPolicy, cache: ServedCache, gpu: Tier) -> None:
        super().__init__(policy)
        longest = self._policy.fcfs_above
        self._order_up_to = inf if longest is None else number(self._policy_name, "fcfs_above", longest)
        self._cache = cache
        self._look_ups = LookUps(cache, gpu)
        self._jobs: OrderedDict[Job, None] = OrderedDict()
        """Those that wait, in the order in which the policy has put them."""
        self._is_ordered = True
        """Whether the policy has been asked in this round."""
        self._ordered_version = -1
        self._has_changed = False
        """Whether jobs have come or gone since the policy was last asked."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs from the first to the last, whatever the bound."""
        return iter(list(self._jobs))

    def push(self, job: Job) -> None:
        """Add a job that begins to wait."""
        self._enter(job)
        self._jobs[job] = None
        self._has_changed = True

    def begin_round(self, now: float) -> None:
        self._now = now
        self._is_ordered = False

    def first(self) -> Job | None:
        if not self._is_ordered:
            self._is_ordered = True
            self._order()
        if self._max_wait_s < inf:
            overdue = self._overdue()
            if overdue is not None:
                return overdue
        return self._foremost()

    def _foremost(self) -> Job | None:
        """Return the first job, whatever the bound; None if the policy admits nobody."""
        return next(iter(self._jobs))

    def remove(self, job: Job) -> None:
        """Take out a job that waits."""
        job.entry = -1
        del self._jobs[job]
        self._has_changed = True
        self._look_ups.forget(job)

    def _order(self) -> None:
        """Let the policy order the jobs, unless they are in its order or too many."""
        if len(self._jobs) > self._order_up_to:
            self._has_changed = True
            return
        version = self._cache.version
        if version == self._ordered_version and not self._has_changed:
            return
        self._arrange(self._look_ups.begin_round())
        self._ordered_version = version
        self._has_changed = False

    def _arrange(self, changed: list[Waiting] | None) -> None:
        """Put the jobs into the order of the policy; the cache may have more or less of those ``changed``, or of any (None)."""
        waiting = tuple(self._jobs)
        before = self._seen(waiting)
        answer = self._policy.order(Round(waiting, self._look_ups, self._now))
        ordered = cast(Sequence[Job], every_one(self._policy_name, "order()", answer, waiting))
        self._check_unchanged("order()", waiting, before)
        self._jobs = OrderedDict.fromkeys(ordered)


class KeptQueue(OrderedQueue):
    """Jobs in an order that the policy keeps up to date, told of what has changed."""

    def __init__(self, policy: KeptScheduling, cache: ServedCache, gpu: Tier) -> None:
        super().__init__(policy, cache, gpu)
        self._kept: Any = policy.kept_order()
        self._new: list[Job] = []
        """Those that have joined since the policy was last asked; some may have gone again."""

    def __iter__(self) -> Iterator[Job]:
        return iter([self._known("in_order()", one) for one in self._kept.in_order()])

    def push(self, job: Job) -> None:
        super().push(job)
        self._new.append(job)
        self._kept.add(job)

    def _foremost(self) -> Job | None:
        first = self._kept.first()
        return None if first is None and self._policy.may_hold else self._known("first()", first)

    def _known(self, call: str, answer: object) -> Job:
        """Return an answer that must be a job that waits."""
        if isinstance(answer, Job) and answer in self._jobs:
            return answer
        raise refused(self._policy_name, call, answer, "a waiting request")

    def remove(self, job: Job) -> None:
        self._kept.remove(job)
        super().remove(job)

    def _arrange(self, changed: list[Waiting] | None) -> None:
        jobs = list(self._jobs) if changed is None else [*cast(list[Job], changed), *self._new]
        self._new.clear()
        concerned = list(dict.fromkeys([job for job in jobs if job in self._jobs]))
        before = self._seen(concerned)
        self._kept.update(concerned, self._look_ups)
        self._check_unchanged("update()", concerned, before)


def queue_for(policy: SchedulingPolicy, cache: ServedCache, gpu: Tier) -> WaitingQueue:
    """Return an empty queue in which a policy decides as it defines: by ``rank``, or the order of all."""
    if not overrides(policy, "order"):
        return RankedQueue(policy)
    if isinstance(policy, KeptScheduling) and not reorders(policy):
        return KeptQueue(policy, cache, gpu)
    return OrderedQueue(policy, cache, gpu)


def reorders(policy: KeptScheduling) -> bool:
    """Whether a class derived from one that keeps an order defines ``order`` in place of that."""
    for cls in type(policy).__mro__:
        if "kept_order" in cls.__dict__:
            return False
        if "order" in cls.__dict__:
            break
    return True
