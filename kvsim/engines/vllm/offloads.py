"""The scheduler's side of vLLM's ``OffloadingConnector``: what is loaded and stored, and when the scheduler hears of it."""

from collections.abc import Sequence

from simpy import Event

from kvsim.core.lease import LOST, Lease
from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.engine.job import ENDED
from kvsim.engine.mover import Mover
from kvsim.engines.vllm.copies import NO_COPIES, BlockCopy, CopyLines
from kvsim.engines.vllm.offloading import NOTHING, Loadable, OffloadingCache
from kvsim.engines.vllm.served import Chunk, Served
from kvsim.pages.extents import count_pages


@mypyc_attr(allow_interpreted_subclasses=True)
class Offloads:
    """An engine's offloading: without a CPU tier there is none, and every method does nothing.

    loads   are decided when a request is admitted, and submitted when the step of that pass has been launched
    stores  are decided at the end of a pass, and submitted at the next launch, before that step
    ends    are looked at when a step is launched, and take effect with its results
    """

    keeps_in_flight: bool = False
    """Whether a request is not preempted while a step in flight computes it."""
    frees_late: bool = False
    """Whether the blocks of a request that leaves while a step in flight computes it are free when that has ended."""
    hears_look_ups: bool = False
    """Whether each look-up of a waiting request changes something."""
    passed_go_first: bool = False
    """Whether requests that had to wait for something are tried before those ahead of them in the queue."""
    first_offer_tokens: int = UNLIMITED
    """The number of its tokens with which a request that has just been admitted is looked at for an offer."""

    def __init__(self) -> None:
        self.copies: dict[BlockCopy, None] = {}
        """Those whose ends have not taken effect, in the order in which they were decided."""

    def begin_pass(self) -> None:
        """Begin a pass of the scheduler."""

    def loadable(self, served: Served, lease: Lease) -> Loadable | None:
        """Return what a request can load behind its match; None: it has to ask again."""
        return NOTHING

    def moves(self, request: Request) -> bool:
        """Whether chunks of a request are being stored or loaded."""
        return False

    def admitted(self, served: Served) -> None:
        """A request that has been looked up is admitted."""

    def begin_load(self, served: Served, loadable: Loadable) -> None:
        """Decide the load of a request that has just been admitted."""

    def launch(self, chunks: Sequence[Chunk], preempted: Sequence[Served]) -> list[BlockCopy]:
        """Decide stores at the end of a pass, and submit those of the last one. Returns the stores that the step waits for."""
        return NO_COPIES

    def seen(self) -> list[BlockCopy]:
        """Submit loads that follow no step. Return the copies that have ended since the last step was launched."""
        return NO_COPIES

    def may_leap(self, leaving: Sequence[Served], *, is_settled: bool) -> bool:
        """Whether the step that was launched last can be repeated with no part in it for copies, until a chunk is offered.

        leaving     requests whose last tokens are in flight
        is_settled  whether neither the end of a store nor the loss of pages on the GPU matters to requests that wait
        """
        return True

    @property
    def only_waits(self) -> bool:
        """Whether copies are under way, and nothing else is to be done before one of them ends."""
        return False

    def room_of_leap(self, gpu: Tier, *, is_settled: bool) -> int:
        """Return the pages that a leap may take."""
        return gpu.available_pages

    def began(self, done: Event) -> None:
        """Submit the loads of the step that has begun; ``done`` is its end."""

    def report(self, copies: Sequence[BlockCopy]) -> None:
        """Let the ends of copies take effect."""

    def finishes(self, served: Served) -> None:
        """A request is about to give back its blocks, since its answer is complete."""

    def drops(self, served: Served) -> bool:
        """A request ends without a last offer. Returns whether its load goes on, at whose end its blocks are given back."""
        return False

    def stop(self) -> None:
        """Forget all copies and requests, since the engine has failed."""


