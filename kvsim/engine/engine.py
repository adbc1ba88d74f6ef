"""The serving engine: continuous batching over the cache core, independent of what makes time pass."""

from abc import ABCMeta, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf, isnan
from typing import TYPE_CHECKING, Any, cast

from simpy import Event, Interrupt

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.serving import Growth, ServedCache
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.book import Book
from kvsim.engine.job import LEAP_STEPS, Job
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import Prefetch, Prefetching
from kvsim.engine.queue import WaitingQueue
from kvsim.engine.substrate import Substrate, Work
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
class Frontend(metaclass=ABCMeta):
    """What an engine reports to: the cluster that it belongs to."""

    book: Book
    is_done: bool
    """Whether all requests have ended."""

    @abstractmethod
    def ended(self, request: Request, engine: int) -> None:
        """A request, or one of its samples, is finished or rejected."""

    @abstractmethod
    def first_token(self, job: Job, engine: int) -> None:
        """The prompt of a request has been computed."""

    @abstractmethod
    def prepares(self, job: Job, engine: int) -> bool:
        """Whether a request may wait for its turn at once; if not, the engine's ``start`` is called later."""

    @abstractmethod
    def continues(self, job: Job, engine: int) -> bool:
        """Whether the engine itself decodes a request whose prompt it has just computed; if not, it has been taken from it."""

    @abstractmethod
    def retracted(self, job: Job, engine: int) -> bool:
        """Whether the engine itself queues a request that it has retracted; if not, it has been taken from it."""

    @abstractmethod
    def drained(self) -> None:
        """An engine that admits no request because of a reset has become idle."""

    @abstractmethod
    def stepped(self, engine: int) -> None:
        """An engine has made a step, or has admitted or lost requests."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Engine:
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
    ) -> None:
        """``gpu`` is the engine's GPU tier, by default the cache's first; ``mover`` is the one of all engines of the cache."""
        self.env = substrate.env
        self.substrate = substrate
        self.cache = cache
        self.gpu = gpu or cache.gpu
        self.number = number
        self.prefetching = prefetching
        self.settings = settings
        self._is_layerwise = settings.overlap == "layerwise"
        self.mover = mover or Mover(substrate, cache)
        self.mover.listeners.append(self._landed)
        self.queue = WaitingQueue(scheduling, cache, self.gpu)
        self.admitted: list[Job] = []
        """Jobs that wait for slots, loads or the rest of their prefill, in order of admission."""
        self.claims: deque[tuple[Job, Lease]] = deque()
        """Admitted jobs whose slots are still being freed."""
        self.decoding: dict[Job, None] = {}
        self.fetching: dict[Job, None] = {}
        """Jobs that wait for their prefetch and are not queued yet."""
        self.joining: list[Job] = []
        """Jobs computed elsewhere that decode here from the next step on."""
        self.held = 0
        """Jobs that hold pages here and neither compute nor decode: their prompts are on the way to or from another engine."""
        self.is_up = True
        self.step = 0
        """Decode steps done."""
        self.retractions = 0
        self.busy_s = 0.0
        """Time in steps."""
        self.waited_s = 0.0
        """Sum of the times that requests were in the queue."""
        self.most_queued = 0
        self.outages: list[list[float]] = []
        """[start, end] in seconds of each time that it was down; the end is infinite until it is back."""
        self.reports = False
        """Whether to report after each step."""
        self._ends: list[tuple[int, int, Job]] = []
        self._page_needs: list[tuple[int, int, Job]] = []
        self._context_offset = 0
        """Sum over decoding requests of (cached tokens - steps done)."""
        self._batch: list[tuple[Job, int]] = []
        """The prefill chunks of the step under way, or of the last one."""
        self._leap: Work | None = None
        """The leap under way, and when it began."""
        self._leap_began_s = 0.0
        self._due_late: list[tuple[Job, Lease, int]] = []
        """The pages that a leap under way needs if it is not stopped, where pages are taken late."""
        self._budget = 0
        """Tokens left in the step that is being planned."""
        self._order = 0
        """Breaks ties between jobs."""
        self.is_full = False
        """Set by a retraction: no request is admitted until one has finished."""
        self.is_draining = False
        """Set by a reset: no request is admitted until all running ones have finished."""
        self._wakeup = self.env.event()
        view = cache.views[self.gpu.index]
        self._can_fetch = view.fetches_to is not None
        self._is_alone = len(cache.views) == 1
        if view.fetches_to is not None:
            disk_edge = view.fetches_to.below[0]
            prefetching.queued_s = lambda: substrate.queued_s(disk_edge)

    # --- requests come and go ----------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request runs here or holds pages."""
        return not (self.admitted or self.decoding or self.joining or self.held)

    @property
    def running_requests(self) -> int:
        """Requests admitted and not ended."""
        return len(self.admitted) + len(self.decoding) + len(self.joining) + self.held

    def accept(self, job: Job) -> None:
        """Take a request that the router has sent: start its prefetch or queue it; reject it if it could not run even alone."""
        request = job.request
        if self.pages_in_all(request) > self.gpu.pool.capacity:
            self.reject(request)
            return
        self.cache.residency.notify_arrival(request, self.env.now, self.gpu)
        self.take(job)

    def take(self, job: Job) -> None:
        """Take a request that could run here, now or when the cluster has prepared it."""
        if self.frontend.prepares(job, self.number):
            self.start(job)

    def start(self, job: Job) -> None:
        """Start a request's prefetch, if it gets one, or queue it."""
        if self._can_fetch:
            self._prefetch(job)
        if job.prefetch is None:
            self._enqueue(job)

    def reject(self, request: Request) -> None:
        """Reject a request that could not run even alone."""
        self.frontend.book.reject(request)
        self.frontend.ended(request, self.number)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _prefetch(self, job: Job) -> None:
        """Start the job's prefetch if the policy wants one. The job is queued when that ends or has lasted long enough."""
        lease = self.cache.match(job.request, self.gpu)
        prefetch = self.prefetching.start(lease, self.env.now) if lease.disk_pages else None
        if prefetch is None:
            return
        job.prefetch = prefetch
        self.fetching[job] = None
        prefetch.fetch.request = job.request
        self.mover.submit(prefetch.transfers)
        self.mover.end_of(prefetch.fetch).callbacks.append(lambda _: self._fetched(job, prefetch))
        wait_s = self.prefetching.wait_s(prefetch.pages * self.cache.page_tokens)
        if wait_s < float("inf"):
            self.env.timeout(wait_s).callbacks.append(lambda _: self._enqueue(job))

    def _fetched(self, job: Job, prefetch: Prefetch) -> None:
        self.prefetching.end(prefetch)
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        if not job.is_queued and not job.admissions and not job.is_lost:
            self.fetching.pop(job, None)
            self._push(job)
            self.wake()

    def _push(self, job: Job) -> None:
        job.queued_at_s = self.env.now
        self.queue.push(job)
        self.most_queued = max(self.most_queued, len(self.queue))

    def _enqueue_samples(self, job: Job) -> None:
        """Queue the other samples of a request whose first one has computed the prompt: all count as one use of its pages."""
        for request in job.request.other_samples():
            sample = Job(request, job.arrival_s)
            sample.is_known = True
            self._enqueue(sample)

    def wake(self) -> None:
        """Make the engine plan again at the next boundary between steps."""
        if not self._wakeup.triggered:
            self._wakeup.succeed()

    def _landed(self, transfer: Transfer) -> None:
        """Called when a transfer has ended: slots may have become free, pages may have arrived."""
        if self._serve_claims() or transfer.target is self.gpu or self.queue and self._may_wait_for(transfer):
            self.wake()

    def _may_wait_for(self, transfer: Transfer) -> bool:
        """Whether the first request of the queue may wait for a transfer: only an idle engine waits for those of others."""
        return self._is_alone or transfer.source is self.gpu or not (self.admitted or self.decoding)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def loop(self) -> Any:
        """Run until all requests of the cluster have ended, or the engine fails. A process of the environment."""
        try:
            yield from self._steps()
        except Interrupt:
            return

    def _steps(self) -> Any:
        while not self.frontend.is_done:
            if self._wakeup.triggered:
                self._wakeup = self.env.event()
            if self.joining:
                self._join()
            if self.decoding and (self.queue or self.admitted) and not (yield from self._make_room_to_decode(1)):
                continue
            batch: list[tuple[Job, int]] = []
            self._plan_prefill(batch)
            if not (yield from self._admit(batch)):
                continue
            steps = 1
            if self.decoding and not batch and not (steps := (yield from self._make_room_to_decode(self._leap_steps()))):
                continue
            if batch or self.decoding:
                work = self._work(batch, steps)
                loads = [load for job, _ in batch for load in job.loads if not load.done]
                began_s, self._batch = self.env.now, batch
                if steps > 1:
                    self._leap, self._leap_began_s = work, began_s
                done = yield self.substrate.compute(work, loads)
                self.busy_s += self.env.now - began_s
                if work.stalled_s:
                    for job, _ in batch:
                        job.load_s += work.stalled_s
                self._account(batch, done if work.decode_requests else 0)
                if self.reports:
                    self.frontend.stepped(self.number)
            elif not self.frontend.is_done:
                yield self._wakeup

    def _admit(self, batch: list[tuple[Job, int]]) -> Any:
        """Admit from the queue, in its order, until the next step is full or a request does not fit.

        Adds the first chunks of admitted requests to ``batch``. Returns False if it had to wait: then plan again.
        """
        cache, queue = self.cache, self.queue
        if not self.admitted and not self.decoding:
            self.is_full = False
            if self.is_draining:
                self.frontend.drained()
        queue.begin_round(self.env.now)
        while queue and not self.is_full and len(self.admitted) + len(self.decoding) < self.settings.max_running_requests:
            if self.is_draining or self._budget <= 0:
                break
            job = queue.first()
            request = job.request
            if job.prefetch is not None and job.prefetch.is_under_way:
                self.mover.cancel(job.prefetch.fetch)
                yield self.mover.end_of(job.prefetch.fetch)
                return False
            lease = cache.resume(request, job.target_tokens, self.gpu) if job.is_known else cache.match(request, self.gpu)
            lease.is_resumed, lease.is_known_prompt = job.is_known, job.generated > 0 or request.sample > 0
            load_pages = 0
            if lease.cpu_pages or lease.disk_pages:
                load_pages = self.prefetching.pages_to_load(lease)
            pages = max(request.prompt_pages, self.pages_for(job.target_tokens))
            in_all = pages if job.decoder >= 0 else self.pages_in_all(request)
            fits = self.fits_alone(lease, in_all)
            if not (fits and cache.admit(lease, pages, self.env.now, load_pages)):
                if fits and (not self.is_idle or cache.in_flight):
                    break
                queue.remove(job)
                if job.prefetch is not None:
                    self.prefetching.give_up(job.prefetch)
                self.reject(request)
                continue
            queue.remove(job)
            self._start(job, lease)
            if job.lease is None:
                break
            self._plan_chunk(job, batch)
        return True

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold this many tokens."""
        return -(-tokens // self.cache.page_tokens)

    def pages_in_all(self, request: Request) -> int:
        """Return how many pages a request takes when it has its whole answer, or all of them."""
        pages = self.pages_for(request.prompt_tokens + request.output_tokens)
        return request.pages_with_all(pages, self.cache.page_tokens) if request.samples > 1 else pages

    def fits_alone(self, lease: Lease, pages: int) -> bool:
        """Whether a request could get ``pages`` pages in all if no other one ran. The lease must be fresh from ``match``."""
        return pages + self.cache.kept_pages(lease) <= self.gpu.pool.capacity

    def _start(self, job: Job, lease: Lease) -> None:
        job.lease, job.is_queued, job.is_claimed, job.is_known = lease, False, False, True
        job.admissions += 1
        self.waited_s += self.env.now - job.queued_at_s
        self.admitted.append(job)
        if lease.waits:
            self.mover.submit(lease.waits)
        if lease.promised_pages:
            self.claims.append((job, lease))
            self._serve_claims()
        else:
            self._claimed(job, lease)

    def _serve_claims(self) -> bool:
        """Give admitted requests their promised slots, in order, as far as these are free. Returns whether any got theirs."""
        served = False
        while self.claims:
            job, lease = self.claims[0]
            if job.lease is not lease:
                self.claims.popleft()
                continue
            claim = self.cache.claim(lease, self.env.now)
            if claim.waits:
                self.mover.submit(claim.waits)
                break
            self.claims.popleft()
            if claim.is_lost:
                self._give_up(job)
            else:
                self._claimed(job, lease)
                served = True
        return served

    def _wait_for(self, transfers: list[Transfer]) -> Any:
        """Submit transfers and wait for the end of the last one."""
        self.mover.submit(transfers)
        yield self.mover.end_of(transfers[-1])

    def _claimed(self, job: Job, lease: Lease) -> None:
        """Start the loads of a request that has its slots, and determine what is left to compute."""
        job.is_claimed = True
        job.has_pages(self.env.now)
        if lease.has_load:
            transfers, loads = self.cache.load(lease, self.env.now)
            planned = [(load, load.pages) for load in loads]
            for transfer in transfers:
                if not transfer.goes_down:
                    transfer.request = job.request
            self.mover.submit(transfers)
            for load, pages in planned:
                self.mover.end_of(load).callbacks.append(partial(self._loaded, job, lease, load, pages))
        job.loads, job.ready_loads = self.cache.arriving(lease), 0
        if job.admissions == 1 and not job.request.sample:
            disk_pages = lease.loaded_disk_pages
            if job.prefetch is not None:
                disk_pages += self.prefetching.settle(job.prefetch, lease)
                job.prefetch = None
            if not job.is_counted:
                job.is_counted, job.counted = True, lease
                book = self.frontend.book
                book.hits[job.request.index] = lease.gpu_pages, lease.loaded_pages - disk_pages, disk_pages
                book.engines[job.request.index] = self.number
        reused = (lease.gpu_pages + lease.loaded_pages) * self.cache.page_tokens
        job.computed = min(reused, job.target_tokens - 1)

    def _loaded(self, job: Job, lease: Lease, load: Transfer, pages: int, _: Event) -> None:
        """Take what a load of ``pages`` pages failed to bring out of the hits: it is computed instead."""
        missing = pages - load.arrived_pages
        if missing and job.lease is lease:
            lost = self.cache.shorten_hit(lease, load, missing, self.env.now)
            job.computed = max(0, job.computed - lost * self.cache.page_tokens)
            if job.counted is lease:
                hits = self.frontend.book.hits
                gpu_pages, cpu_pages, disk_pages = hits[job.request.index]
                from_disk = min(lost, disk_pages)
                from_cpu = min(lost - from_disk, cpu_pages)
                left = gpu_pages - (lost - from_disk - from_cpu), cpu_pages - from_cpu, disk_pages - from_disk
                hits[job.request.index] = left

    def _give_up(self, job: Job) -> None:
        """Give back a request's slots and pages, and put it back into the queue."""
        assert job.lease is not None
        is_decoding = job in self.decoding
        self.cache.retract(job.lease, job.cached_tokens(self.step) if is_decoding else job.computed, self.env.now)
        job.waits_again(self.env.now)
        if not job.is_claimed:
            job.admissions -= 1
        job.was_running = job.admissions > 0
        job.lease, job.loads, job.ready_loads = None, [], 0
        if is_decoding:
            self._leave_decoding(job)
        else:
            self.admitted.remove(job)
        if self.frontend.retracted(job, self.number):
            self._push(job)

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _plan_prefill(self, batch: list[tuple[Job, int]]) -> None:
        """Add the prefill chunks of admitted requests to the next step, as (job, tokens), in order of admission."""
        self._budget = self.settings.max_batch_tokens - len(self.decoding)
        for job in self.admitted.copy():
            if job.lease is not None:
                self._plan_chunk(job, batch)

    def _plan_chunk(self, job: Job, batch: list[tuple[Job, int]]) -> None:
        """Add a request's next chunk to the step if it can be computed and tokens are left; retract it if pages are not."""
        if self._budget <= 0 or not job.is_claimed:
            return
        if not self._can_compute(job):
            if isnan(job.refused_at_s):
                job.refused_at_s = self.env.now
            return
        if not isnan(job.refused_at_s):
            job.has_loads(self.env.now)
        tokens = min(self._budget, job.target_tokens - job.computed)
        while not self.cache.begin_chunk(cast(Lease, job.lease), job.computed + tokens, self.env.now):
            if not self._retract_for(job, batch):
                return
        batch.append((job, tokens))
        self._budget -= tokens

    def _retract_for(self, job: Job, batch: list[tuple[Job, int]]) -> bool:
        """Retract a running request because there is no room for a job's chunk. Returns False if it is the job itself.

        Which one is retracted is the policy's choice, if it makes one; otherwise it is the job.
        """
        victim = job
        if self.queue.ranks_retractions:
            victim = max([*self.decoding, *self.admitted], key=self.queue.retraction_key)
        self._budget += sum([tokens for planned, tokens in batch if planned is victim]) + (victim in self.decoding)
        batch[:] = [chunk for chunk in batch if chunk[0] is not victim]
        self._retract(victim)
        return victim is not job

    def _can_compute(self, job: Job) -> bool:
        """Whether the job's loads have arrived, or a step can follow them layer by layer."""
        loads = job.loads
        while job.ready_loads < len(loads):
            load = loads[job.ready_loads]
            if not (load.done or self._is_layerwise and load.begun):
                return False
            job.ready_loads += 1
        return True

    def _leap_steps(self) -> int:
        """Return the most decode steps that may follow each other without a look at the queue, 1 or more."""
        if self.is_full and not self.cache.rules.pauses_after_retraction:
            return 1
        return min(LEAP_STEPS, self._ends[0][0] - self.step)

    def _work(self, batch: list[tuple[Job, int]], steps: int) -> Work:
        decoding = len(self.decoding)
        return Work(
            chunks=[(tokens, job.computed) for job, tokens in batch],
            sampled_tokens=sum([job.computed + tokens == job.target_tokens for job, tokens in batch]),
            decode_requests=decoding,
            decode_context_tokens=self._context_offset + decoding * self.step,
            max_steps=steps,
            stop=self._wakeup,
            prefilling=batch,
            decoding=self.decoding,
            decode_step=self.step,
            engine=self.number,
        )

    def _account(self, batch: list[tuple[Job, int]], steps: int) -> None:
        """Record what a step or leap has done."""
        self._batch, self._leap = [], None
        if self._due_late:
            self._take_late(steps)
        self.step += steps
        if not self.cache.rules.pauses_after_retraction:
            self.is_full = False
        while self._ends and self._ends[0][0] <= self.step:
            _, _, job = heappop(self._ends)
            if job in self.decoding and job.last_step <= self.step:
                self._leave_decoding(job)
                self._finish(job)
        for job, tokens in batch:
            if job.is_lost:
                self._release_dropped(job)
            else:
                self._book_chunk(job, tokens)

    def _book_chunk(self, job: Job, tokens: int) -> None:
        lease = job.lease
        assert lease is not None
        job.computed += tokens
        if job.computed < job.target_tokens:
            return
        self.admitted.remove(job)
        self.mover.submit(self.cache.insert(lease, self.env.now))
        if not job.is_prefilled:
            job.is_prefilled = True
            if not job.generated:
                job.first_token_s = self.env.now
                if not job.request.sample:
                    book, index = self.frontend.book, job.request.index
                    book.queue_s[index], book.load_s[index] = job.queue_s, job.load_s
            self.frontend.first_token(job, self.number)
            if job.request.samples > 1 and not job.generated:
                self._enqueue_samples(job)
        job.generated += 1
        if job.generated >= job.request.output_tokens:
            self._finish(job)
        elif self.frontend.continues(job, self.number):
            self._join_decoding(job)

    def _finish(self, job: Job) -> None:
        request, now = job.request, self.env.now
        assert job.lease is not None
        self.mover.submit(self.cache.finish_request(job.lease, now))
        job.lease = None
        self.is_full = False
        index, book = request.index, self.frontend.book
        if not request.sample:
            book.ttft_s[index] = job.first_token_s - job.arrival_s
        if request.output_tokens > 1:
            book.tpot_s[index] = (now - job.first_token_s) / (request.output_tokens - 1)
        book.e2e_s[index] = now - job.arrival_s
        book.decoders[index] = self.number
        self.frontend.ended(request, self.number)

    # --- decode ------------------------------------------------------------------------------------------------------

    def join(self, job: Job) -> None:
        """Let a request decode whose prompt has come from another engine."""
        job.is_claimed, job.loads, job.ready_loads = True, [], 0
        self.joining.append(job)
        self.wake()

    def _join(self) -> None:
        for job in self.joining:
            self._join_decoding(job)
        self.joining.clear()

    def _join_decoding(self, job: Job) -> None:
        """Let a request decode: its next token comes with the next step."""
        request, page_tokens = job.request, self.cache.page_tokens
        tokens = job.target_tokens - 1
        job.joined_step = self.step
        job.last_step = self.step + request.output_tokens - job.generated
        room = max(request.prompt_pages, self.pages_for(tokens)) * page_tokens - tokens
        job.next_page_step = self.step + room + 1
        self.decoding[job] = None
        self._context_offset += tokens - self.step
        self._order += 1
        heappush(self._ends, (job.last_step, self._order, job))
        self._need_page(job)

    def _leave_decoding(self, job: Job) -> None:
        del self.decoding[job]
        done = self.step - job.joined_step
        tokens = job.target_tokens - 1
        self._context_offset -= tokens - job.joined_step
        job.generated += done

    def _make_room_to_decode(self, steps: int) -> Any:
        """Take the pages that the next ``steps`` decode steps need, or those of fewer steps if there are too few.

        Returns the number of steps that have room; 0 if a request has been retracted or transfers have ended: then plan again.
        """
        cache = self.cache
        while due := self._pages_due(steps):
            if steps > 1 and cache.takes_pages_late:
                if sum([pages for _, _, pages in due]) <= self.gpu.available_pages:
                    self._due_late = due
                    return steps
            else:
                growth = cache.grow([(lease, pages) for _, lease, pages in due], self.env.now)
                if growth.has_room:
                    return steps if (yield from self._take_pages(due, growth)) else 0
            if steps == 1:
                yield from self._make_room_one_by_one(due)
                return 0
            for job, _, _ in due:
                self._need_page(job)
            steps //= 2
        return steps

    def _make_room_one_by_one(self, due: list[tuple[Job, Lease, int]]) -> Any:
        """Give decoding requests their pages, oldest first, until one finds no room; then retract the youngest."""
        due.sort(key=lambda need: need[0].request.index)
        while due:
            _, lease, pages = due[0]
            growth = self.cache.grow([(lease, pages)], self.env.now)
            if not growth.has_room:
                break
            served = due.pop(0)
            if not (yield from self._take_pages([served], growth)):
                break
        for job, _, _ in due:
            self._need_page(job)
        if not growth.has_room:
            yield from self._retract_youngest()

    def _take_pages(self, due: list[tuple[Job, Lease, int]], growth: Growth) -> Any:
        """Wait until decoding requests have the slots that they have been given. Returns False if those of one are lost."""
        page_tokens = self.cache.page_tokens
        for job, _, pages in due:
            job.next_page_step += pages * page_tokens
            self._need_page(job)
        if growth.transfers:
            self.mover.submit(growth.transfers)
        for job, lease, _ in due:
            while lease.promised_pages:
                claim = self.cache.claim(lease, self.env.now)
                if claim.is_lost:
                    self._give_up(job)
                    return False
                if claim.waits:
                    yield from self._wait_for(claim.waits)
        return True

    def _take_late(self, steps: int) -> None:
        """Take the pages that a leap has needed, now that its number of steps is known."""
        page_tokens, last = self.cache.page_tokens, self.step + steps
        needs: list[tuple[Lease, int]] = []
        for job, lease, _ in self._due_late:
            until = min(last, job.last_step)
            if job.next_page_step <= until:
                pages = 1 + (until - job.next_page_step) // page_tokens
                needs.append((lease, pages))
                job.next_page_step += pages * page_tokens
            self._need_page(job)
        self._due_late = []
        growth = self.cache.grow(needs, self.env.now)
        assert growth.has_room and not growth.transfers, "a leap had no room for its pages"

    def _pages_due(self, steps: int) -> list[tuple[Job, Lease, int]]:
        """Remove and return the page needs of decoding requests within ``steps`` steps, as (job, its lease, pages)."""
        due, needs, last = [], self._page_needs, self.step + steps
        decoding, page_tokens = self.decoding, self.cache.page_tokens
        while needs and needs[0][0] <= last:
            step, order, job = heappop(needs)
            if job.page_need == order and job in decoding:
                until = job.last_step
                if last < until:
                    until = last
                if step <= until:
                    due.append((job, cast(Lease, job.lease), 1 + (until - step) // page_tokens))
        return due

    def _need_page(self, job: Job) -> None:
        self._order += 1
        job.page_need = self._order
        heappush(self._page_needs, (job.next_page_step, self._order, job))

    def _retract_youngest(self) -> Any:
        """Retract the request that arrived last, or that the policy names, and admit none until one has finished.

        If only one request runs and transfers are in flight, wait for the oldest of them instead: it may free the pages.
        """
        jobs = [job for job in [*self.decoding, *self.admitted] if job.is_claimed and all(load.done for load in job.loads)]
        if len(jobs) == 1 and self.cache.in_flight:
            yield from self._wait_for(list(self.cache.in_flight)[:1])
            return
        ranked = self.queue.ranks_retractions
        self._retract(max(jobs, key=self.queue.retraction_key if ranked else lambda job: job.request.index))

    def _retract(self, job: Job) -> None:
        """Let a running request wait again, and admit none before a step has ended or a request has finished."""
        self.retractions += 1
        self.frontend.book.retractions[job.request.index] += 1
        self.is_full = True
        self._give_up(job)

    # --- failure -----------------------------------------------------------------------------------------------------

    def stop(self) -> list[Job]:
        """Give up all requests, since the engine has failed. Returns them."""
        self.is_up, self.is_full = False, False
        self.outages.append([self.env.now, inf])
        if self._leap is not None:
            self.step += self.substrate.steps_done(self._leap, self.env.now - self._leap_began_s)
            self._leap = None
        jobs = [*self.queue, *self.admitted, *self.decoding, *self.joining, *self.fetching]
        for job in jobs:
            self.drop(job)
        for job, _ in self._batch:  # those dropped during the step that is now cut off
            self._release_dropped(job)
        self._batch = []
        self.claims.clear()
        self._ends.clear()
        self._page_needs.clear()
        self._due_late = []
        assert not self._context_offset, "tokens of requests that do not decode any more"
        return jobs

    def drop(self, job: Job) -> None:
        """Give up a request wherever it is: its pages, its place in the queue and its prefetch."""
        job.waits_again(self.env.now)
        if job.is_queued:
            self.queue.remove(job)
            self.waited_s += self.env.now - job.queued_at_s
        if job in self.decoding:
            self._leave_decoding(job)
        for jobs in (self.admitted, self.joining):
            if job in jobs:
                jobs.remove(job)
        self.fetching.pop(job, None)
        is_computed = self.is_up and any(computed is job for computed, _ in self._batch)
        if job.lease is not None and not is_computed:
            self.cache.release(job.lease)
            job.lease = None
        if job.prefetch is not None:
            if job.prefetch.is_under_way:
                self.mover.cancel(job.prefetch.fetch)
            self.prefetching.give_up(job.prefetch)
        job.prefetch, job.is_queued, job.is_lost = None, False, True

    def _release_dropped(self, job: Job) -> None:
        """Give back the pages of a request that was dropped during the step that computed them."""
        if job.lease is not None:
            self.cache.release(job.lease)
            job.lease = None

    def transfers(self) -> list[Transfer]:
        """Return the transfers under way from and to the engine's GPU."""
        return [transfer for transfer in self.cache.in_flight if self.gpu in (transfer.source, transfer.target)]
