"""vLLM's scheduler V1, pass by pass: ``v1/core/sched/scheduler.py``, ``async_scheduler.py`` and ``v1/engine/core.py``."""

from typing import Any, Final, cast

from simpy import Event

from kvsim.core.lease import LOST, RETRACTED
from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import DECODING, ENDED, PREFILLING, Job
from kvsim.engine.job import LOST as GIVEN_UP
from kvsim.engine.schedule import Parts, Schedule, Step
from kvsim.engine.substrate import Work
from kvsim.engine.waiting import WaitingRequests
from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.late_blocks import LateBlocks
from kvsim.engines.vllm.leaps import Leaps
from kvsim.engines.vllm.line import ArrivalLine, Turns
from kvsim.engines.vllm.offloads import Offloads
from kvsim.engines.vllm.running import RunningRequests
from kvsim.engines.vllm.served import BlockStep, Forming, Served
from kvsim.engines.vllm.stepped import SteppedCache

NO_PATH: list[Node] = []
POLL_S: Final = 0.001
"""Seconds between a pass that computes nothing and the next one (``_process_engine_step``)."""
MOST_IDLE_POLLS: Final = 3
"""Passes in a row with nothing under way after which the next one would decide the same."""


class BlockSchedule(Schedule):
    """Every pass serves the running requests, in order of admission, then admits others.

    a pass      running requests get their next tokens and the blocks for them. Without room, the last one is preempted. Then,
                unless one was preempted, those whose loads have ended are admitted, then others, in order, until one does not fit
    empty pass  if work is left, the next one follows after ``POLL_S``: so an engine that waits for copies polls. Polls that would
                find nothing new are left out
    look ahead  with the overlap loop, a pass takes place while the step before it runs (``AsyncScheduler``): a token in flight
                counts, and a request whose last token is in flight is passed over
    in flight   with CPU offloading, a request whose step runs is not preempted or, in 0.25, keeps its blocks until that ends.
                Without, its token still counts
    leap        decode steps are taken in one event where the passes between them would change nothing (``Leaps``)
    """

    def __init__(self, parts: Parts, offloads: Offloads, *, looks_ahead: bool) -> None:
        self.looks_ahead = looks_ahead
        self.is_draining = False
        self.cache = cast(SteppedCache, parts.cache)
        self.page_tokens = self.cache.page_tokens
        self.gpu = parts.gpu
        self.number = parts.number
        self.mover = parts.mover
        self.env = parts.mover.env
        self.prefetching = parts.prefetching
        self.max_batch_tokens = parts.max_batch_tokens
        self.max_running_requests = parts.max_running_requests
        self.queue = ArrivalLine()
        self.waiting = WaitingRequests(self.cache, parts.gpu, parts.mover, parts.prefetching, self.queue, parts.wake)
        self.offloads = offloads
        self._turns = Turns(self.queue, passed_go_first=offloads.passed_go_first)
        self._woken = parts.woken
        self.running = RunningRequests(self.page_tokens)
        self.loading: list[Served] = []
        """Those that wait for their loads, or for their first step after these."""
        self._served: dict[Job, Served] = {}
        self._retractions = 0
        self._has_finished = False
        """Whether a request has finished since the last pass."""
        self._has_reported = False
        """Whether the end of a copy has taken effect since the last pass."""
        self._was_empty = False
        """Whether the last pass computed nothing."""
        self._idle_polls = 0
        """Polls in a row with nothing under way."""
        self._late = LateBlocks(self.cache, are_late=offloads.frees_late)
        self._forming = Forming(Work())
        """The step of the pass."""
        self._budget = 0
        self._preempted: list[Served] = []
        self._leaving: list[Served] = []
        """Those that the last pass has passed over, since their last tokens are in flight."""
        self._stuck: Job | None = None
        """The first request of the queue, if it found no room in the last pass."""
        self._leaps = Leaps(self.cache, parts.gpu, offloads, self.running, looks_ahead=looks_ahead)

    def report_to(self, frontend: Frontend) -> None:
        self.frontend = frontend

    def __len__(self) -> int:
        return len(self.running) + len(self.loading)

    @property
    def retractions(self) -> int:
        return self._retractions

    @property
    def admitted(self) -> int:
        return len(self)

    def generated(self, job: Job) -> int:
        return self.running.generated(job)

    def takes(self, request: Request) -> bool:
        return request.pages_in_all(self.page_tokens) <= self.gpu.pool.capacity

    def join(self, job: Job) -> None:
        raise AssertionError("vLLM's schedule takes no requests from other engines")

    def transfer_ended(self, transfer: Transfer) -> bool:
        return self._leaps.current is not None or not self.running.all

    @property
    def blocked(self) -> str:
        if self._idle_polls <= MOST_IDLE_POLLS or not self.loading:
            return ""
        return (
            f"tiers.gpu.capacity: {len(self.loading)} requests have loaded and wait for good behind one for which they leave no "
            "room, as in this version of vLLM; increase it"
        )

    # --- a pass --------------------------------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return bool(self.running.all or self.loading or self._has_finished or len(self.queue) or self.offloads.copies)

    @property
    def _is_busy(self) -> bool:
        """Whether a reset has to wait."""
        flies = any(not step.is_empty for step in self.running.flight)
        return bool(len(self) or self._has_finished or flies or self.offloads.copies)

    def form(self) -> Any:
        if self._was_empty and self._has_work:
            yield from self._poll()
        elif self.env.peek() <= self.env.now:
            yield self.env.timeout(0.0)  # requests that arrive at the same moment are seen
        self._was_empty = False
        if self.is_draining and not self._is_busy:
            self.frontend.drained()
        if not self._has_work:
            return None
        step = self._pass()
        self._has_finished = self._has_reported = False
        for copy in self.offloads.launch(step.chunks, self._preempted):
            if not copy.transfer.done:
                yield self.mover.end_of(copy.transfer)
        step.reported = self.offloads.seen()
        self._was_empty = step.is_empty
        self._leap(step)
        return step

    def _poll(self) -> Any:
        """Wait for the next poll or, if only the end of a copy or an arrival changes anything, for the first one after that.
        What the last pass has heard of, or has preempted, changes what the next one does. If nothing is under way at all, passes
        soon repeat themselves: vLLM 0.25.1 can block itself for good, when requests that have loaded stand behind one for which
        they leave no room."""
        at_s = self.env.now + POLL_S
        has_news = self._has_finished or self._has_reported or self._preempted
        self._idle_polls = 0 if self.running.all or has_news or self.offloads.copies else self._idle_polls + 1
        may_change = self.running.all or has_news or self._hears_look_ups or any(one.is_loaded for one in self.loading)
        if self._idle_polls > MOST_IDLE_POLLS or not may_change and self.offloads.only_waits:
            yield self._woken()
            while at_s < self.env.now:
                at_s += POLL_S
        yield self.env.timeout(at_s - self.env.now)

    def _pass(self) -> BlockStep:
        self._preempted, self._leaving = [], []
        self._forming, self._stuck = Forming(Work(engine=self.number)), None
        self.offloads.begin_pass()
        self.running.wake_due(1)
        if self.running.is_scarce(self.max_batch_tokens):
            self.running.wake_all()
        self._budget = self.max_batch_tokens - len(self.running.steady)
        self._serve_running()
        if not self._preempted and not self.is_draining:
            self._admit()
        return self.running.form(self._forming.step(self.running.steady, self.running.steady_context_tokens))

    def _serve_running(self) -> None:
        """Serve the running requests, in order, until the step is full or one does not fit."""
        running = self.running
        turns, steady = running.turns()
        self.cache.pool.make_room(steady)  # at once or, if there is too little, one after another
        for served in turns:
            if self._budget <= 0:
                return
            if served in self._preempted:
                continue
            if served.wake and self.cache.reserve(served.lease, running.computed(served) + 1):
                running.need_block(served)
            elif served.is_last_out:
                self._leaving.append(served)
            elif not self._serve(served):
                self._wake(running.later(served))
                return

    def _wake(self, some: list[Served]) -> None:
        """Let a pass serve requests that were steady when it began."""
        self.running.wake(some)
        self._budget += len(some)

    def _serve(self, served: Served) -> bool:
        """Give a running request its next tokens. Returns False if no more running requests are served."""
        if served.wake:
            self._wake([served])
        job, lease = served.job, served.lease
        tokens = min(served.wanted_tokens, self._budget)
        upto = job.computed + tokens
        while upto > lease.held_pages * self.page_tokens and not self.cache.reserve(lease, upto):
            last = self.running.all[-1]
            if last.wake:
                self._wake([last])
            if self.offloads.keeps_in_flight and last.steps_out:
                return False
            self._preempt(last)
            if last is served:
                return False
        self._plan(served, lease, tokens)
        return True

    def _plan(self, served: Served, lease: BlockLease, tokens: int) -> None:
        """Add tokens to the step; the request has the blocks for them. Full blocks of known tokens get their names."""
        job, known = served.job, served.job.target_tokens
        upto = job.computed + tokens
        if lease.rest:
            self.cache.name(lease, min(upto, known))
        samples = upto == known + served.flying
        self._budget -= tokens
        self._forming.add(served, tokens, samples=samples)
        job.computed = upto
        served.steps_out += 1
        if samples:
            served.flying += 1
            job.phase = DECODING

    def _preempt(self, served: Served) -> None:
        """Give back the blocks of the last running request, and put it at the head of the queue."""
        job = served.job
        self.running.remove(served)
        self._preempted.append(served)
        self._retractions += 1
        self.frontend.book.retracted(job.request)
        self._late.give_back(served, RETRACTED, self.env.now)
        job.times.waits_again(self.env.now)
        job.lease, job.computed, job.was_running = None, 0, True
        self.waiting.push(job)

    # --- admission -----------------------------------------------------------------------------------------------------------

    @property
    def _takes_more(self) -> bool:
        return self._budget > 0 and len(self.running) < self.max_running_requests

    def _admit(self) -> None:
        """Admit until the step or the seats are full, or a request does not fit. Some are passed over."""
        self._turns.begin()
        while self._takes_more:
            job = self._turns.next()
            if job is None or not self._try(job):
                return

    def _try(self, job: Job) -> bool:
        """Try to admit a request. Returns False if it does not fit."""
        served = self._served.get(job) or self._served.setdefault(job, Served(job))
        return self._admit_loaded(served) if served in self.loading else self._look_up(served)

    def _admit_loaded(self, served: Served) -> bool:
        """Admit a request if its load has ended, whose blocks then get names. Returns False if the rest of it does not fit."""
        job, lease = served.job, served.lease
        if not served.is_loaded:
            self._turns.passes(job, is_loading=True)
            return True
        self.cache.name(lease, job.computed)
        job.computed = min(job.computed, job.target_tokens - 1)
        if not self.cache.pool.has_room(NO_PATH, self._pages(job) - lease.held_pages):
            return False
        self.loading.remove(served)
        self._turns.leave(job)
        job.times.has_loads(self.env.now)
        self._begin(served)
        return True

    def _look_up(self, served: Served) -> bool:
        """Look up a waiting request and admit it, or begin its load. Returns False if it does not fit."""
        job = served.job
        lease = self.cache.match(job.request, self.gpu, job.why, job.target_tokens)
        loadable = None if served.flying else self.offloads.loadable(served, lease)
        if loadable is None:
            self._turns.passes(job, is_loading=False)
            return True
        found = lease.gpu_pages + loadable.pages
        pages, has_room = self._pages(job), self.cache.pool.has_room
        may_load = not loadable.pages or has_room(lease.path, found + self.running.promised(self.loading))
        if not may_load or not self.cache.admit(lease, pages, self.env.now, loadable.pages):
            lacks_room = may_load or not has_room(lease.path, pages)
            self._stuck = job if lacks_room and not self._turns.has_passed else None
            return False
        self.waiting.leave_queue(job)
        self._turns.leave(job)
        job.lease, job.phase, job.is_known = lease, PREFILLING, True
        served.lease = cast(BlockLease, lease)
        job.admissions += 1
        job.computed = found * self.page_tokens
        job.times.has_pages(self.env.now)
        served.is_partial, served.is_loaded = False, False
        served.offered_tokens = self.offloads.first_offer_tokens
        self.offloads.admitted(served)
        if loadable.pages:
            self.offloads.begin_load(served, loadable)
            self.loading.append(served)
            self._turns.passes(job, is_loading=True)
            job.times.is_refused(self.env.now)
        if not job.is_counted or job.counted is not None and self.cache.counts_last_admission and not job.is_prefilled:
            job.is_counted, job.counted = True, lease
            self.frontend.book.hit(job.request, self.prefetching.hits(lease, None), self.number)
        if not loadable.pages:
            self._begin(served)
        return True

    def _begin(self, served: Served) -> None:
        """Let an admitted request compute; the caller has found room for all its tokens."""
        job, lease = served.job, served.lease
        self.running.admit(served)
        tokens = min(job.target_tokens - job.computed, self._budget)
        has_room = self.cache.reserve(lease, job.computed + tokens)
        assert has_room, "a request was admitted without room"
        self._plan(served, lease, tokens)

    def _pages(self, job: Job) -> int:
        """Return the pages of a request's known tokens."""
        return -(-job.target_tokens // self.page_tokens)

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _leap(self, step: BlockStep) -> None:
        """Make a leap of a step if the next passes would form it again."""
        decoding = step.work.decode_requests
        if self._leaps.current is not None or self._preempted or step.work.chunks or not decoding or self._hears_look_ups:
            return
        if decoding + len(self._leaving) == len(self.running):
            has_waiting = bool(self.loading or len(self.queue))
            self._leaps.begin(step, self._leaving, has_waiting=has_waiting, is_settled=self._is_settled)

    @property
    def _hears_look_ups(self) -> bool:
        """Whether passes look up waiting requests, and each look-up changes something."""
        return self.offloads.hears_look_ups and len(self.queue) > 0 and self._takes_more and not self.is_draining

    @property
    def _is_settled(self) -> bool:
        """Whether the next pass does the same with waiting requests even if stores end or pages leave the GPU."""
        if not self._takes_more or self.is_draining:
            return True
        is_stuck = self._stuck is not None and not self.offloads.moves(self._stuck.request)
        return (is_stuck or not len(self.queue)) and not any(served.is_loaded for served in self.loading)

    def began(self, step: Step, done: Event) -> None:
        step.work.has_copies = self.mover.begins_copies(self.gpu.owner)
        self.offloads.began(done)

    def ended(self, step: Step, steps: int) -> None:
        done = cast(BlockStep, step)
        self._leaps.end(done, steps)
        if not done.is_empty:
            self._late.step_ended(self.env.now)
        for chunk in done.chunks:
            served = chunk.served
            if not served.wake:
                served.steps_out -= 1
                if chunk.samples and served.job in self._served:
                    self._appear(served)
        self.running.ended()
        self.offloads.report(done.reported)
        self._has_reported = self._has_reported or bool(done.reported)

    def _appear(self, served: Served) -> None:
        """Record the next token of an answer. A request that was preempted meanwhile gets its token, too."""
        job = served.job
        served.flying -= 1
        if not job.is_prefilled:
            job.is_prefilled = True
            if not job.generated:
                job.times.first_token_s = self.env.now
                if not job.request.sample:
                    self.frontend.book.waited(job)
            self.frontend.first_token(job, self.number)
        job.generated += 1
        if job.lease is not None and job.lease.rest:
            self.cache.name(served.lease, job.computed - served.flying)
        if job.generated >= job.request.output_tokens:
            self._finish(served)

    def _finish(self, served: Served) -> None:
        job, now = served.job, self.env.now
        self.offloads.finishes(served)
        if job.lease is not None:
            self.cache.finish(served.lease, now)
            self.running.remove(served)
        else:
            self.waiting.leave_queue(job)
        self._turns.leave(job)
        job.lease, job.phase = None, ENDED
        del self._served[job]
        self._has_finished = True
        self.frontend.book.finished(job, self.number, now)
        self.frontend.ended(job.request, self.number)

    # --- failure -------------------------------------------------------------------------------------------------------------

    def stop(self, steps: int) -> list[Job]:
        self.running.wake_all()
        self._leaps.stop(steps)
        jobs = [*self.queue, *[served.job for served in (*self.running.all, *self.loading)], *self.waiting.fetching]
        for job in jobs:
            self.drop(job, is_up=False)
        self._late.step_ended(self.env.now)
        self.offloads.stop()
        self.running.clear()
        self._was_empty = self._has_finished = False
        return jobs

    def drop(self, job: Job, *, is_up: bool) -> None:
        """On an engine that is up, as ``finish_requests``: blocks are free at once, with their names, or when their load ends."""
        job.times.waits_again(self.env.now)
        served = self._served.pop(job, None)
        keeps_blocks = served is not None and is_up and self.offloads.drops(served)
        if served is not None and job.lease is not None:
            (self.loading if served in self.loading else self.running).remove(served)
            if not keeps_blocks:
                self._late.give_back(served, LOST, self.env.now)
            job.lease = None
        self.waiting.drop(job)
        self._turns.leave(job)
        job.phase, self._stuck, self._has_finished = ENDED if is_up else GIVEN_UP, None, is_up