class CpuOffloads(Offloads):
    """Offloading to a CPU tier."""

    def __init__(self, cache: OffloadingCache, mover: Mover) -> None:
        super().__init__()
        self.cache, row = cache, cache.row
        self.keeps_in_flight, self.frees_late, self.first_offer_tokens = not row.frees_late, row.frees_late, 0
        self.hears_look_ups, self.passed_go_first = row.hears_look_ups, row.passed_go_first
        self._mover = mover
        self._lines = CopyLines(mover)
        self._kept: list[BlockCopy] = []
        """Stores decided in the last pass."""
        self._loads: list[BlockCopy] = []
        """Loads decided in this pass."""
        self._finished: list[Served] = []
        """Requests that have finished since the last pass."""
        self._dropped: list[Served] = []
        """Requests that have been dropped while their loads go on."""
        self._last_step: Event | None = None
        """The end of the step that was launched last."""

    def begin_pass(self) -> None:
        self.cache.begin_pass()

    def loadable(self, served: Served, lease: Lease) -> Loadable | None:
        return None if served.stores else self.cache.loadable(lease, served.job.target_tokens)

    def moves(self, request: Request) -> bool:
        return self.cache.moves(request)

    def admitted(self, served: Served) -> None:
        if self.cache.row.restarts_offers:
            served.next_chunk = 0

    def begin_load(self, served: Served, loadable: Loadable) -> None:
        copy = self.cache.begin_load(served.lease, loadable)
        copy.owner = served
        self.copies[copy] = None
        self._loads.append(copy)
        served.next_chunk = loadable.first + count_pages(loadable.chunks)

    def launch(self, chunks: Sequence[Chunk], preempted: Sequence[Served]) -> list[BlockCopy]:
        kept, decided = self._kept, self._offer(chunks)
        may_wait = bool(preempted or self.cache.pool.handed)
        flushed = [copy for copy in self.copies if self._is_waited_for(copy, preempted)] if may_wait else NO_COPIES
        for copy in [*kept, *[copy for copy in decided if copy in flushed]]:
            self._lines.submit(copy, self._last_step)
        self._kept = [copy for copy in decided if copy not in flushed]
        return flushed

    def _offer(self, chunks: Sequence[Chunk]) -> list[BlockCopy]:
        """Offer what the step computes, then what finished requests have. Returns the stores that come of it."""
        stores: list[BlockCopy] = []
        for chunk in chunks:
            served = chunk.served
            if chunk.upto >= served.offered_tokens:
                self._offer_of(served, min(chunk.upto, served.job.target_tokens), stores)
        finished, self._finished = self._finished, []
        for served in finished if self.cache.row.offers_at_end else ():
            self._offer_of(served, served.job.target_tokens - 1, stores)
        for served in finished:
            self.cache.forget(served.job.request)
        return stores

    def _offer_of(self, served: Served, tokens: int, stores: list[BlockCopy]) -> None:
        job = served.job
        if tokens < served.offered_tokens:
            return
        served.next_chunk, copy = self.cache.offer(job.request, served.next_chunk, tokens, job.target_tokens)
        served.offered_tokens = self.cache.next_offer(job.request, served.next_chunk)
        if copy is not None:
            copy.owner = served
            served.stores += 1
            self.copies[copy] = None
            stores.append(copy)

    def _is_waited_for(self, copy: BlockCopy, preempted: Sequence[Served]) -> bool:
        """Whether a step waits for a store: its request was preempted, or has finished and others get what it reads."""
        if copy.is_load or copy.transfer.done:
            return False
        owner: Served = copy.owner
        return owner in preempted or owner.job.phase == ENDED and self.cache.reads_handed(copy, owner.last_slots)

    def seen(self) -> list[BlockCopy]:
        if not self.cache.row.loads_follow_steps:
            self._submit_loads(None)
        ended = [copy for copy in self.copies if copy.transfer.done and not copy.is_reported]
        for copy in ended:
            copy.is_reported = True
        return sorted(ended, key=lambda copy: copy.is_load)

    def may_leap(self, leaving: Sequence[Served], *, is_settled: bool) -> bool:
        if self._kept or self._loads or any(self._holds_up(copy, is_settled=is_settled) for copy in self.copies):
            return False
        return not any(served.offered_tokens < served.job.target_tokens + served.flying for served in leaving)

    @staticmethod
    def _holds_up(copy: BlockCopy, *, is_settled: bool) -> bool:
        """Whether the end of a copy takes effect soon, or a later step may have to wait for it."""
        if copy.transfer.done:
            return copy.is_load or not is_settled
        owner: Served = copy.owner
        return not copy.is_load and (owner.job.phase == ENDED or owner.is_last_out)

    @property
    def only_waits(self) -> bool:
        if self._kept or self._loads or self._finished or not self.copies:
            return False
        return not any(copy.transfer.done for copy in self.copies)

    def room_of_leap(self, gpu: Tier, *, is_settled: bool) -> int:
        """Pages that are evicted for it may be those that a request which waits would have found."""
        return gpu.available_pages if is_settled else gpu.pool.free

    def began(self, done: Event) -> None:
        self._last_step = done
        self._submit_loads(done)

    def _submit_loads(self, after: Event | None) -> None:
        for copy in self._loads:
            self._lines.submit(copy, after)
        self._loads = []

    def report(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            del self.copies[copy]
            self.cache.report(copy)
            owner: Served = copy.owner
            if copy.is_load:
                owner.is_loaded = True
                self._release([served for served in self._dropped if served is owner])
            else:
                owner.stores -= 1

    def finishes(self, served: Served) -> None:
        if served.job.lease is not None and (served.stores or served.offered_tokens < served.job.target_tokens):
            served.last_slots = self.cache.slots_of(served.lease)
        self._finished.append(served)

    def drops(self, served: Served) -> bool:
        if served.stores and served.job.lease is not None:
            served.last_slots = self.cache.slots_of(served.lease)
        self.cache.forget(served.job.request)
        is_loading = any(copy.is_load and copy.owner is served for copy in self.copies)
        if is_loading:
            self._dropped.append(served)
        return is_loading

    def _release(self, dropped: Sequence[Served]) -> None:
        for served in dropped:
            self._dropped.remove(served)
            self.cache.release(served.lease, LOST)

    def stop(self) -> None:
        self._release(self._dropped.copy())
        self._lines.clear()
        self._lines = CopyLines(self._mover)
        self.copies.clear()
        self._kept, self._loads, self._finished, self._last_step = [], [], [], None
        self.cache.uses.clear()
