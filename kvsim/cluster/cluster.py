"""One or more engines on one clock: requests arrive, a router chooses an engine, engines fail and come back."""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from time import perf_counter
from typing import Any, cast

from simpy import Event

from kvsim.cluster.calls import CallsUnderWay
from kvsim.cluster.failure import Failure
from kvsim.cluster.followers import Followers
from kvsim.cluster.gate import Gate
from kvsim.cluster.hand_over import HandOver
from kvsim.cluster.homeless import Homeless
from kvsim.cluster.landings import Landings
from kvsim.cluster.resets import Resets
from kvsim.cluster.router import Router, report_of
from kvsim.cluster.scaler import Scaler
from kvsim.cluster.totals import outcome_of
from kvsim.core.fan_out import TOGETHER, FanOut
from kvsim.core.request import Request, Reset
from kvsim.core.serving import RulesError, ServedCache
from kvsim.core.subclassing import mypyc_attr
from kvsim.engine.arrivals import due_in_order
from kvsim.engine.book import Book
from kvsim.engine.collector import without_garbage_collector
from kvsim.engine.engine import Engine
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import Job
from kvsim.engine.layout import ONE_ENGINE, Layout
from kvsim.engine.outcome import FINISHED, SHED, Outcome


@mypyc_attr(allow_interpreted_subclasses=True)
class Cluster(Frontend):
    """Serves requests with all engines. One engine needs no router."""

    def __init__(
        self,
        engines: list[Engine],
        router: Router | None = None,
        *,
        hand_over: HandOver | None = None,
        failures: Sequence[Failure] = (),
        layout: Layout = ONE_ENGINE,
        samples: FanOut = TOGETHER,
        scaler: Scaler | None = None,
        gate: Gate | None = None,
    ) -> None:
        """``router`` knows the engines that compute prompts; with ``hand_over``, the others decode. ``samples`` says how several
        answers to a prompt begin. ``scaler`` starts and stops engines; without one, all serve. ``gate`` refuses requests; without
        one, none is refused."""
        self.engines = engines
        self.env = engines[0].env
        self.router = router
        self.hand_over = hand_over
        self.failures = failures
        self.layout = layout
        self.samples = samples
        self.scaler = scaler
        self.gate = gate
        self.caches: list[ServedCache] = list(dict.fromkeys([engine.cache for engine in engines]))
        self._resets = Resets(engines, self.caches, hand_over)
        self.calls = CallsUnderWay(engines) if any(engine.calls for engine in engines) else None
        self.is_done = False
        self._all_ended = self.env.event()
        self._followers = Followers([])
        self._samples_left: dict[int, int] = {}
        """Samples that have not ended, by request, of requests with several whose prompt has been computed, or that are apart."""
        self._apart: dict[int, Request] = {}
        """Requests that are several to their engine, until the first ones of these have ended."""
        self._sent: dict[int, int] = {}
        """The engine that the router has sent a request to, by the request's index, until the request has ended."""
        self._homeless = Homeless(self.env, router, self.engine_of, self._give)
        self._lost: set[int] = set()
        """Engines whose GPUs are lost for good."""
        self._advance: Callable[[int], None] | None = None
        self._own: Collection[int] | None = None
        """The indices of the requests that are served here; None: all."""
        for engine in engines:
            engine.report_to(self)
            own = self._router_of(engine.number)
            engine.reports = own is not None and own.policy.needs_reports
        if hand_over is not None:
            hand_over.resend, hand_over.on_sent_on = self.resend, self._sent_on

    def _router_of(self, engine: int) -> Router | None:
        """Return the router that knows an engine."""
        if self.hand_over is not None and engine in self.hand_over.receivers:
            return self.hand_over.router
        return self.router

    # --- a run -------------------------------------------------------------------------------------------------------

    def run(
        self, requests: Sequence[Request], advance: Callable[[int], None] | None = None, own: Collection[int] | None = None
    ) -> Outcome:
        """Serve all requests; ``advance`` is called with the number ended so far. Raises RuntimeError if some never end.

        With ``own``, only the requests with these indices are served, at the same times; the others are served elsewhere.
        """
        began = perf_counter()
        self._advance, self._own = advance, own
        self.start(requests)
        with without_garbage_collector():
            if self._unfinished:
                self._run_until_all_end()
            ended_s = self.env.now
            self.env.run()
            for watch in dict.fromkeys([watch for engine in self.engines for watch in engine.watches]):
                watch.run_ended()
            wall_s = perf_counter() - began
        if self._unfinished:
            if blocked := next(filter(None, [engine.schedule.blocked for engine in self.engines]), ""):
                raise RulesError(blocked)
            raise RuntimeError(f"{self._unfinished} requests are stuck: {self._where()}")
        scaling = None if self.scaler is None else self.scaler.scaling
        outcome = outcome_of(self.book, self.engines, self.layout, ended_s, wall_s, scaling)
        outcome.has_admission = self.gate is not None
        return outcome

    def start(self, requests: Sequence[Request]) -> None:
        """Begin a run: the clock is about to start."""
        self.book = Book(requests)
        self._unfinished = self._count = len(requests) if self._own is None else len(self._own)
        self.is_done = not self._unfinished
        movers = dict.fromkeys([engine.mover for engine in self.engines])
        for mover in movers:
            mover.watches.append(Landings(self.book, self.env))
        self._followers = Followers(requests)
        self.env.process(self._arrivals(due_in_order(requests, self.engines[0].settings.reset_at_s)))
        self.engines[0].substrate.on_loss(self.lose)
        for failure in self.failures:
            self.env.process(self._fail_and_return(failure))
        if self.scaler is not None:
            self.scaler.start(self._homeless)
        for engine in self.engines:
            if engine.is_up:
                engine.start()

    def _run_until_all_end(self) -> None:
        """Let time pass until all requests have ended, or nothing happens any more."""
        try:
            self.env.run(self._all_ended)
        except RuntimeError:
            if self._all_ended.triggered or self.env.peek() < inf:
                raise

    def _where(self) -> str:
        queued = sum(len(engine.waiting.queue) for engine in self.engines)
        admitted = sum(engine.schedule.admitted for engine in self.engines)
        waiting = sum(len(one.waiting) for one in self.hand_over.receivers.values()) if self.hand_over else 0
        homeless = len(self._homeless)
        return f"{queued} queued, {admitted} admitted, {waiting} without pages to decode on, {homeless} without an engine"

    # --- arrivals ----------------------------------------------------------------------------------------------------

    def _arrivals(self, due: "Iterable[tuple[float, Request | Reset]]") -> Any:
        env = self.env
        for time_s, what in due:
            while time_s > env.now:  # once more if the sum was rounded down: before ``time_s``, nothing may be delivered
                yield env.timeout(time_s - env.now)
            if isinstance(what, Request):
                if self._own is None or what.index in self._own:
                    self._arrive(what)
            else:
                self._resets.reset(what)

    def _arrive(self, request: Request) -> None:
        """Send a request to an engine."""
        self._resets.before(request)
        now = self.env.now
        self.book.arrived(request, now)
        if self.calls is not None:
            self.calls.returned(request)
        if self.scaler is not None:
            self.scaler.load.arrived(request, now)
        requests = self.samples.first(request)
        if requests[0] is not request:
            self._apart[request.index] = request
            self._samples_left[request.index] = len(requests)
        before_s = self.engines[0].substrate.request_s(request.prompt_tokens)
        for one in requests:
            job = Job(one, now)
            job.is_counted = one.sample > 0
            if before_s:
                heard = self.env.timeout(before_s, job)
                heard.callbacks.append(self._hear)
            else:
                self._deliver(job)

    def _hear(self, event: Event) -> None:
        self._deliver(cast(Job, event.value))

    def _hear_follower(self, event: Event) -> None:
        self._arrive(cast(Request, event.value))

    def _hear_samples(self, event: Event) -> None:
        self._follow(cast(list[Request], event.value))

    def _deliver(self, job: Job) -> None:
        """Let an engine hear of a request, which has waited for nothing so far."""
        job.times.waits_since_s = self.env.now
        self._place(job, is_new=True)

    def _follow(self, requests: list[Request]) -> None:
        """Send the samples of a request to its engine, whose prompt has been computed. The row has its hits and waiting times."""
        columns = self.book.columns
        for request in requests:
            job = Job(request, columns["arrival_s"][request.index])
            job.is_counted = True
            job.times.queue_s, job.times.load_s = columns["queue_s"][request.index], columns["load_s"][request.index]
            self._deliver(job)

    @property
    def has_engines(self) -> bool:
        """Whether an engine is up that computes prompts and, if these are others, one that decodes."""
        if self.router is None:
            return self.engines[0].is_up
        return self.router.has_engines and (self.hand_over is None or self.hand_over.has_engines)

    def engine_of(self, job: Job) -> Engine | None:
        """Return the engine of a request, which the router chooses unless it has. None: none is up, or the router keeps it."""
        index = job.request.index
        number = self._sent.get(index)
        if number is None:
            if not self.has_engines:
                return None
            if self.router is None:
                return self.engines[0]
            number = self.router.send(job.request, self.env.now)
            if number is None:
                return None
            self._sent[index] = number  # all samples of a request have the same engine
        return self.engines[number]

    def resend(self, job: Job) -> None:
        """Let the router choose again for a request that has lost its engine or its pages."""
        self._place(job, is_new=False)

    def _place(self, job: Job, *, is_new: bool) -> None:
        """Give a request to its engine, or let it wait for one, after those that wait already."""
        gate = self.gate
        if gate is not None and is_new and not self._reaches_router(gate, job):
            return
        has_turn = not self._homeless or job.request.index in self._sent
        engine = self.engine_of(job) if has_turn else None
        if engine is None:
            self._homeless.add(job, is_new=is_new)
        else:
            self._give(engine, job, is_new)

    def _give(self, engine: Engine, job: Job, is_new: bool) -> None:
        """Give a request to an engine, unless that refuses it; whether it is the first one that has it."""
        if self.gate is not None:
            if is_new and not self.gate.is_before_router and not self._is_admitted(self.gate, job, engine):
                return
            self.gate.given(job, engine)
        if is_new:
            engine.accept(job)
        else:
            engine.take(job)

    def _reaches_router(self, gate: Gate, job: Job) -> bool:
        """Whether a request that no engine has had is not refused before, nor another sample of it."""
        if gate.stops(job.request.index):
            return False
        return not gate.is_before_router or self._is_admitted(gate, job, None)

    def _is_admitted(self, gate: Gate, job: Job, engine: Engine | None) -> bool:
        """Ask about a request, unless its prompt has been computed for this one. One that is refused ends here, and those that
        wait for it are never sent: its client gets an error."""
        if job.is_counted or gate.admits(job, engine, len(self._homeless)):
            return True
        request = job.request
        self.book.shed(request)
        gate.refuses(request.index, self._samples_left.pop(request.index, 1) - 1 - self._homeless.drop(request.index))
        self._apart.pop(request.index, None)
        self.ended(request, 0 if engine is None else engine.number)
        return False

    def _give_up(self, request: Request) -> None:
        """Take note that a request is never sent."""
        if self.calls is not None:
            self.calls.missed(request)
        self._resets.before(request)
        self.book.arrived(request, self.env.now)
        self.book.shed(request)
        self._one_less()
        self._tell_advance()

    # --- what engines report -----------------------------------------------------------------------------------------

    def drained(self) -> None:
        self._resets.drained()

    def ended(self, request: Request, engine: int) -> None:
        """Record that a request is finished, rejected or refused, if all of its samples are; requests that wait for it arrive
        after their delay, unless it was refused."""
        index = request.index
        if self.gate is not None:
            self.gate.ended(request)
            if self.book.columns["status"][index] == FINISHED:
                self.gate.answered(request, engine)
        if index in self._samples_left:
            self._samples_left[index] -= 1
            if self._samples_left[index]:
                return
            del self._samples_left[index]
        whole = self._apart.pop(index, None)
        status = self.book.columns["status"][index]
        if whole is not None and status == FINISHED:
            following = self.samples.then(whole)
            if following:
                self._samples_left[index] = len(following)
                self.env.timeout(0.0, following).callbacks.append(self._hear_samples)
                return
        if self.scaler is not None:
            self.scaler.load.ended(request, self.book.columns["tpot_s"][index], self.env.now, is_answered=status == FINISHED)
        self._forget(request, self.env.now)
        self._one_less()
        self._tell_advance()
        if self.calls is not None:
            waiting = [self.book.requests[number] for number in self._followers.waiting_for(index)]
            self.calls.ended(request, engine, waiting, is_answered=status == FINISHED)
        if status == SHED:
            for number in self._followers.of_refused(index):
                self._give_up(self.book.requests[number])
        for number in self._followers.of_ended(index):
            follower = self.book.requests[number]
            arrival = self.env.timeout(follower.delay_s, follower)
            arrival.callbacks.append(self._hear_follower)
        if self._homeless:
            self._homeless.ended()

    def _one_less(self) -> None:
        """Note that a request is finished with, and whether it was the last one."""
        self._unfinished -= 1
        if not self._unfinished:
            self.is_done = True
            self._all_ended.succeed()
            self._resets.wake_all()

    def _tell_advance(self) -> None:
        if self._advance:
            self._advance(self._count - self._unfinished)

    def first_token(self, job: Job, engine: int) -> None:
        request = job.request
        if self.gate is not None:
            self.gate.computed(job, engine)
        if self.scaler is not None and not job.generated and not request.sample:
            pages = self.book.columns["hit_pages"][request.index]
            self.scaler.load.begun(request, sum(pages) * self.engines[0].cache.page_tokens, self.env.now - job.arrival_s)
        if request.samples > 1 and not job.generated:
            self._samples_left[request.index] = request.samples
        if self.router is not None:
            self.router.first_token(request, engine, self.env.now)

    def prepares(self, job: Job, engine: int) -> bool:
        if self.calls is not None:
            self.calls.sent(job.request, engine)
        return self.hand_over is None or self.hand_over.prepares(job, self.engines[engine])

    def continues(self, job: Job, engine: int) -> bool:
        if self.hand_over is None:
            return True
        self.hand_over.prefilled(job, self.engines[engine])
        return False

    def retracted(self, job: Job, engine: int) -> bool:
        if self.hand_over is None:
            return True
        return self.hand_over.retracted(job, self.engines[engine])

    def stepped(self, engine: int) -> None:
        router = self._router_of(engine)
        if router is not None:
            router.report(engine, report_of(self.engines[engine]), self.env.now)
            if self._homeless:
                self._homeless.reported()

    # --- failures ----------------------------------------------------------------------------------------------------

    def _fail_and_return(self, failure: Failure) -> Any:
        yield self.env.timeout(failure.at_s)
        if self.is_done:
            return
        engine = self.engines[failure.engine]
        if engine.number in self._lost:
            return
        yield from self.fail(engine)
        if failure.back_after_s < inf:
            yield self.env.timeout(failure.back_after_s)
            if not self.is_done and engine.number not in self._lost:
                self._bring_back(engine)

    def lose(self, number: int) -> None:
        """Take an engine down for good whose GPU is lost."""
        self._lost.add(number)
        if not self.is_done and self.engines[number].is_up:
            self.env.process(self.fail(self.engines[number]))

    def fail(self, engine: Engine) -> Any:
        """Take an engine down: send its requests elsewhere, end its transfers, and drop what its GPU has. To be yielded from."""
        now = self.env.now
        engine.is_up = False
        jobs = self.hand_over.lost(engine) if self.hand_over is not None else []
        jobs += engine.stop()
        self._router_down(engine, jobs, now)
        for job in jobs:
            self.resend(job.again())
        self._homeless.offer()
        while transfers := engine.transfers():
            for transfer in transfers:
                engine.mover.cancel(transfer)
            for transfer in transfers:
                if not transfer.done:
                    yield engine.mover.end_of(transfer)
        engine.cache.reset(engine.gpu, self.env.now)

    def _router_down(self, engine: Engine, jobs: list[Job], now: float) -> None:
        """Tell the router which requests are lost, and that the engine is down."""
        if self.gate is not None:
            for job in jobs:
                self.gate.ended(job.request)
        if self.router is None:
            return
        for job in jobs:
            self._forget(job.request, now)
        if engine.number in self.router.engines:
            self.router.down(engine.number, now)

    def _forget(self, request: Request, now: float) -> None:
        """Tell the routers that a request is not with its engines any more."""
        if self.router is not None and request.index in self._sent:
            engine = self._sent.pop(request.index)
            self.router.ended(request, engine, now)
            if self.scaler is not None:
                self.scaler.left(engine)
        if self.hand_over is not None:
            self.hand_over.ended(request, now)

    def _sent_on(self, job: Job) -> None:
        """The prefill engine has nothing to do with a request any more: it is on the engine that decodes."""
        if self.router is not None:
            self.router.ended(job.request, self._sent.pop(job.request.index), self.env.now)
            if self._homeless:
                self._homeless.ended()

    def _bring_back(self, engine: Engine) -> None:
        """Let an engine that failed serve again."""
        engine.is_up = True
        engine.outages[-1][1] = self.env.now
        if self.router is not None and engine.number in self.router.engines:
            self.router.up(engine.number, self.env.now)
        if self.hand_over is not None:
            self.hand_over.back(engine)
        engine.start()
        self._homeless.offer()
