"""Prefill and decode on different engines: from one GPU's pages to another's.

A request gets pages for its prompt on a decode engine before a prefill engine queues it, as in SGLang, where the decode
server allocates first (``python/sglang/srt/disaggregation``). The prefill engine computes the prompt, and its pages go layer
by layer to the decode engine, without those that this one has already. When the last layer has landed, the prefill engine
gives its pages back and the decode engine decodes. A request that the decode engine retracts starts again with the router.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import nan

from kvsim.cluster.router import Router
from kvsim.core.lease import FOR_DECODE, HANDED_OVER
from kvsim.core.request import Request
from kvsim.core.transfer import Transfer
from kvsim.core.watch import Watch
from kvsim.engine.claims import Claims
from kvsim.engine.engine import Engine
from kvsim.engine.job import LOST, SENDING, Job, Send


class Receiver(Watch):
    """The requests that wait for pages on one decode engine, or for slots that are still being freed."""

    def __init__(self, engine: Engine, advance: "Callable[[Receiver], None]") -> None:
        """``advance`` is called when a transfer has ended, so that pages may have become free."""
        self.engine = engine
        self._advance = advance
        engine.mover.watches.append(self)
        self.waiting: deque[Job] = deque()
        """Requests without pages, first come, first served."""
        self.claims = Claims(engine.cache, engine.mover)
        """Requests whose slots were reserved."""

    def ended(self, transfer: Transfer) -> None:
        self._advance(self)

    def has_place(self) -> bool:
        """Whether one more request may run on the engine."""
        engine = self.engine
        if not engine.is_up or engine.is_draining or engine.running.is_full and engine.running.decoding_requests:
            return False
        return len(engine.running) < engine.settings.max_running_requests


class HandOver:
    """Chooses a decode engine for each request, gets it pages there, and sends what a prefill engine has computed."""

    resend: Callable[[Job], None]
    """Sends a request to the router again; set by the cluster."""
    on_sent_on: Callable[[Job], None]
    """Called when a request has left its prefill engine; set by the cluster."""

    def __init__(self, router: Router, engines: Sequence[Engine], *, is_layerwise: bool) -> None:
        """``router`` knows the decode engines among ``engines``."""
        self.router = router
        self.is_layerwise = is_layerwise
        self.receivers = {number: Receiver(engines[number], self._advance) for number in router.engines}
        self.senders: dict[Job, Engine] = {}
        """The prefill engine of each request that has chosen a decode engine and is not there yet."""
        self._sent: dict[int, Job] = {}
        """The job of each request that has a decode engine, by the request's index, until it has ended."""

    @property
    def has_engines(self) -> bool:
        """Whether a decode engine is up."""
        return self.router.has_engines

    def waiting_for(self, engine: Engine) -> int:
        """Return how many requests wait for pages to decode on: on a decode engine, or from a prefill engine."""
        if engine.number in self.receivers:
            return len(self.receivers[engine.number].waiting)
        waiting = [job for receiver in self.receivers.values() for job in receiver.waiting]
        return sum([1 for job in waiting if self.senders[job] is engine])

    # --- before the prompt is computed ---------------------------------------------------------------------------------------

    def prepares(self, job: Job, sender: Engine) -> bool:
        """Whether a request may join the prefill engine's queue at once; if not, it joins when it has pages to decode on."""
        request = job.request
        if request.output_tokens - job.generated < 2:
            return True
        number = self.router.send(request, sender.env.now)
        assert number is not None, "no policy before decode engines may keep a request"
        receiver = self.receivers[number]
        job.decoder = number
        self._sent[request.index] = job
        if request.pages_in_all(receiver.engine.cache.page_tokens) > receiver.engine.gpu.pool.capacity:
            sender.reject(request)
            return False
        self.senders[job] = sender
        self._wait(job, receiver)
        self._advance(receiver)
        return False

    @staticmethod
    def _wait(job: Job, receiver: Receiver, *, is_first: bool = False) -> None:
        """Let a request wait for pages on a decode engine, whose queue this is."""
        engine, waiting = receiver.engine, receiver.waiting
        job.times.queued_at_s = engine.env.now
        if is_first:
            waiting.appendleft(job)
        else:
            waiting.append(job)
        engine.waiting.most_queued = max(engine.waiting.most_queued, len(waiting))

    def _advance(self, receiver: Receiver) -> None:
        """Give waiting requests pages on a decode engine, as long as it has free ones."""
        self._serve_claims(receiver)
        engine, waiting = receiver.engine, receiver.waiting
        while waiting and not receiver.claims and receiver.has_place():
            job = waiting[0]
            request, page_tokens = job.request, engine.cache.page_tokens
            lease = engine.cache.match(request, engine.gpu, FOR_DECODE)
            pages = request.pages_for(job.target_tokens, page_tokens)
            fits = engine.continuous.fits_alone(lease, request.pages_in_all(page_tokens))
            if not (fits and engine.cache.admit(lease, pages, engine.env.now)):
                if fits and (not engine.is_idle or engine.cache.in_flight):
                    break
                self.senders[waiting.popleft()].reject(request)
                continue
            waiting.popleft()
            engine.waiting.waited_s += engine.env.now - job.times.queued_at_s
            engine.running.held += 1
            job.decode_lease = lease
            engine.mover.submit(lease.waits)
            if lease.reserved_pages:
                receiver.claims.add(job, lease)
                self._serve_claims(receiver)
            else:
                self._reserved(job, receiver)

    def _serve_claims(self, receiver: Receiver) -> None:
        while (settled := receiver.claims.settle(receiver.engine.env.now)) is not None:
            job, _, is_lost = settled
            if is_lost:
                self._release(job, receiver)
                self._wait(job, receiver, is_first=True)
            else:
                self._reserved(job, receiver)

    def _reserved(self, job: Job, receiver: Receiver) -> None:
        """Let the prefill engine queue a request that has its pages on the decode engine."""
        sender = self.senders[job]
        assert job.decode_lease is not None
        known_tokens = job.decode_lease.gpu_pages * receiver.engine.cache.page_tokens
        job.send = Send(sender.number, receiver.engine.number, known_tokens, job.decode_lease, is_layerwise=self.is_layerwise)
        sender.waiting.start(job)

    @staticmethod
    def _release(job: Job, receiver: Receiver) -> None:
        """Give back what a request has on the decode engine."""
        if job.decode_lease is not None:
            receiver.engine.cache.release(job.decode_lease)
            receiver.engine.running.held -= 1
            job.decode_lease = job.send = None

    # --- resets ------------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """A reset waits until no request runs: take back the pages of those that no prefill engine has admitted yet.

        They keep their decode engines, and their places before requests that come later.
        """
        for receiver in self.receivers.values():
            idle = [
                (job, sender)
                for job, sender in self.senders.items()
                if job.decoder == receiver.engine.number and job.decode_lease is not None and job.lease is None
            ]
            again: list[Job] = []
            for job, sender in idle:
                sender.drop(job)
                self._release(job, receiver)
                again.append(self._replace(job, sender))
            receiver.waiting.extendleft(reversed(again))

    def _replace(self, job: Job, sender: Engine) -> Job:
        """Return a new job for the same request, prefill engine and decode engine, without pages."""
        del self.senders[job]
        new = job.again()
        new.decoder = job.decoder
        self.senders[new] = sender
        self._sent[job.request.index] = new
        return new

    def go_on(self) -> None:
        """Give waiting requests pages again after a reset."""
        for receiver in self.receivers.values():
            self._advance(receiver)

    # --- when it is computed -------------------------------------------------------------------------------------------------

    def prefilled(self, job: Job, sender: Engine) -> None:
        """Send what is left of a computed prompt; the request decodes when everything has landed."""
        sender.running.held += 1
        send = job.send
        assert send is not None
        job.phase, send.source = SENDING, job.lease
        send.tokens = job.target_tokens - 1
        done = sender.substrate.hand_over(send)
        for watch in sender.watches:
            watch.sends(send, done)
        done.callbacks.append(lambda _: self._landed(job, sender))

    def _landed(self, job: Job, sender: Engine) -> None:
        if job.phase == LOST:
            return
        now = sender.env.now
        assert job.lease is not None and job.decode_lease is not None
        del self.senders[job]
        source, job.lease, job.decode_lease, job.send = job.lease, job.decode_lease, None, None
        engine = self.receivers[job.decoder].engine
        engine.running.held -= 1
        engine.mover.submit(engine.cache.insert(job.lease, now))
        sender.running.held -= 1
        sender.mover.submit(sender.cache.release(source, HANDED_OVER, now))
        self.on_sent_on(job)
        sender.wake()
        if job.generated == 1:
            job.times.first_token_s = now
        engine.schedule.join(job)

    # --- the end -------------------------------------------------------------------------------------------------------------

    def ended(self, request: Request, now: float) -> None:
        """A request has ended: its pages on the decode engine are free for others."""
        if request.index in self._sent:
            job = self._sent.pop(request.index)
            receiver = self.receivers[job.decoder]
            self.router.ended(request, job.decoder, now)
            if job in self.senders:
                del self.senders[job]
                self._release(job, receiver)
            self._advance(receiver)

    def retracted(self, job: Job, engine: Engine) -> bool:
        """Whether the engine queues a retracted request itself. A decode engine does not: its prompt is computed again."""
        if engine.number not in self.receivers:
            return True
        del self._sent[job.request.index]
        self.router.ended(job.request, engine.number, engine.env.now)
        self.resend(job.again())
        self._advance(self.receivers[engine.number])
        return False

    # --- failures ------------------------------------------------------------------------------------------------------------

    def lost(self, failed: Engine) -> list[Job]:
        """Take back every request that is on the way from or to a failed engine. Returns those that the engine did not have."""
        jobs: list[Job] = []
        for job, sender in list(self.senders.items()):
            if failed is sender or job.decoder == failed.number:
                jobs.append(job)
                self._take_back(job, sender)
        if failed.number in self.receivers:
            self.receivers[failed.number].waiting.clear()
            self.router.down(failed.number, failed.env.now)
        return jobs

    def _take_back(self, job: Job, sender: Engine) -> None:
        receiver = self.receivers[job.decoder]
        if job.send is not None:
            sender.substrate.withdraw(job.send)
            if job.send.source is not None:
                sender.running.held -= 1
                job.generated -= 1  # a token that never arrived
                if not job.generated:
                    job.times.first_token_s = nan
        if job in receiver.waiting:
            receiver.waiting.remove(job)
            receiver.engine.waiting.waited_s += sender.env.now - job.times.queued_at_s
        sender.drop(job)
        sender.waiting.departs(job.request)
        self._release(job, receiver)
        del self.senders[job]
        sender.wake()
        self._advance(receiver)

    def back(self, engine: Engine) -> None:
        """A failed engine serves again."""
        if engine.number in self.receivers:
            self.router.up(engine.number, engine.env.now)
