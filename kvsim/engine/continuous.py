"""kvsim's own schedule, and vLLM's: continuous batching with chunked prefill; prompts and answers share each step."""

from math import isnan
from typing import Any, cast

from simpy import Event

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.engine.adapters import AdapterSlots
from kvsim.engine.decoding import Decoding
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import DECODING, LOST, PREFILLING, Job
from kvsim.engine.loading import Loading
from kvsim.engine.queues import queue_for
from kvsim.engine.running import WAITS, RunningRequests
from kvsim.engine.schedule import PLAN_AGAIN, Parts, Schedule, Step
from kvsim.engine.speculation import Answers
from kvsim.engine.substrate import Work
from kvsim.engine.waiting import WaitingRequests


class ContinuousBatching(Schedule):
    """Requests are admitted in the order of a scheduling policy, prefilled in chunks, decoded and released.

    When decoding runs out of pages, the youngest request is retracted: it waits again and recomputes what is not cached of its
    prompt and its answer so far.

    With several steps in flight, as vLLM's batch queue has them (``step_with_batch_queue`` in its ``v1/engine/core.py``), a step
    has all requests that no other one computes: a request decodes again when its step has ended, and the next chunk of a prompt
    may follow those under way. So requests of a step stay together, and another one is in flight only if a step has been full.
    """

    def __init__(self, parts: Parts) -> None:
        self.is_draining = False
        self.cache = parts.cache
        self.gpu = parts.gpu
        self.number = parts.number
        self.mover = parts.mover
        self.env = parts.mover.env
        self.prefetching = parts.prefetching
        self.max_batch_tokens = parts.max_batch_tokens
        self.max_running_requests = parts.max_running_requests
        queue = queue_for(parts.scheduling, parts.cache, parts.gpu)
        self.queue = queue
        self.waiting = WaitingRequests(parts.cache, parts.gpu, parts.mover, parts.prefetching, queue, parts.wake)
        loading = Loading(parts.cache, parts.mover, parts.prefetching, engine=parts.number, is_layerwise=parts.is_layerwise)
        self.running = RunningRequests(
            parts.cache,
            parts.gpu,
            parts.mover,
            queue,
            self.waiting,
            loading,
            engine=parts.number,
            steps_in_flight=parts.steps_in_flight,
            answers=Answers(parts.speculation) if parts.speculation.is_on else None,
        )
        self.adapters = AdapterSlots(parts.lora) if parts.lora.is_on else None
        """The places for adapters, if they cost anything."""
        self._wake = parts.wake
        self._flight: list[tuple[Decoding, list[tuple[Job, int]]]] = []
        """Who decodes in each step under way, and its prefill chunks."""
        self._is_alone = sum([not tier.above for tier in self.cache.tiers]) == 1

    def report_to(self, frontend: Frontend) -> None:
        self.frontend = self.running.frontend = frontend

    def __len__(self) -> int:
        return len(self.running)

    @property
    def retractions(self) -> int:
        return self.running.retractions

    @property
    def drafts(self) -> dict[str, int]:
        return {} if self.running.answers is None else self.running.answers.counts()

    @property
    def adapter_use(self) -> dict[str, int]:
        return {} if self.adapters is None else self.adapters.counts()

    @property
    def claiming_s(self) -> float:
        return self.running.claiming_s

    @property
    def admitted(self) -> int:
        return len(self.running.admitted)

    def generated(self, job: Job) -> int:
        for group in self.running.groups:
            if job in group.jobs:
                return job.generated + group.tokens_since(job)
        return job.generated

    def takes(self, request: Request) -> bool:
        return request.pages_in_all(self.cache.page_tokens) <= self.gpu.pool.capacity

    def join(self, job: Job) -> None:
        job.phase, job.loads, job.ready_loads = DECODING, [], 0
        self.running.joining.append(job)
        self._wake()

    @property
    def awaits_transfers(self) -> bool:
        return len(self.queue) > 0 or not isnan(self.running.claims_since_s)

    def transfer_ended(self, transfer: Transfer) -> bool:
        return self.running.serve_claims() or transfer.target is self.gpu or bool(self.queue) and self._may_wait_for(transfer)

    def _may_wait_for(self, transfer: Transfer) -> bool:
        """Whether the first request of the queue may wait for a transfer: only an idle engine waits for those of others."""
        return self._is_alone or transfer.source is self.gpu or not self.running.has_work

    # --- a step ------------------------------------------------------------------------------------------------------

    def form(self) -> Any:
        running = self.running
        running.turn_to_idle_group()
        if running.joining:
            running.join()
        if running.admitted or self.queue:
            if running.decoding.needs_pages(1):
                steps = running.make_room(1)
                if steps == WAITS:
                    return self._form_later()
                if not steps:
                    return PLAN_AGAIN
            if self.cache.slides_at >= 0:
                running.slide()
        return self._form()

    def _form_later(self) -> Any:
        """Form a step when decoding requests have their slots for it."""
        if not (yield from self.running.wait_for_room()):
            return PLAN_AGAIN
        if self.cache.slides_at >= 0:
            self.running.slide()
        step = self._form()
        if step is not None and not isinstance(step, Step):
            step = yield from step
        return step

    def _form(self) -> Any:
        """Form a step for which decoding requests have room, as ``form`` does."""
        running = self.running
        decoding = running.decoding.jobs
        batch: list[tuple[Job, int]] = []
        now = self.env.now
        running.plan_prefill(batch, self.max_batch_tokens, now)
        fetched = self._admit(batch, now)
        if fetched is not None:
            return self._plan_after(fetched)
        steps = 1
        if decoding and not batch:
            steps = running.make_room(running.leap_steps())
            if steps == WAITS:
                return self._leap_later(batch)
            if not steps:
                return PLAN_AGAIN
        return self._step(batch, steps) if batch or decoding else None

    def _plan_after(self, event: Event) -> Any:
        yield event
        return PLAN_AGAIN

    def _leap_later(self, batch: list[tuple[Job, int]]) -> Any:
        """Form a leap when the requests have their slots for it."""
        steps = yield from self.running.wait_for_room()
        return self._step(batch, steps) if steps else PLAN_AGAIN

    def _step(self, batch: list[tuple[Job, int]], steps: int) -> Step:
        """Return the step of these chunks and of all that decode, or a leap."""
        work = self._work(batch, steps)
        if self.adapters is not None:
            each = work.tokens_per_decode
            decoding = [(job.request, each) for job in self.running.decoding.jobs]
            work.adapters = self.adapters.use([*decoding, *[(job.request, tokens) for job, tokens in batch]])
        step = Step(work, [load for job, _ in batch for load in job.loads if not load.done])
        for job, tokens in batch:
            job.flying += tokens
        self.running.decoding.is_flying = True
        self._flight.append((self.running.decoding, batch))
        return step

    def _admit(self, batch: list[tuple[Job, int]], now: float) -> Event | None:
        """Admit from the queue, in its order, until the next step is full or a request does not fit.

        Adds the first chunks of admitted requests to ``batch``. Returns an event if that has to come first: then plan again.
        """
        cache, waiting, running, queue = self.cache, self.waiting, self.running, self.queue
        page_tokens = cache.page_tokens
        if not running.has_work:
            running.is_full = False
            if self.is_draining:
                self.frontend.drained()
        if queue.tells_generated and queue:
            running.tell_generated()
        queue.begin_round(now)
        if self.adapters is not None:
            self.adapters.begin_round([job.request for job in running.all_running()])
        while queue and not self.is_draining and running.takes_more(self.max_running_requests):
            job = self._next()
            if job is None:
                break
            request = job.request
            if job.prefetch is not None and job.prefetch.is_under_way:
                self.mover.cancel(job.prefetch.fetch)
                return self.mover.end_of(job.prefetch.fetch)
            tokens = job.target_tokens
            lease = cache.match(request, self.gpu, job.why, tokens)
            load_pages = 0
            if lease.below and lease.lower_pages:
                load_pages = self.prefetching.pages_to_load(lease)
            pages = request.pages_for(tokens, page_tokens)
            in_all = pages if job.decoder >= 0 else request.pages_in_all(page_tokens)
            fits = self.fits_alone(lease, in_all)
            cache.step_tokens = running.budget_tokens
            if not (fits and cache.admit(lease, pages, now, load_pages)):
                if lease.waits:
                    self.mover.submit(lease.waits)
                if fits and running.loading.gives_way():
                    continue
                if fits and (len(running) or self._flight or cache.in_flight):
                    break
                waiting.reject(job)
                self.frontend.book.reject(request)
                self.frontend.ended(request, self.number)
                continue
            waiting.leave_queue(job)
            queue.admitted(job, max(1, tokens - (lease.gpu_pages + load_pages) * page_tokens))
            running.admit(job, lease)
            if self.adapters is not None:
                self.adapters.admitted(request)
            if job.lease is None:  # its slots are lost: it waits again
                break
            if job.phase == PREFILLING:
                running.plan_chunk(job, batch, now)
        return None

    def _next(self) -> Job | None:
        """Return the first waiting request whose adapter, if it has one, may run beside those of the others; None: none now."""
        job, adapters = self.queue.first(), self.adapters
        if job is None or adapters is None or adapters.takes(job.request):
            return job
        return next((other for other in self.queue if adapters.takes(other.request)), None)

    def fits_alone(self, lease: Lease, pages: int) -> bool:
        """Whether a request could get ``pages`` pages in all if no other one ran. The lease must be fresh from ``match``."""
        return pages + self.cache.kept_pages(lease) <= self.gpu.pool.capacity

    def _work(self, batch: list[tuple[Job, int]], steps: int) -> Work:
        decoding = self.running.decoding
        return Work(
            chunks=[(tokens, job.computed + job.flying) for job, tokens in batch],
            sampled_tokens=sum([job.computed + job.flying + tokens == job.target_tokens for job, tokens in batch]),
            decode_requests=len(decoding.jobs),
            decode_context_tokens=decoding.context_tokens,
            max_steps=steps,
            prefilling=batch,
            decoding=decoding.jobs,
            decode_step=decoding.step,
            tokens_per_decode=decoding.tokens_per_request,
            engine=self.number,
            has_copies=self.mover.begins_copies(self.gpu.owner),
        )

    def ended(self, step: Step, steps: int) -> None:
        self.running.decoding, _ = self._flight.pop(0)
        self.running.decoding.is_flying = False
        self.running.advance(steps)
        while (ended := self.running.decoding.remove_ended()) is not None:
            self._finish(ended)
        for job, tokens in step.work.prefilling:
            if job.phase == LOST:
                if not self._is_computed(job):
                    self.running.release(job)
            else:
                self._book_chunk(job, tokens)

    def _book_chunk(self, job: Job, tokens: int) -> None:
        lease = job.lease
        assert lease is not None
        job.computed += tokens
        job.flying -= tokens
        if job.computed < job.target_tokens:
            self.cache.end_chunk(lease, job.computed, self.env.now)
            return
        self.running.prefilled(job)
        self.mover.submit(self.cache.insert(lease, self.env.now))
        self.queue.computed(job)
        if not job.is_prefilled:
            self._book_prompt(job)
        job.generated += 1
        self._decode(job)

    def _book_prompt(self, job: Job) -> None:
        """Record that a request's prompt has been computed on this engine, and queue its other samples."""
        job.is_prefilled = True
        if not job.generated:
            job.times.first_token_s = self.env.now
            if not job.request.sample:
                self.frontend.book.waited(job)
        self.frontend.first_token(job, self.number)
        if job.request.samples > 1 and not job.generated:
            self._start_samples(job)

    def _start_samples(self, job: Job) -> None:
        """Let the other samples decode at once if they share all of the prompt, or queue them."""
        leases = self.cache.fork(cast(Lease, job.lease), self.env.now)
        if leases:
            job.request = job.request.apart()[0]
        else:
            self.waiting.start_samples(job)
        for lease in leases:
            sample = Job(lease.request, job.arrival_s)
            sample.is_known = sample.is_counted = sample.is_prefilled = True
            sample.lease, sample.computed, sample.generated = lease, job.computed, 1
            sample.admissions, sample.times = 1, job.times.again()
            self._decode(sample)

    def _decode(self, job: Job) -> None:
        """Let a request decode whose first token has appeared, unless that is its last one."""
        if job.generated >= job.request.output_tokens:
            self._finish(job)
        elif self.frontend.continues(job, self.number):
            self.running.decoding.add(job)

    def _finish(self, job: Job) -> None:
        self.running.finish(job)
        self.queue.generated(job, job.generated)
        self.frontend.book.finished(job, self.number, self.env.now)
        self.frontend.ended(job.request, self.number)

    @property
    def _computed(self) -> list[Job]:
        """Those of whose prompts steps under way compute chunks, one after another."""
        return [job for _, batch in self._flight for job, _ in batch]

    def _is_computed(self, job: Job) -> bool:
        """Whether a step under way computes a chunk of a request's prompt."""
        return any(computed is job for computed in self._computed)

    # --- failure -----------------------------------------------------------------------------------------------------

    def abort(self, job: Job) -> None:
        super().abort(job)
        self.running.is_full = False

    def stop(self, steps: int) -> list[Job]:
        waiting, running = self.waiting, self.running
        running.decoding.advance(steps)
        decoding = [job for group in running.groups for job in group.jobs]
        jobs = [*self.queue, *running.admitted, *decoding, *running.joining, *waiting.fetching]
        for job in jobs:
            self.drop(job, is_up=False)
        for job in self._computed:  # those dropped during a step that is now cut off
            running.release(job)
        self._flight.clear()
        running.clear()
        if self.adapters is not None:
            self.adapters.clear()
        return jobs

    def drop(self, job: Job, *, is_up: bool) -> None:
        job.times.waits_again(self.env.now)
        self.running.drop(job, keeps_pages=is_up and self._is_computed(job))
        self.waiting.drop(job)
        job.phase = LOST
