"""The serving engine: continuous batching over the cache core, independent of what makes time pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from simpy import Event
from simpy.events import URGENT

from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.adapters import AdapterSettings
from kvsim.engine.continuous import ContinuousBatching
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import ENDED, Job
from kvsim.engine.mover import Carried, Mover
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.running import RunningRequests
from kvsim.engine.schedule import PLAN_AGAIN, Parts, Schedule, Step
from kvsim.engine.speculation import Speculation
from kvsim.engine.substrate import Substrate, Work
from kvsim.engine.tool_calls import ToolCalls
from kvsim.engine.waiter import Waiter
from kvsim.engine.watch import EngineWatch
from kvsim.numbers import SECONDS, Whole, check_number, check_settings

if TYPE_CHECKING:
    from kvsim.policies.scheduling.base import SchedulingPolicy


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How requests are batched, and how loads overlap with computation."""

    max_batch_tokens: int = 8192
    """Prompt and decode tokens per step."""
    max_running_requests: int = 256
    overlap: str = "layerwise"
    """layerwise: a layer is computed as soon as its pages have arrived; none: the step waits for all loads."""
    links: str = "fifo"
    """fifo: transfers on a link run one after another; shared: all run at once, in equal shares."""
    speculation: Speculation = field(default_factory=Speculation)
    """Drafts for the tokens of answers."""
    lora: AdapterSettings = field(default_factory=AdapterSettings)
    """Adapters on the GPU."""
    reset_at_s: list[float] = field(default_factory=list)
    """Times at which the cache is reset once all running requests have finished, as by a trace's ``{"reset": "drain"}``."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "max_batch_tokens", "max_running_requests")
        for name, choices in (("overlap", ("layerwise", "none")), ("links", ("fifo", "shared"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)}")
        most = self.max_running_requests * self.speculation.tokens_per_request
        if self.speculation.is_on and most > self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} has no room for speculation.tokens={self.speculation.tokens} of "
                f"max_running_requests={self.max_running_requests} in a step: it must be at least {most}"
            )
        times: Any = self.reset_at_s  # its items may be anything
        for time_s in times:
            check_number("reset_at_s", SECONDS, time_s, hint="it is a list of times")


class Turn(Waiter):
    """Lets an engine go on when the event happens that its loop waits for."""

    __slots__ = ("engine",)

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine

    def happened(self, event: Any) -> None:
        self.engine.go_on(event)


@mypyc_attr(allow_interpreted_subclasses=True)
class Engine(Carried):
    """One engine: makes time pass for the steps that its schedule forms.

    Its loop is a generator like a process of SimPy's, but without one: it is resumed by the event that it waits for.

    By default, the schedule is kvsim's own. That of a real engine comes from its rules.
    """

    frontend: Frontend

    def __init__(
        self,
        substrate: Substrate,
        cache: ServedCache,
        prefetching: Prefetching,
        settings: EngineSettings,
        scheduling: "SchedulingPolicy",
        *,
        number: int = 0,
        gpu: Tier | None = None,
        mover: Mover | None = None,
        watches: Sequence[EngineWatch] = (),
        schedule: Callable[[Parts], Schedule] | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        """``gpu`` is the engine's GPU tier, by default the cache's first; ``mover`` is the one of all engines of the cache.

        ``watches`` are told of the engine's steps. ``schedule`` makes its schedule, if it is not kvsim's own. So many
        ``steps_in_flight`` may be under way at a time: one for each stage of a pipeline.
        """
        self.env = substrate.env
        self.substrate = substrate
        self.cache = cache
        self.gpu = gpu or cache.gpu
        self.number = number
        self.watches = watches
        self.prefetching = prefetching
        self.settings = settings
        self.mover = mover or Mover(substrate, cache)
        self.mover.add(self.gpu.owner, self)
        parts = Parts(
            cache=cache,
            gpu=self.gpu,
            mover=self.mover,
            prefetching=prefetching,
            max_batch_tokens=settings.max_batch_tokens,
            max_running_requests=settings.max_running_requests,
            is_layerwise=settings.overlap == "layerwise",
            scheduling=scheduling,
            number=number,
            wake=self.wake,
            woken=self.woken,
            speculation=settings.speculation,
            lora=settings.lora,
            steps_in_flight=steps_in_flight,
        )
        self.schedule = ContinuousBatching(parts) if schedule is None else schedule(parts)
        self.waiting = self.schedule.waiting
        self.calls: ToolCalls | None = None
        """The tool calls of sessions that it has served, if the prefetch policy decides what their pages do meanwhile."""
        policy = prefetching.policy
        if policy.follows_calls and len(cache.tiers) > 1 and isinstance(cache, Cache):
            self.calls = ToolCalls(cache, self.gpu, self.mover, policy, self.waiting.queue, self.wake)
            prefetching.kept = self.calls
        self.is_up = True
        self.steps_in_flight = steps_in_flight
        self.busy_s = 0.0
        """Time in which a step was under way."""
        self.exchange_s = self.stages_s = 0.0
        """Sums of what steps that have ended had of these (``Work``)."""
        self._busy_until_s = 0.0
        self._flight: list[tuple[Step, Event, float]] = []
        """The steps under way, with the events of their ends and the times at which they began."""
        self.outages: list[list[float]] = []
        """[start, end] in seconds of each time that it was down; the end is infinite until it is back."""
        self.reports = False
        """Whether to report after each step, and when there is nothing to do."""
        self.pending_requests = 0
        """Requests that the last pass of admission has left in the queue, if the engine reports."""
        self._leap: Work | None = None
        """The leap under way, and when it began."""
        self._leap_began_s = 0.0
        self._aborted: list[Job] = []
        """Requests that are aborted when the leap under way has ended."""
        self._wakeup = self.env.event()
        self._steps: Any = None
        """The loop, as a generator of the events that it waits for; None before it begins and while the engine is down."""
        self._awaited: Event | None = None
        """The event that the loop waits for."""
        self._turn = Turn(self)

    def report_to(self, frontend: Frontend) -> None:
        """Make this the frontend; to be called before the engine runs."""
        self.frontend = frontend
        self.schedule.report_to(frontend)

    @property
    def continuous(self) -> ContinuousBatching:
        """The schedule, which is kvsim's own: only that one can hand requests over to another engine."""
        schedule = self.schedule
        assert isinstance(schedule, ContinuousBatching)
        return schedule

    @property
    def running(self) -> RunningRequests:
        """The running requests of kvsim's own schedule."""
        return self.continuous.running

    # --- requests come and go ----------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request runs here or holds pages."""
        return not len(self.schedule)

    @property
    def is_draining(self) -> bool:
        """Whether no request is admitted until all running ones have finished, because of a reset."""
        return self.schedule.is_draining

    def drain(self, is_draining: bool) -> None:
        """Begin or end to admit no request."""
        self.schedule.is_draining = is_draining

    def accept(self, job: Job) -> None:
        """Take a request that the router has sent: start its prefetch or queue it; reject it if it could not run even alone."""
        request = job.request
        if not self.schedule.takes(request):
            self.reject(request)
            return
        self.cache.residency.notices.arrival(request, self.env.now, self.gpu)
        self.take(job)

    def take(self, job: Job) -> None:
        """Take a request that could run here, now or when the cluster has prepared it."""
        if self.frontend.prepares(job, self.number):
            self.waiting.start(job)

    def reject(self, request: Request) -> None:
        """Reject a request that could not run even alone."""
        self.frontend.book.reject(request)
        self.frontend.ended(request, self.number)

    def wake(self) -> None:
        """Make the engine plan again at the next boundary between steps."""
        if not self._wakeup.triggered:
            self._wakeup.succeed()

    def woken(self) -> Event:
        """Return the event that happens when the engine is next made to plan again."""
        return self._wakeup

    @property
    def awaits_transfers(self) -> bool:
        return self.schedule.awaits_transfers

    def ended(self, transfer: Transfer) -> None:
        """Go on if slots may have become free, or pages may have arrived."""
        if self.schedule.transfer_ended(transfer):
            self.wake()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to make steps: from now on, until all requests of the cluster have ended or the engine is stopped."""
        self._steps = self._loop()
        began: Any = self.env.event()
        began._ok, began._value = True, None
        self._await(began)
        self.env.schedule(began, URGENT)

    def _await(self, event: Event) -> None:
        self._awaited = event
        event.callbacks.append(self._turn)

    def go_on(self, event: Any) -> None:
        """Let the loop go on after an event, unless it waits for another one since it was stopped."""
        if event is not self._awaited:
            return
        self._awaited = None
        awaited: Any = event
        try:
            while awaited.callbacks is None:
                awaited = self._steps.send(awaited.value)
        except StopIteration:
            return
        self._await(awaited)

    def _loop(self) -> Any:
        """Make steps. Generates the events to wait for."""
        schedule, flight = self.schedule, self._flight
        while not self.frontend.is_done:
            if self._wakeup.triggered:
                self._wakeup = self.env.event()
            step = schedule.form()
            if step is not None and not isinstance(step, Step):
                step = yield from step
            if step is PLAN_AGAIN:
                continue
            if self.reports:
                self.pending_requests = len(self.waiting.queue)
            if schedule.looks_ahead and flight:
                done = yield flight[0][1]
                self._end(flight.pop(0), done)
                if step is None or self.frontend.is_done:
                    continue
            if step is not None:
                flight.append(self._begin(step))
                if schedule.looks_ahead or len(flight) < self.steps_in_flight:
                    continue
            if flight:
                done = yield flight[0][1]
                self._end(flight.pop(0), done)
            elif not self.frontend.is_done:
                if self.reports:
                    self.frontend.stepped(self.number)
                yield self._wakeup
        while flight and not schedule.looks_ahead:  # of requests that were aborted
            done = yield flight[0][1]
            self._end(flight.pop(0), done)

    def _begin(self, step: Step) -> tuple[Step, Event, float]:
        """Begin a step. Returns it, the event of its end, and the time."""
        work, began_s = step.work, self.env.now
        work.stop = self._wakeup
        if work.forms_each_step and self.reports:
            work.max_steps = 1
        if work.max_steps > 1:
            self._leap, self._leap_began_s = work, began_s
        if work.chunks or work.decode_requests:
            computed = self.substrate.compute(work, step.loads)
            for watch in self.watches:
                watch.computes(work, computed)
        else:
            computed = self.env.timeout(0.0, 0)
        self.schedule.began(step, computed)
        return step, computed, began_s

    def _end(self, under_way: tuple[Step, Event, float], done: Any) -> None:
        """Record what a step has done that has ended, ``done`` steps in a leap."""
        step, _, began_s = under_way
        work = step.work
        self.busy_s += self.env.now - max(began_s, self._busy_until_s)
        self._busy_until_s = self.env.now
        if work.exchange_s or work.stages_s:
            self.exchange_s += work.exchange_s * max(done, 1)
            self.stages_s += work.stages_s
        self._leap = None
        if work.stalled_s:
            for job, _ in work.prefilling:
                job.times.load_s += work.stalled_s
        self.schedule.ended(step, done if work.decode_requests else 0)
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            for job in [job for job in aborted if job.phase != ENDED]:
                self.schedule.abort(job)
        for watch in self.watches:
            watch.worked(work)
        if self.reports:
            self.frontend.stepped(self.number)

    # --- failure -----------------------------------------------------------------------------------------------------

    def stop(self) -> list[Job]:
        """Give up all requests, since the engine has failed. Returns them."""
        self.is_up = False
        self._steps = self._awaited = None
        self._aborted = []
        self.outages.append([self.env.now, inf])
        steps = 0
        for step, _, _ in self._flight:
            step.work.is_cut = True
        self._flight.clear()
        if self.calls is not None:
            self.calls.stop()
        if self._leap is not None:
            steps = self.leap_steps
            if self._leap.forms_each_step:
                self.busy_s += self.env.now - self._leap_began_s
            self._leap = None
        jobs = self.schedule.stop(steps)
        for job in jobs:
            self.waiting.departs(job.request)
        return jobs

    @property
    def computing_s(self) -> float:
        """Seconds since the step under way has begun, the first one if there are several, if it computes prompts; otherwise 0."""
        if not self._flight or not self._flight[0][0].work.chunks:
            return 0.0
        return float(self.env.now) - self._flight[0][2]

    @property
    def leap_steps(self) -> int:
        """Steps that the leap under way has done so far; 0 if there is none."""
        return 0 if self._leap is None else self.substrate.steps_done(self._leap, self.env.now - self._leap_began_s)

    @property
    def last_step(self) -> Event | None:
        """The end of the last of the steps under way; None if there is none."""
        return self._flight[-1][1] if self._flight else None

    def rest(self) -> None:
        """Make no more steps: the engine, which has nothing to do, is taken away. ``start`` lets it serve again."""
        assert self.is_idle and not self._flight
        self.schedule.stop(0)
        self.is_up = False
        self._steps = self._awaited = None

    def drop(self, job: Job) -> None:
        """Give up a request wherever it is: its pages, its place in the queue and its prefetch."""
        self.schedule.drop(job, is_up=self.is_up)

    def abort(self, job: Job) -> None:
        """End a request early, since nobody waits for its answer; the engine must be up, and the request must not have ended.

        What a leap has done of it is known when that ends, which it does with the step under way.
        """
        if self._leap is None:
            self.schedule.abort(job)
        else:
            self._aborted.append(job)
        self.wake()

    def transfers(self) -> list[Transfer]:
        """Return the transfers under way from and to the engine's GPU."""
        return [transfer for transfer in self.cache.in_flight if self.gpu in (transfer.source, transfer.target)]
