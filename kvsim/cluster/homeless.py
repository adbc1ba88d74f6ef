"""Requests that wait before a cluster of engines: no engine is up, or the routing policy keeps them."""

from collections import deque
from collections.abc import Callable
from math import inf

from simpy import Environment, Event

from kvsim.cluster.router import Router
from kvsim.engine.engine import Engine
from kvsim.engine.job import Job


class Homeless:
    """A queue of requests without an engine. The router is offered the first one, so that one holds up the others."""

    def __init__(
        self,
        env: Environment,
        router: Router | None,
        engine_of: Callable[[Job], Engine | None],
        give: Callable[[Engine, Job, bool], None],
    ) -> None:
        """``engine_of`` returns the engine that the router chooses; None: there is none, or it keeps the request. ``give`` gives
        it the request; whether it is the first one that has it."""
        self._env = env
        self._router = router
        self._engine_of = engine_of
        self._give = give
        self._waiting: deque[tuple[Job, bool]] = deque()
        """Whether no engine has had them yet."""
        self._is_offering = self._awaits_report = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: object) -> bool:
        return any(waits is job for waits, _ in self._waiting)

    def add(self, job: Job, *, is_new: bool) -> None:
        """Let a request wait, after all others."""
        self._waiting.append((job, is_new))
        self._expect_report()

    def remove(self, job: Job) -> None:
        """Take out a request whose client has gone."""
        self._waiting = deque([(waits, is_new) for waits, is_new in self._waiting if waits is not job])

    def drop(self, index: int) -> int:
        """Take out the samples of a request that is refused. Returns how many there were."""
        before = len(self._waiting)
        self._waiting = deque([(job, is_new) for job, is_new in self._waiting if job.request.index != index])
        return before - len(self._waiting)

    def offer(self) -> None:
        """Offer the requests to the router, in their order, until it keeps one."""
        if self._is_offering:
            return
        self._is_offering = True
        while self._waiting:
            job, is_new = self._waiting[0]
            engine = self._engine_of(job)
            if engine is None:
                break
            self._waiting.popleft()
            self._give(engine, job, is_new)
        self._is_offering = False
        self._expect_report()

    def reported(self) -> None:
        """Offer the requests, since an engine has reported: now, or when the report arrives."""
        if self._router is not None and self._router.policy.staleness_s:
            self._expect_report()
        else:
            self.offer()

    def ended(self) -> None:
        """Offer the requests, since one has ended: now, or when the router hears of it."""
        if self._router is not None and self._router.late_s:
            self._expect_report()
        else:
            self.offer()

    def _expect_report(self) -> None:
        """If a request waits, offer it again as soon as the next report on its way to the router has arrived."""
        if self._router is None or self._awaits_report or not self._waiting:
            return
        at_s = self._router.next_report_s(self._env.now)
        if at_s < inf:
            self._awaits_report = True
            self._env.timeout(at_s - self._env.now).callbacks.append(self._arrived)

    def _arrived(self, event: Event) -> None:
        self._awaits_report = False
        self.offer()
