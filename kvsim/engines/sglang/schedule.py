"""SGLang's scheduler, pass by pass: managers/scheduler.py, schedule_policy.py and schedule_batch.py."""

from typing import Any, cast

from simpy import Event

from kvsim.core.lease import LOST, RETRACTED
from kvsim.core.request import Request
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import ENDED, PREFILLING, Job
from kvsim.engine.job import LOST as GIVEN_UP
from kvsim.engine.schedule import Parts, Schedule, Step
from kvsim.engine.waiting import WaitingRequests
from kvsim.engines.sglang.budget import MOST_PROMISED, RETRACT_STEPS, DeclaredAnswers, PassBudget, PassSettings, TokenRatio
from kvsim.engines.sglang.queue import NodeQueue
from kvsim.engines.sglang.running import RunningBatch
from kvsim.engines.sglang.stepped import NodesLease, SteppedNodes
from kvsim.engines.sglang.steps import Answer, Chunk, NodeStep, jobs_in


class NodeSchedule(Schedule):
    """Prefill first: a pass forms a step of prompts if it can, and otherwise one in which all running requests decode.

    a pass      the chunk of the last one enters the tree; its prompts join the running requests; the finished leave; the
                chunked request goes on; waiting requests are tried in order, until one does not fit
    memory      what running requests have declared counts in part (``TokenRatio``); who is admitted needs room for all of it
    retraction  if a decode step finds no memory, the request with the shortest answer so far goes to the end of the queue
    look ahead  with the overlap loop, a pass takes place while the step before it runs, and counts answers one token short. A
                request whose last token is being computed does not decode again
    a leap      a decode step is repeated as long as the passes between would form it again. A request that arrives ends the leap
    """

    def __init__(self, parts: Parts, settings: PassSettings) -> None:
        cache = cast(SteppedNodes, parts.cache)
        self.settings = settings
        self.looks_ahead = settings.looks_ahead
        self.is_draining = False
        self.cache = cache
        self.page_tokens = cache.page_tokens
        self.pool = parts.gpu.pool
        self.gpu = parts.gpu
        self.number = parts.number
        self.env = parts.mover.env
        self.max_running_requests = parts.max_running_requests
        self.queue = NodeQueue(parts.scheduling, cache)
        self.waiting = WaitingRequests(cache, parts.gpu, parts.mover, parts.prefetching, self.queue, parts.wake)
        self.declared = DeclaredAnswers(settings.declared_tokens, self.pool.capacity * self.page_tokens, self.page_tokens)
        self.copies = cache.copies(parts, self.queue)
        self.prefetching = parts.prefetching
        self.ratio = TokenRatio(settings.conservativeness)
        self.running = RunningBatch(cache, looks_ahead=settings.looks_ahead)
        self.chunked: Job | None = None
        """The one whose prompt is computed in several steps."""
        self._last: NodeStep | None = None
        """The step formed by the last pass, if it formed one."""
        self._before: NodeStep | None = None
        """The step that is computed, if another one has been formed meanwhile."""
        self._under_way: NodeStep | None = None
        """The step that runs, or has been formed and will run next."""
        self._leap: NodeStep | None = None
        """The leap that runs, or has been formed and will run next."""
        self._has_ended = False
        """Whether a request has ended since the last pass."""
        self._aborted: set[Job] = set()
        """Those with pages that are about to end."""
        self._retractions = 0
        self._decode_steps = 0
        """Those formed, as far as they are certain to be made."""

    def report_to(self, frontend: Frontend) -> None:
        self.frontend = frontend

    def __len__(self) -> int:
        return len(self.cache.leases)

    @property
    def retractions(self) -> int:
        return self._retractions

    @property
    def admitted(self) -> int:
        return len(self.cache.leases)

    def join(self, job: Job) -> None:
        raise AssertionError("SGLang's schedule takes no requests from other engines")

    def transfer_ended(self, transfer: Transfer) -> bool:
        return self.copies.is_awaited(transfer)

    def takes(self, request: Request) -> bool:
        return self.declared.takes(request)

    # --- a pass --------------------------------------------------------------------------------------------------------------

    def form(self) -> Any:
        step = self._form()
        is_idle = self._under_way is None
        yield from self.copies.carry_out(is_idle=is_idle)  # otherwise, a pass takes no time
        if step is not None:
            self.copies.mark(step.work)
        return step

    def began(self, step: Step, done: Event) -> None:
        self.copies.began(done)

    def _form(self) -> NodeStep | None:
        self.copies.begin_pass(self.queue.take_new(), is_computing=self._under_way is not None)
        self._gather()
        step = self._form_prefill() or self._form_decode()
        if step is None and self._under_way is None and not self.running:
            step = self._rest()
        self._last = step
        if step is not None:
            self._before, self._under_way = self._under_way, step
        return step

    def _rest(self) -> NodeStep | None:
        """Nothing runs: end a reset that has waited for that. Returns the first step after it, if a request waits."""
        if self.is_draining:
            self.frontend.drained()
        if len(self.queue):
            return None if self.copies.has_work else self._form_prefill()
        self.ratio.reset()
        return None

    def _gather(self) -> None:
        """Enter the last chunk into the tree, let the prompts of the last step join, and the finished requests leave."""
        if self.chunked is not None:
            lease = cast(NodesLease, self.chunked.lease)
            self.cache.store(lease, lease.filled, self.env.now)
            if self.chunked in self._aborted:
                job, self.chunked = self.chunked, None
                super().abort(job)
        if self._last is not None and self._last.chunks:
            self.running.join(self._last)
        if not self.cache.differs.leaves_late:
            self._leave_ended()
        if not self.running:
            self.running.is_full = False

    def _leave_ended(self) -> None:
        if self._has_ended:
            self._has_ended = False
            self.running.leave_ended()

    @property
    def _available(self) -> int:
        """Tokens of memory that are free or can be evicted."""
        return (self.pool.free + self.gpu.evictable_pages) * self.page_tokens

    def _is_crowded(self, planned: int) -> bool:
        """Whether as many requests as may run do, ``planned`` of them from this pass, or hold memory."""
        most = self.max_running_requests
        return len(self.running) + planned >= most or len(self.cache.leases) >= most

    # --- prompts -------------------------------------------------------------------------------------------------------------

    def _form_prefill(self) -> NodeStep | None:
        waits = len(self.queue) > 0 and not self.is_draining
        if self.chunked is None:
            if self.running.is_full or not waits:
                return None
            if self._is_crowded(0):
                self.running.is_full = True
                return None
        if waits:
            self.queue.order()
        left = [lease.declared - job.generated for job, lease in self.running.answers]
        budget = PassBudget(self.settings, self.page_tokens, self.ratio.value, left)
        chunks: list[Chunk] = []
        if self.chunked is not None:
            self._continue_chunked(self.chunked, budget, chunks)
        if waits:
            self._admit(budget, chunks)
        if not chunks:
            return None
        loads = self.copies.loads()
        self.cache.take_chunks([(chunk.lease, chunk.end) for chunk in chunks])
        for chunk in chunks:
            chunk.job.computed = chunk.begin
            chunk.lease.flying += chunk.is_last
        return self._step(chunks, self._mix() if self.settings.mixed_chunk else [], loads)

    def _continue_chunked(self, job: Job, budget: PassBudget, chunks: list[Chunk]) -> None:
        """Plan the next chunk of the prompt that is computed in several steps."""
        lease, most = cast(NodesLease, job.lease), budget.chunk
        assert most is not None
        room = int(self._available - budget.promised)
        if room > 0:
            most = min(most, room)
        if most > 0:
            self._plan(job, lease, min(job.target_tokens, lease.filled + most), budget, chunks)

    def _plan(self, job: Job, lease: NodesLease, end: int, budget: PassBudget, chunks: list[Chunk]) -> None:
        is_last = end == job.target_tokens
        chunks.append(Chunk(job, lease, lease.filled, end, is_last=is_last))
        budget.charge(end - lease.filled, lease.declared if is_last else 0)
        lease.filled = end
        if not is_last:
            self.chunked = job
        elif self.chunked is job:
            self.chunked = None

    def _admit(self, budget: PassBudget, chunks: list[Chunk]) -> None:
        """Try waiting requests in their order until one is not admitted. Those that wait for storage are passed over."""
        cache, checks = self.cache, self.cache.differs.checks_budget_first
        for job in self.queue:
            if checks and budget.is_spent and self._available - budget.promised > 0:
                break
            checks = True
            if self.running.is_full or self._is_crowded(len(chunks)):
                self.running.is_full = True
                break
            if not self.copies.is_ready(job):
                continue
            lease = cast(NodesLease, cache.match(job.request, self.gpu, job.why, job.target_tokens))
            if self.copies.has_lost(job, lease.gpu_pages + lease.leading_pages):
                cache.refuse(lease)
                continue
            page_tokens = self.page_tokens
            found, loose = lease.gpu_pages * page_tokens, cache.loose_pages(lease) * page_tokens
            answer = min(max(self.declared.of(job.request) - job.generated, 0), MOST_PROMISED)
            if job.target_tokens - found + answer + page_tokens >= self._available - loose - budget.promised:
                self.running.is_full = bool(chunks or self.running)
                cache.refuse(lease)
                break
            found += lease.lower_pages * page_tokens
            end = budget.cut(found, job.target_tokens, is_first=not chunks)
            if end <= found:
                cache.refuse(lease)
                break
            self._begin(job, lease)
            if lease.filled < found:  # what the host has was not loaded
                end = budget.cut(lease.filled, job.target_tokens, is_first=not chunks)
            self._plan(job, lease, end, budget, chunks)
            if self._available - budget.promised <= 0:
                self.running.is_full = bool(chunks or self.running)
                break

    def _begin(self, job: Job, lease: NodesLease) -> None:
        """Admit a request."""
        self.waiting.leave_queue(job)
        self.cache.admit(lease, job.request.pages_for(job.target_tokens, self.page_tokens), self.env.now)
        self.copies.admitted(job, lease)
        lease.declared = self.declared.of(job.request)
        job.lease, job.phase, job.is_known = lease, PREFILLING, True
        job.admissions += 1
        job.times.has_pages(self.env.now)
        if not job.is_counted:
            job.is_counted, job.counted = True, lease
            self.frontend.book.hit(job.request, self.prefetching.hits(lease, None), self.number)

    # --- answers -------------------------------------------------------------------------------------------------------------

    def _mix(self) -> list[Answer]:
        """Let the running requests decode beside prompts, if there is room for all of them."""
        self._leave_ended()
        self.running.leave_before_last()
        if not self.running or not self.running.has_room(self.running.answers):
            return []
        taken = self.running.take_tokens()
        self.running.replace([])
        return taken

    def _form_decode(self) -> NodeStep | None:
        self._leave_ended()
        has_left = self.running.leave_before_last()
        if not self.running:
            return None
        if self.running.has_room(self.running.answers):
            self.ratio.decay()
        elif has_left or not self._retract():
            return None
        step = self._step([], self.running.take_tokens())
        if self._leap is None and not self._may_admit and not self.copies.is_moving:
            self._extend(step)
        return step

    @property
    def _may_admit(self) -> bool:
        """Whether the next pass may form a step of prompts, although nothing happens until then."""
        return self.chunked is not None or not (self.running.is_full or self.is_draining) and len(self.queue) > 0

    def _extend(self, step: NodeStep) -> None:
        """Make a leap of a step that the next passes are certain to form again, if nobody arrives.

        Ahead of results, the last of these steps is formed when the leap has begun, as its second one.
        """
        steps = min(self.running.repetitions(), self.copies.quiet_passes) + (0 if self.looks_ahead else 1)
        if steps > 1:
            step.work.max_steps = steps
            self._leap = step

    def _retract(self) -> bool:
        """Retract requests, first those with the shortest answers, of these the longest prompts, until the others have room.

        Returns False if the last one has none before copies have ended.
        """
        order = sorted(self.running.answers, key=lambda one: (one[0].generated, -one[0].request.prompt_tokens), reverse=True)
        is_first = True
        while len(order) > 1 and (is_first or not self.running.has_room(order)):
            is_first = False
            self._give_up(order.pop()[0])
            self.cache.make_room(-(-len(order) * RETRACT_STEPS // self.page_tokens))
        has_room = self.running.has_room(order)
        assert has_room or self.copies.is_moving, "a request does not fit although it is alone"
        self.running.replace(order)
        self.ratio.estimate([job.generated for job, _ in order], [lease.declared for _, lease in order])
        return has_room

    def _give_up(self, job: Job) -> None:
        """Give back a request's pages, and put it at the end of the queue."""
        self._retractions += 1
        self.frontend.book.retracted(job.request)
        self.cache.release(cast(NodesLease, job.lease), RETRACTED, self.env.now)
        job.times.waits_again(self.env.now)
        job.lease, job.was_running = None, True
        self.waiting.push(job)
        for new in self.queue.take_new():
            self.copies.waits(new)
        if job in self._aborted:
            self.abort(job)

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _step(self, chunks: list[Chunk], answers: list[Answer], loads: list[Transfer] = NO_TRANSFERS) -> NodeStep:
        step = NodeStep(chunks, answers, loads, decode_step=self._decode_steps, engine=self.number)
        self._decode_steps += bool(answers)
        return step

    def ended(self, step: Step, steps: int) -> None:
        done = cast(NodeStep, step)
        self.copies.step_ended()
        if self._before is done:
            self._before = None
        if self._under_way is done:
            self._under_way = None
        if self._leap is done:
            self._leap = None
        if steps > 1:
            self._repeat(done, steps - 1)
        for chunk in done.chunks:
            if chunk.is_last and chunk.job.lease is chunk.lease:
                self._book_prompt(chunk)
        for job, lease in done.answers:
            if job.lease is lease:
                lease.flying -= 1
                job.generated += steps
                if job.generated >= job.request.output_tokens or job in self._aborted:
                    self._finish(job, lease)
        if self._under_way is not None and self._has_ended:  # a step that was formed before they ended
            self._under_way.work.decoding = [job for job, lease in self._under_way.answers if job.lease is lease]
        self.copies.decided(is_computing=self._under_way is not None)
        if self._under_way is not None:
            self.copies.mark(self._under_way.work)

    def _repeat(self, leap: NodeStep, steps: int) -> None:
        """Record that a leap has repeated its step; the step formed meanwhile is made after that."""
        self.cache.hold([lease for job, lease in leap.answers if job.lease is lease], steps)
        self.ratio.decay(steps)
        self.copies.left_out(steps)
        self._decode_steps += steps
        if self._under_way is not None:
            self._under_way.comes_later(steps)

    def _book_prompt(self, chunk: Chunk) -> None:
        """Record the end of a prompt, with which the next token of its answer appears."""
        job, lease, now = chunk.job, chunk.lease, self.env.now
        lease.flying -= 1
        job.computed = chunk.end
        if not job.generated:
            job.times.first_token_s = now
            if not job.request.sample:
                self.frontend.book.waited(job)
        if not job.is_prefilled:
            job.is_prefilled = True
            self.frontend.first_token(job, self.number)
        job.generated += 1
        if job.generated >= job.request.output_tokens or job in self._aborted:
            self._finish(job, lease)
        else:
            self.cache.store(lease, chunk.end, now)

    def _finish(self, job: Job, lease: NodesLease) -> None:
        now = self.env.now
        if job in self._aborted:
            self._aborted.discard(job)
            job.request.output_tokens = min(job.generated, job.request.output_tokens)
        self.cache.finish(lease, now)
        job.lease, job.phase = None, ENDED
        self._has_ended = True
        self.frontend.book.finished(job, self.number, now)
        self.frontend.ended(job.request, self.number)

    # --- failure -------------------------------------------------------------------------------------------------------------

    def stop(self, steps: int) -> list[Job]:
        if self._leap is not None:
            for job, _ in self._leap.answers:
                job.generated += steps
        with_pages = jobs_in(self.running.answers, self.chunked, (self._before, self._last, self._under_way))
        jobs = [*self.queue, *with_pages, *self.waiting.fetching]
        for job in jobs:
            self.drop(job, is_up=False)
        self.running.replace([])
        self.chunked = None
        self._last = self._before = self._under_way = self._leap = None
        self.copies.stop()
        self.ratio.reset()
        return jobs

    def abort(self, job: Job) -> None:
        """As ``abort_request``: who waits leaves at once; who runs ends with its next token, which enters the tree as any."""
        if job.lease is None:
            super().abort(job)
        else:
            self._aborted.add(job)

    def drop(self, job: Job, *, is_up: bool) -> None:
        self._aborted.discard(job)
        job.times.waits_again(self.env.now)
        self.waiting.drop(job)
        self.copies.dropped(job)
        if job.lease is not None:
            self.cache.release(cast(NodesLease, job.lease), LOST, self.env.now)
            job.lease = None
        job.phase = GIVEN_UP
