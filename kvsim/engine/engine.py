"""The serving engine: continuous batching over the cache core, independent of what makes time pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from simpy import Interrupt

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.watch import Watch
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import DECODING, LOST, Job
from kvsim.engine.loading import Loading
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.queue import WaitingQueue
from kvsim.engine.running import RunningRequests
from kvsim.engine.substrate import Substrate, Work
from kvsim.engine.waiting import WaitingRequests
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
    reset_at_s: list[float] = field(default_factory=list)
    """Times at which the cache is reset once all running requests have finished, as by a trace's ``{"reset": "drain"}``."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "max_batch_tokens", "max_running_requests")
        for name, choices in (("overlap", ("layerwise", "none")), ("links", ("fifo", "shared"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)}")
        times: Any = self.reset_at_s  # its items may be anything
        for time_s in times:
            check_number("reset_at_s", SECONDS, time_s, hint="it is a list of times")


@mypyc_attr(allow_interpreted_subclasses=True)
class Engine(Watch):
    """One engine: requests wait, are admitted in the order of a scheduling policy, prefilled in chunks, decoded and released.

    When decoding runs out of pages, the youngest request is retracted: it waits again and recomputes what is not cached of its
    prompt and its answer so far.
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
    ) -> None:
        """``gpu`` is the engine's GPU tier, by default the cache's first; ``mover`` is the one of all engines of the cache.

        ``watches`` are told of the engine's steps.
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
        self.mover.watches.append(self)
        queue = WaitingQueue(scheduling, cache, self.gpu)
        self.waiting = WaitingRequests(cache, self.gpu, self.mover, prefetching, queue, self.wake)
        loading = Loading(cache, self.mover, prefetching, engine=number, is_layerwise=settings.overlap == "layerwise")
        self.running = RunningRequests(cache, self.gpu, self.mover, self.waiting, loading, engine=number)
        self.is_up = True
        self.is_draining = False
        """Set by a reset: no request is admitted until all running ones have finished."""
        self.busy_s = 0.0
        """Time in steps."""
        self.outages: list[list[float]] = []
        """[start, end] in seconds of each time that it was down; the end is infinite until it is back."""
        self.reports = False
        """Whether to report after each step."""
        self._batch: list[tuple[Job, int]] = []
        """The prefill chunks of the step under way, or of the last one."""
        self._leap: Work | None = None
        """The leap under way, and when it began."""
        self._leap_began_s = 0.0
        self._wakeup = self.env.event()
        self._is_alone = sum([not tier.above for tier in cache.tiers]) == 1

    def report_to(self, frontend: Frontend) -> None:
        """Make this the frontend; to be called before the engine runs."""
        self.frontend = self.running.frontend = frontend

    # --- requests come and go ----------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request runs here or holds pages."""
        return not len(self.running)

    def accept(self, job: Job) -> None:
        """Take a request that the router has sent: start its prefetch or queue it; reject it if it could not run even alone."""
        request = job.request
        if request.pages_in_all(self.cache.page_tokens) > self.gpu.pool.capacity:
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

    def join(self, job: Job) -> None:
        """Let a request decode whose prompt has come from another engine."""
        job.phase, job.loads, job.ready_loads = DECODING, [], 0
        self.running.joining.append(job)
        self.wake()

    def wake(self) -> None:
        """Make the engine plan again at the next boundary between steps."""
        if not self._wakeup.triggered:
            self._wakeup.succeed()

    def ended(self, transfer: Transfer) -> None:
        """Go on if slots may have become free, or pages may have arrived."""
        if self.running.serve_claims() or transfer.target is self.gpu or self.waiting.queue and self._may_wait_for(transfer):
            self.wake()

    def _may_wait_for(self, transfer: Transfer) -> bool:
        """Whether the first request of the queue may wait for a transfer: only an idle engine waits for those of others."""
        return self._is_alone or transfer.source is self.gpu or not self.running.has_work

    # --- the loop ----------------------------------------------------------------------------------------------------

    def loop(self) -> Any:
        """Run until all requests of the cluster have ended, or the engine fails. A process of the environment."""
        try:
            yield from self._steps()
        except Interrupt:
            return

    def _steps(self) -> Any:
        running, queue, decoding = self.running, self.waiting.queue, self.running.decoding.jobs
        while not self.frontend.is_done:
            if self._wakeup.triggered:
                self._wakeup = self.env.event()
            if running.joining:
                running.join()
            if decoding and (queue or running.admitted) and not (yield from running.make_room(1)):
                continue
            batch: list[tuple[Job, int]] = []
            running.plan_prefill(batch, self.settings.max_batch_tokens)
            if not (yield from self._admit(batch)):
                continue
            steps = 1
            if decoding and not batch and not (steps := (yield from running.make_room(running.leap_steps()))):
                continue
            if batch or decoding:
                work = self._work(batch, steps)
                loads = [load for job, _ in batch for load in job.loads if not load.done]
                began_s, self._batch = self.env.now, batch
                if steps > 1:
                    self._leap, self._leap_began_s = work, began_s
                computed = self.substrate.compute(work, loads)
                for watch in self.watches:
                    watch.computes(work, computed)
                done = yield computed
                self.busy_s += self.env.now - began_s
                if work.stalled_s:
                    for job, _ in batch:
                        job.times.load_s += work.stalled_s
                self._account(batch, done if work.decode_requests else 0)
                if self.reports:
                    self.frontend.stepped(self.number)
            elif not self.frontend.is_done:
                yield self._wakeup

    def _admit(self, batch: list[tuple[Job, int]]) -> Any:
        """Admit from the queue, in its order, until the next step is full or a request does not fit.

        Adds the first chunks of admitted requests to ``batch``. Returns False if it had to wait: then plan again.
        """
        cache, waiting, running, queue = self.cache, self.waiting, self.running, self.waiting.queue
        page_tokens = cache.page_tokens
        if not running.has_work:
            running.is_full = False
            if self.is_draining:
                self.frontend.drained()
        queue.begin_round(self.env.now)
        while queue and not self.is_draining and running.takes_more(self.settings.max_running_requests):
            job = queue.first()
            request = job.request
            if job.prefetch is not None and job.prefetch.is_under_way:
                self.mover.cancel(job.prefetch.fetch)
                yield self.mover.end_of(job.prefetch.fetch)
                return False
            lease = cache.match(request, self.gpu, job.why, job.target_tokens)
            load_pages = 0
            if lease.lower_pages:
                load_pages = self.prefetching.pages_to_load(lease)
            pages = request.pages_for(job.target_tokens, page_tokens)
            in_all = pages if job.decoder >= 0 else request.pages_in_all(page_tokens)
            fits = self.fits_alone(lease, in_all)
            if not (fits and cache.admit(lease, pages, self.env.now, load_pages)):
                if fits and (not self.is_idle or cache.in_flight):
                    break
                waiting.reject(job)
                self.reject(request)
                continue
            waiting.leave_queue(job)
            running.admit(job, lease)
            if job.lease is None:
                break
            running.plan_chunk(job, batch)
        return True

    def fits_alone(self, lease: Lease, pages: int) -> bool:
        """Whether a request could get ``pages`` pages in all if no other one ran. The lease must be fresh from ``match``."""
        return pages + self.cache.kept_pages(lease) <= self.gpu.pool.capacity

    # --- steps -------------------------------------------------------------------------------------------------------

    def _work(self, batch: list[tuple[Job, int]], steps: int) -> Work:
        decoding = self.running.decoding
        return Work(
            chunks=[(tokens, job.computed) for job, tokens in batch],
            sampled_tokens=sum([job.computed + tokens == job.target_tokens for job, tokens in batch]),
            decode_requests=len(decoding.jobs),
            decode_context_tokens=decoding.context_tokens,
            max_steps=steps,
            stop=self._wakeup,
            prefilling=batch,
            decoding=decoding.jobs,
            decode_step=decoding.step,
            engine=self.number,
            has_copies=self.mover.begins_copies(self.gpu.owner),
        )

    def _account(self, batch: list[tuple[Job, int]], steps: int) -> None:
        """Record what a step or leap has done."""
        self._batch, self._leap = [], None
        self.running.advance(steps)
        while (ended := self.running.decoding.remove_ended()) is not None:
            self._finish(ended)
        for job, tokens in batch:
            if job.phase == LOST:
                self.running.release(job)
            else:
                self._book_chunk(job, tokens)

    def _book_chunk(self, job: Job, tokens: int) -> None:
        lease = job.lease
        assert lease is not None
        job.computed += tokens
        if job.computed < job.target_tokens:
            return
        self.running.admitted.remove(job)
        self.mover.submit(self.cache.insert(lease, self.env.now))
        if not job.is_prefilled:
            self._book_prompt(job)
        job.generated += 1
        if job.generated >= job.request.output_tokens:
            self._finish(job)
        elif self.frontend.continues(job, self.number):
            self.running.decoding.add(job)

    def _book_prompt(self, job: Job) -> None:
        """Record that a request's prompt has been computed on this engine, and queue its other samples."""
        job.is_prefilled = True
        if not job.generated:
            job.times.first_token_s = self.env.now
            if not job.request.sample:
                self.frontend.book.waited(job)
        self.frontend.first_token(job, self.number)
        if job.request.samples > 1 and not job.generated:
            self.waiting.start_samples(job)

    def _finish(self, job: Job) -> None:
        self.running.finish(job)
        self.frontend.book.finished(job, self.number, self.env.now)
        self.frontend.ended(job.request, self.number)

    # --- failure -----------------------------------------------------------------------------------------------------

    def stop(self) -> list[Job]:
        """Give up all requests, since the engine has failed. Returns them."""
        waiting, running = self.waiting, self.running
        self.is_up = False
        self.outages.append([self.env.now, inf])
        if self._leap is not None:
            running.decoding.step += self.substrate.steps_done(self._leap, self.env.now - self._leap_began_s)
            self._leap = None
        jobs = [*waiting.queue, *running.admitted, *running.decoding.jobs, *running.joining, *waiting.fetching]
        for job in jobs:
            self.drop(job)
        for job, _ in self._batch:  # those dropped during the step that is now cut off
            running.release(job)
        self._batch = []
        running.clear()
        return jobs

    def drop(self, job: Job) -> None:
        """Give up a request wherever it is: its pages, its place in the queue and its prefetch."""
        job.times.waits_again(self.env.now)
        is_computed = self.is_up and any(computed is job for computed, _ in self._batch)
        self.running.drop(job, keeps_pages=is_computed)
        self.waiting.drop(job)
        job.phase = LOST

    def transfers(self) -> list[Transfer]:
        """Return the transfers under way from and to the engine's GPU."""
        return [transfer for transfer in self.cache.in_flight if self.gpu in (transfer.source, transfer.target)]
