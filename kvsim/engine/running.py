"""The requests of one engine that have pages: who gets more, and who gives up all of them when there are too few."""

from math import isnan, nan
from typing import Any, Final

from kvsim.core.lease import RETRACTED, Lease
from kvsim.core.serving import Growth, ServedCache
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.claims import Claims
from kvsim.engine.decoding import Decoding
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import CLAIMING, ENDED, Job, longest_leap
from kvsim.engine.loading import Loading
from kvsim.engine.mover import Mover
from kvsim.engine.queue import WaitingQueue
from kvsim.engine.speculation import Answers, SpeculativeDecoding
from kvsim.engine.waiting import WaitingRequests

WAITS: Final = -1
"""Instead of a number of steps: time has to pass before it is known."""


class RunningRequests:
    """Requests that are admitted: they get their slots and their loads, are prefilled in chunks, and decode.

    When pages run out, a request is retracted: it waits again and recomputes what is not cached of its prompt and its answer so
    far.
    """

    frontend: Frontend

    def __init__(
        self,
        cache: ServedCache,
        gpu: Tier,
        mover: Mover,
        queue: WaitingQueue,
        waiting: WaitingRequests,
        loading: Loading,
        *,
        engine: int,
        steps_in_flight: int = 1,
        answers: Answers | None = None,
    ) -> None:
        self.env = mover.env
        self.cache = cache
        self.gpu = gpu
        self.mover = mover
        self.queue = queue
        self.waiting = waiting
        self.loading = loading
        self.engine = engine
        self.admitted: dict[Job, None] = {}
        """Those that wait for slots, loads or the rest of their prefill, in order of admission."""
        self._prefilling: list[Job] = []
        """Those among them that have their slots, in the same order."""
        self._turns = 0
        """Admissions so far."""
        self.claims = Claims(cache, mover)
        """Those among them whose slots are still being freed."""
        self.claims_since_s = nan
        self.claiming_s = 0.0
        """Time in which admitted requests waited for slots whose pages were being written down, until ``claims_since_s``."""
        self.answers = answers
        """How far steps go in answers, if these are decoded with drafts."""
        self.groups = [self._new_group() for _ in range(steps_in_flight)]
        """Those that decode, by the step in flight that they are in."""
        self.decoding = self.groups[0]
        """The group whose step is formed, or has just ended."""
        self.joining: list[Job] = []
        """Those computed elsewhere that decode here from the next step on."""
        self.held = 0
        """Those that hold pages here and neither compute nor decode: their prompts are on the way to or from another engine."""
        self.budget_tokens = 0
        """Tokens left in the step that is being planned."""
        self.is_full = False
        """Set by a retraction: no request is admitted until one has finished."""
        self.retractions = 0
        self._waits: Any = None
        """What ``make_room`` waits for."""
        self._due_late: list[tuple[Job, Lease, int]] = []
        """The pages that a leap under way needs if it is not stopped, where pages are taken late."""

    def _new_group(self) -> Decoding:
        cache = self.cache
        if self.answers is None:
            return Decoding(cache.page_tokens, cache.slides_at)
        return SpeculativeDecoding(cache.page_tokens, self.answers)

    def __len__(self) -> int:
        return len(self.admitted) + self.decoding_requests + len(self.joining) + self.held

    @property
    def decoding_requests(self) -> int:
        """The number of requests that decode, in all groups."""
        if len(self.groups) == 1:
            return len(self.decoding.jobs)
        return sum([len(group.jobs) for group in self.groups])

    def all_running(self) -> list[Job]:
        """Return all that are admitted or decode."""
        return [*self.admitted, *[job for group in self.groups for job in group.jobs]]

    @property
    def has_work(self) -> bool:
        """Whether any of them is to be computed here."""
        return bool(self.admitted or self.decoding_requests)

    def turn_to_idle_group(self) -> None:
        """Let the next step be that of a group of which none is under way, of one that has requests if there is any."""
        if len(self.groups) == 1:
            return
        idle = [group for group in self.groups if not group.is_flying]
        self.decoding = next((group for group in idle if group.jobs), idle[0])

    # --- admission ---------------------------------------------------------------------------------------------------

    def takes_more(self, max_requests: int) -> bool:
        """Whether one more request may be admitted to the step that is being planned."""
        if self.is_full or self.budget_tokens <= 0:
            return False
        return len(self.admitted) + self.decoding_requests < max_requests

    def admit(self, job: Job, lease: Lease) -> None:
        """Begin to run a request that the cache has admitted."""
        job.lease, job.phase, job.is_known = lease, CLAIMING, True
        job.admissions += 1
        self._turns += 1
        job.turn = self._turns
        self.admitted[job] = None
        if lease.waits:
            self.mover.submit(lease.waits)
        if lease.reserved_pages:
            self.claims.add(job, lease)
            self.mover.awaiting[self.gpu.owner] = None
            if isnan(self.claims_since_s):
                self.claims_since_s = self.env.now
            self.serve_claims()
        else:
            self._start(job, lease)

    def _start(self, job: Job, lease: Lease) -> None:
        """Start the loads of a request that has its slots; then its prompt is computed in turn."""
        self.loading.start(job, lease, self.frontend.book)
        place = len(self._prefilling)
        while place and self._prefilling[place - 1].turn > job.turn:
            place -= 1
        self._prefilling.insert(place, job)

    def _leave(self, job: Job) -> None:
        """Take a request out of those that are admitted."""
        del self.admitted[job]
        if job in self._prefilling:
            self._prefilling = [other for other in self._prefilling if other is not job]

    def prefilled(self, job: Job) -> None:
        """The prompt of a request has been computed."""
        del self.admitted[job]
        self._prefilling.remove(job)

    def serve_claims(self) -> bool:
        """Give admitted requests their reserved slots, in order, as far as these are free. Returns whether any got theirs."""
        served, now = False, self.env.now
        while (settled := self.claims.settle(now)) is not None:
            job, lease, is_lost = settled
            if is_lost:
                self._give_up(job)
            else:
                self._start(job, lease)
                served = True
        if not len(self.claims) and not isnan(self.claims_since_s):
            self.claiming_s += now - self.claims_since_s
            self.claims_since_s = nan
        return served

    # --- prefill -----------------------------------------------------------------------------------------------------

    def plan_prefill(self, batch: list[tuple[Job, int]], max_tokens: int, now: float) -> None:
        """Add the chunks of admitted requests to the next step, as (job, tokens), in order of admission."""
        self.budget_tokens = max_tokens - self.decoding.tokens_per_request * len(self.decoding.jobs)
        for job in self._prefilling:  # if one is retracted, the next step has another list
            if self.budget_tokens <= 0:
                break
            if job.lease is not None:
                self.plan_chunk(job, batch, now)

    def plan_chunk(self, job: Job, batch: list[tuple[Job, int]], now: float) -> None:
        """Add the next chunk of a request that has its slots to the step, for which tokens are left, if it can be computed.

        It follows those that steps in flight compute. Retract the request if there are no pages for that.
        """
        lease = job.lease
        assert lease is not None
        if not self.loading.is_followed(job):
            job.times.is_refused(now)
            return
        job.times.has_loads(now)
        begin = job.computed + job.flying
        tokens = min(self.budget_tokens, job.target_tokens - begin)
        if tokens <= 0:
            return
        while not self.cache.begin_chunk(lease, begin + tokens, now):
            if not self._retract_for(job, batch):
                return
        batch.append((job, tokens))
        self.budget_tokens -= tokens

    def _retract_for(self, job: Job, batch: list[tuple[Job, int]]) -> bool:
        """Retract a running request because there is no room for a job's chunk. Returns False if that is not computed now.

        Which one is retracted is the policy's choice, if it makes one; otherwise it is the job. A request of which a step in
        flight computes tokens is not retracted.
        """
        victim, queue, decoding = job, self.queue, self.decoding.jobs
        if queue.ranks_retractions:
            victim = max([*decoding, *self._idle_admitted()], key=queue.retraction_key, default=job)
        if victim.flying:
            return False
        self.budget_tokens += sum([tokens for planned, tokens in batch if planned is victim])
        self.budget_tokens += self.decoding.tokens_per_request if victim in decoding else 0
        batch[:] = [chunk for chunk in batch if chunk[0] is not victim]
        self._retract(victim)
        return victim is not job

    # --- decode ------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Let requests decode whose prompts have come from other engines."""
        for job in self.joining:
            self.decoding.add(job)
        self.joining.clear()

    def slide(self, *, in_turn: bool = False) -> None:
        """Let the cache know which decoding requests leave pages behind their windows in the next step.

        ``in_turn``: in the order of the requests that take pages for it.
        """
        self.cache.slide(self.decoding.slides_due(1), in_turn=in_turn)

    def leap_steps(self) -> int:
        """Return the most decode steps that may follow each other without a look at the queue, 1 or more."""
        if self.is_full and not self.cache.pauses_after_retraction or len(self.groups) > 1:
            return 1
        steps = min(longest_leap(self.cache), self.decoding.steps_to_end())
        if self.cache.slides_at >= 0 and self.queue:  # what is left behind may make room for those that wait
            steps = min(steps, self.decoding.steps_to_slide())
        if self.cache.names_answers and self.queue and self.decoding.shared_answers:  # those that wait may find their pages
            steps = min(steps, self.decoding.steps_to_page())
        return steps

    def make_room(self, steps: int) -> int:
        """Take the pages that the next ``steps`` decode steps need, or those of fewer steps if there are too few.

        Returns the number of steps that have room; 0 if a request has been retracted or transfers have ended: then plan again.
        ``WAITS`` if time has to pass first: then ``wait_for_room`` tells it.
        """
        cache = self.cache
        while due := self.decoding.pages_due(steps):
            if steps > 1 and cache.takes_pages_late:
                if sum([pages for _, _, pages in due]) * cache.slots_per_page <= self.gpu.available_pages:
                    self._due_late = due
                    return steps
            else:
                if cache.slides_at >= 0:
                    self.slide(in_turn=True)
                growth = cache.grow([(lease, pages) for _, lease, pages in due], self.env.now)
                if growth.has_room:
                    if not self._note_pages(due, growth):
                        return steps
                    self._waits = self._claim_for(due, steps)
                    return WAITS
            if steps == 1:
                self._waits = self._make_room_one_by_one(due)
                return WAITS
            for job, _, _ in due:
                self.decoding.need_page(job)
            steps //= 2
        return steps

    def wait_for_room(self) -> Any:
        """Generate the events to wait for after ``make_room``, and return the number of steps that have room then, or 0."""
        return self._waits

    def _claim_for(self, due: list[tuple[Job, Lease, int]], steps: int) -> Any:
        return steps if (yield from self._claim_pages(due)) else 0

    def _make_room_one_by_one(self, due: list[tuple[Job, Lease, int]]) -> Any:
        """Give decoding requests their pages, oldest first, until one finds no room; then retract the youngest. Returns 0."""
        due.sort(key=lambda need: need[0].place)
        while due:
            job, lease, pages = due[0]
            if job.lease is not lease:  # aborted while another one waited for its pages
                due.pop(0)
                continue
            growth = self.cache.grow([(lease, pages)], self.env.now)
            if not growth.has_room:
                break
            served = [due.pop(0)]
            if self._note_pages(served, growth) and not (yield from self._claim_pages(served)):
                break
        for job, _, _ in due:
            self.decoding.need_page(job)
        if not growth.has_room:
            yield from self._retract_youngest()
        return 0

    def _note_pages(self, due: list[tuple[Job, Lease, int]], growth: Growth) -> bool:
        """Take note of the pages that decoding requests have been given. Returns whether any have to wait for the slots."""
        page_tokens = self.cache.page_tokens
        waits = False
        for job, lease, pages in due:
            job.next_page_step += pages * page_tokens
            self.decoding.need_page(job)
            if lease.reserved_pages:
                waits = True
        if growth.transfers:
            self.mover.submit(growth.transfers)
        return waits

    def _claim_pages(self, due: list[tuple[Job, Lease, int]]) -> Any:
        """Wait until decoding requests have the slots that they have been given. Returns False if those of one are lost."""
        has_all = True
        for job, lease, _ in due:
            while job.lease is lease and lease.reserved_pages:
                claim = self.cache.claim(lease, self.env.now)
                if claim.is_lost:
                    self._give_up(job)
                    has_all = False
                    break
                if claim.waits:
                    yield from self._wait_for(claim.waits)
        return has_all

    def advance(self, steps: int) -> None:
        """Record that decode steps have been made, and take the pages that they have needed where these are taken late."""
        due, self._due_late = self._due_late, []
        if self.cache.slides_at >= 0:
            for leaving, needs in self.decoding.in_turn(due, steps):
                self.cache.slide(leaving, in_turn=bool(needs))
                if needs:
                    self._grow_late(needs)
                    self.cache.slide([], in_turn=False)
        elif due:
            self._grow_late(self.decoding.pages_used(due, steps))
        self.decoding.advance(steps)
        if not self.cache.pauses_after_retraction:
            self.is_full = False

    def _grow_late(self, needs: list[tuple[Lease, int]]) -> None:
        growth = self.cache.grow(needs, self.env.now)
        assert growth.has_room and not growth.transfers, "a leap had no room for its pages"

    def tell_generated(self) -> None:
        """Tell the scheduling policy of what has been generated so far."""
        for group in self.groups:
            for job in group.jobs:
                self.queue.generated(job, job.generated + group.step - job.joined_step)

    def _wait_for(self, transfers: list[Transfer]) -> Any:
        """Submit transfers and wait for the end of the last one."""
        self.mover.submit(transfers)
        yield self.mover.end_of(transfers[-1])

    # --- the end -----------------------------------------------------------------------------------------------------

    def _retract_youngest(self) -> Any:
        """Retract the request that arrived last, or that the policy names, and admit none until one has finished.

        Pages that are kept for the end of tool calls go first. If only one request runs and transfers are in flight, wait for the
        oldest of them instead: it may free the pages.
        """
        if self.loading.gives_way():
            return
        running = [*self.decoding.jobs, *self._idle_admitted()]
        jobs = [job for job in running if job.phase != CLAIMING and all(load.done for load in job.loads)]
        if len(jobs) == 1 and self.cache.in_flight:
            yield from self._wait_for(list(self.cache.in_flight)[:1])
            return
        queue = self.queue
        self._retract(max(jobs, key=queue.retraction_key if queue.ranks_retractions else lambda job: job.place))

    def _idle_admitted(self) -> list[Job]:
        """Return the admitted requests of which no step in flight computes tokens."""
        return [job for job in self.admitted if not job.flying]

    def _retract(self, job: Job) -> None:
        """Let a running request wait again, and admit none before a step has ended or a request has finished."""
        self.retractions += 1
        self.frontend.book.retracted(job.request)
        self.is_full = True
        self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """Give back a request's slots and pages, and put it back into the queue."""
        assert job.lease is not None
        is_decoding = job in self.decoding.jobs
        tokens = job.cached_tokens(self.decoding.step) if is_decoding else job.computed
        self.cache.release(job.lease, RETRACTED, self.env.now, tokens)
        job.times.waits_again(self.env.now)
        if job.phase == CLAIMING:
            job.admissions -= 1
        job.was_running = job.admissions > 0
        job.lease, job.loads, job.ready_loads = None, [], 0
        if is_decoding:
            self.decoding.remove(job)
        else:
            self._leave(job)
        self.queue.generated(job, job.generated)
        self.queue.computed(job)
        if self.frontend.retracted(job, self.engine):
            self.waiting.push(job)

    def finish(self, job: Job) -> None:
        """Let go of a request whose answer is complete."""
        assert job.lease is not None
        self.mover.submit(self.cache.finish(job.lease, self.env.now))
        job.lease, job.phase = None, ENDED
        self.is_full = False

    def drop(self, job: Job, *, keeps_pages: bool) -> None:
        """Take out a request wherever it is, if it runs; with ``keeps_pages``, ``release`` gives back its pages later."""
        for group in [group for group in self.groups if job in group.jobs]:
            group.remove(job)
            self._due_late = [due for due in self._due_late if due[0] is not job]
        if job in self.admitted:
            self._leave(job)
        if job in self.joining:
            self.joining.remove(job)
        self.queue.generated(job, job.generated)
        self.queue.computed(job)
        if not keeps_pages:
            self.release(job)

    def release(self, job: Job) -> None:
        """Give back the pages of a request that was dropped, if it has any."""
        if job.lease is not None:
            self.cache.release(job.lease)
            job.lease = None

    def clear(self) -> None:
        """Forget what is left of requests when all have been dropped."""
        self.is_full = False
        self.claims.clear()
        self.claims_since_s = nan
        for group in self.groups:
            group.clear()
            group.is_flying = False
        self._due_late = []
