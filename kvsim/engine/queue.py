"""The requests that wait to be admitted, in the order of a scheduling policy."""

from abc import ABCMeta, abstractmethod
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from kvsim.core.answers import PolicyError, number, rank_number, users_classes
from kvsim.core.queue_view import Place
from kvsim.core.tier import overrides
from kvsim.engine.job import QUEUED, Job
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

    The policy gives each job its place; how is up to the subclass. A job that has waited for longer than the policy's bound goes
    before all others.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy: Any = policy
        """Typed so that its answers may be anything."""
        self._policy_name = f"the scheduling policy {type(policy).__name__}"
        self._is_users = bool(users_classes(type(policy)))
        """Whether a policy that is not kvsim's decides: what it may not change is then looked at after each question."""
        self.ranks_retractions = overrides(policy, "retraction_rank")
        """Whether the policy decides which running request is retracted."""
        self._tells_admissions = overrides(policy, "on_admitted") or overrides(policy, "on_computed")
        self._computing: dict[Job, None] = {}
        """Those of whose admission the policy has been told, until they are computed."""
        self.tells_generated = overrides(policy, "on_generated")
        """Whether the policy is told of what running requests generate."""
        bound = self._policy.max_wait_s
        self._max_wait_s = inf if bound is None else number(self._policy_name, "max_wait_s", bound)
        self._oldest: list[tuple[float, Place, int, Job]] = []
        """(time of arrival, place, entry, job), with a bound; a job's earlier entries no longer count."""
        self._entries = 0
        self._now = 0.0

    @abstractmethod
    def begin_round(self, now: float) -> None:
        """Begin a round of admission: until the next one, the order stays."""

    @abstractmethod
    def first(self) -> Job | None:
        """Return the job to try next; one must wait. None: the policy admits nobody in this round."""

    def admitted(self, job: Job, tokens: int) -> None:
        """Tell the policy that a job has been admitted, and how many tokens are to be computed."""
        if self._tells_admissions:
            before = self._seen([job])
            self._computing[job] = None
            self._policy.on_admitted(job, tokens)
            self._check_unchanged("on_admitted()", [job], before)

    def computed(self, job: Job) -> None:
        """Tell the policy that a job it knows to be admitted is computed, or has been given up."""
        if self._computing and job in self._computing:
            before = self._seen([job])
            del self._computing[job]
            self._policy.on_computed(job)
            self._check_unchanged("on_computed()", [job], before)

    def generated(self, job: Job, tokens: int) -> None:
        """Tell the policy of what a job has generated, ``tokens`` tokens so far, if it is to know."""
        if self.tells_generated and tokens > job.told:
            before, new = self._seen([job]), tokens - job.told
            job.told = tokens
            self._policy.on_generated(job, new)
            self._check_unchanged("on_generated()", [job], before)

    def _enter(self, job: Job) -> None:
        """Number the entry of a job that begins to wait."""
        job.phase = QUEUED
        self._entries += 1
        job.entry = self._entries
        if self._max_wait_s < inf:
            heappush(self._oldest, (job.arrival_s, job.place, job.entry, job))

    def _overdue(self) -> Job | None:
        """Return the job that has waited longest, if that is for longer than the policy's bound."""
        oldest = self._oldest
        while oldest[0][2] != oldest[0][3].entry:
            heappop(oldest)
        return oldest[0][3] if self._now - oldest[0][0] > self._max_wait_s else None

    def retraction_key(self, job: Job) -> tuple[float, Place]:
        """Return what orders running jobs if the policy does: the highest is retracted first."""
        before = self._seen([job])
        rank = rank_number(self._policy_name, "retraction_rank()", self._policy.retraction_rank(job))
        self._check_unchanged("retraction_rank()", [job], before)
        return rank, job.place

    def _seen(self, jobs: Sequence[Job]) -> list[tuple[object, ...]]:
        """Return what a policy of the user's own is about to see of these jobs; nothing for one of kvsim's."""
        return [facts(job) for job in jobs] if self._is_users else []

    def _check_unchanged(self, call: str, jobs: Sequence[Job], before: list[tuple[object, ...]]) -> None:
        """Raise PolicyError if a policy has changed a job that it was shown."""
        if not before:
            return
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
