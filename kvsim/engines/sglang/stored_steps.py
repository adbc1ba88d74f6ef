"""SGLang's unified cache with storage, in time: what requests in the queue read from it, and what the host writes to it."""

from math import inf, isnan
from typing import Any, cast

from kvsim.core.lease import Lease
from kvsim.core.rules import CacheSetup
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.job import Job
from kvsim.engine.queue import JobQueue
from kvsim.engine.schedule import Parts
from kvsim.engines.sglang.carriers import Landing
from kvsim.engines.sglang.hosted_steps import HostCopies, HostedSteps, NodeTransfer
from kvsim.engines.sglang.node_check import check_nodes
from kvsim.engines.sglang.read_ahead import Gap, ReadAhead
from kvsim.engines.sglang.storage import Storage
from kvsim.engines.sglang.storage_lines import Read, StorageLine, Write
from kvsim.engines.sglang.storage_waits import MOST_RETRIES, Retries, Waiter
from kvsim.policies.prefetch.base import Refusal


class StoredSteps(HostedSteps):
    """``HostedSteps`` with storage below the host."""

    def __init__(self, setup: CacheSetup, *, caches_answers: bool, load_min_tokens: int, counts_unmatched: bool) -> None:
        super().__init__(setup, caches_answers=caches_answers, load_min_tokens=load_min_tokens)
        self.counts_unmatched = counts_unmatched
        self.storage_edge = setup.edges[1]
        self._stored: StoredCopies | None = None

    @property
    def storage(self) -> Storage:
        """The storage below the host."""
        storage = self.moving.storage
        assert storage is not None
        return storage

    def copies(self, parts: Parts, queue: JobQueue) -> HostCopies:
        self._stored = StoredCopies(self, parts, queue)
        return self._stored

    def batch(self, pages: int, landing: Landing, goes_down: bool) -> Transfer:
        """Return the transfer that moves so many pages between host and storage."""
        return self.transfer(pages, landing, goes_down=goes_down, edge=self.storage_edge)

    def gap(self, ahead: ReadAhead, job: Job) -> tuple[Gap | None, int]:
        """Look up a request that waits. Returns what is to be read of it, and how many pages GPU and host have."""
        runs = self._pages_of(job.request, job.target_tokens - 1)
        path = self.moving.find(runs)
        last = self._end_of(path)
        return ahead.gap(job.request, path, runs), last.depth + last.pages

    def reset(self, gpu: Tier | None = None, now: float = 0.0) -> None:
        super().reset(gpu, now)
        if gpu is None:
            self.storage.clear()

    def _forget(self) -> None:
        if self._stored is not None:
            self._stored.forget()

    def check(self) -> None:
        super().check()
        self.storage.check()
        if self._stored is not None:
            self._stored.check()

    def _check_nodes(self) -> None:
        check_nodes(self.moving, list(self.leases), [] if self._stored is None else self._stored.host_slots())


class StoredCopies(HostCopies):
    """``HostCopies``, and reads and writes of storage, a line each. In a pass, in this order:

    new requests   are looked up; storage is asked for what GPU and host lack of them. Its answer, which takes no time, is known
                   in the next pass
    copies         that have ended are acknowledged; from then on, their nodes are written to storage
    answers        the host makes room for what storage has, as far as the prefetch policy and the host allow, and the read joins
                   its line; with ``counts_unmatched``, room was made for all that was asked for, and the read has begun by then
    reads          that have ended enter the tree
    writes         that have ended let their nodes leave the host
    slots          that earlier passes have given back become free
    retries        of requests for which nothing was read, 8 passes later and up to 8 times, but not of the first in the queue

    At its turn, a request with a read is passed over, for as long as the policy says, counted from its first turn. Then what has
    arrived in whole batches enters the tree. Storage is asked again if GPU and host have less of a request than when it was last
    asked.
    """

    def __init__(self, cache: StoredSteps, parts: Parts, queue: JobQueue) -> None:
        super().__init__(cache, parts)
        self._cache = cache
        self._queue = queue
        self._env = parts.mover.env
        self._substrate = parts.mover.substrate
        self._prefetching = parts.prefetching
        self._counts = parts.prefetching.counts
        self._counts_unmatched = cache.counts_unmatched
        self._ahead = ReadAhead(cache.moving)
        self._reader = StorageLine(cache.storage, parts.mover, cache.batch)
        self._writer = StorageLine(cache.storage, parts.mover, cache.batch)
        self._waiters: dict[Job, Waiter] = {}
        self._reads: dict[Read, Waiter] = {}
        """Reads whose end has not been acknowledged, each with the one that it began for."""
        self._asked: list[Read] = []
        """Those without an answer so far."""
        self._retries = Retries()
        self._released: list[Any] = []
        """Slots of the host that the next pass frees."""

    @property
    def has_work(self) -> bool:
        return self._is_urgent or len(self._retries) > 0

    @property
    def _is_urgent(self) -> bool:
        """Whether there is something to do in the next pass already."""
        return bool(self._asked or self._released or self._reader.ended or self._writer.ended)

    @property
    def quiet_passes(self) -> int:
        return 0 if self._is_urgent else self._retries.quiet_passes

    def left_out(self, passes: int) -> None:
        self._retries.left_out(passes)

    def is_awaited(self, transfer: Transfer) -> bool:
        landing = cast(NodeTransfer, transfer).landing
        return landing is None or landing.is_done

    # --- a pass --------------------------------------------------------------------------------------------------------------

    def begin_pass(self, new: list[Job], *, is_computing: bool) -> None:
        asked, self._asked = self._asked, []
        released, self._released = self._released, []
        read, written = self._reader.take_ended(), self._writer.take_ended()
        for job in new:
            self.waits(job)
        super().begin_pass(new, is_computing=is_computing)
        self._write()
        for one in asked:
            self._answer(one)
        for work in read:
            self._end(cast(Read, work))
        for work in written:
            self._cache.moving.let_go(cast(Write, work).hold)
        for slots in released:
            self._cache.residency.give(self._cache.moving.cpu, slots)
        for job, waiter in self._retries.take_due(self._queue):
            self._ask_again(job, waiter)

    def carry_out(self, *, is_idle: bool) -> Any:
        yield from super().carry_out(is_idle=is_idle)
        self._write()
        if self._is_urgent or is_idle and self.has_work:
            self._wake()

    def _write(self) -> None:
        """Write to storage what has been copied to the host."""
        for hold in self._cache.moving.take_to_store():
            self._writer.add(Write(self._writer, hold))

    # --- questions and answers -----------------------------------------------------------------------------------------------

    def waits(self, job: Job) -> None:
        self._waiters[job] = waiter = Waiter()
        self._ask(job, waiter)

    def _ask(self, job: Job, waiter: Waiter) -> None:
        """Look up a request, and ask storage for what is missing."""
        gap, waiter.found_pages = self._cache.gap(self._ahead, job)
        if gap is None:
            return
        self._retries.cancel(job)
        if waiter.is_expired or waiter.read is not None:
            return
        moving = self._cache.moving
        hold = moving.hold_on_host(gap.node) if gap.node is not moving.tree.root else None
        waiter.others_pages = self._prefetching.in_flight_pages
        room = self._room(gap, gap.pages, waiter) if self._counts_unmatched else self._wanted(gap, waiter)
        if isinstance(room, Refusal) or not room:
            if hold is not None:
                moving.let_go(hold)
            if isinstance(room, Refusal):
                self._refuse(waiter, room, self._cache.storage.leading_pages(gap.runs))
                if room is Refusal.RATE_LIMIT:
                    self._retries.later(job, waiter)
            return
        read = Read(self._reader, job, gap, hold, self._counts)
        waiter.read, waiter.asked_pages = read, room if self._counts_unmatched else gap.pages
        self._prefetching.in_flight_pages += waiter.asked_pages
        self._reads[read] = waiter
        self._asked.append(read)
        if self._counts_unmatched:
            self._begin(read, waiter, room, gap.pages)

    def _wanted(self, gap: Gap, waiter: Waiter) -> int | Refusal:
        """Ask the policy whether to ask storage at all, as if there were room for everything."""
        return self._ahead.ask(gap, gap.pages, gap.pages, in_flight_pages=waiter.others_pages, queued_s=self._queued_s())

    def _room(self, gap: Gap, pages: int, waiter: Waiter) -> int | Refusal:
        """Make room for up to ``pages`` pages, as the policy wants."""
        return self._ahead.room(gap, pages, in_flight_pages=waiter.others_pages, queued_s=self._queued_s())

    def _queued_s(self) -> float:
        return self._substrate.queued_s(self._cache.storage_edge)

    def _answer(self, read: Read) -> None:
        """Act on the answer of storage, unless the request has not waited for it."""
        waiter = self._reads[read]
        if read.is_reading:
            return
        if waiter.read is read and not self._counts_unmatched:
            stored = self._cache.storage.leading_pages(read.gap.runs)
            room = self._room(read.gap, stored, waiter) if stored else 0
            if isinstance(room, Refusal):
                self._refuse(waiter, room, stored)
            elif room:
                self._begin(read, waiter, room, stored)
        if not read.is_reading:
            self._miss(read, waiter)

    def _begin(self, read: Read, waiter: Waiter, room: int, counted: int) -> None:
        """Begin to read what storage has, in a room of so many pages, which was made for ``counted`` pages."""
        gap, stored = read.gap, self._cache.storage.leading_pages(read.gap.runs)
        residency, cpu = self._cache.residency, self._cache.moving.cpu
        slots = residency.take(cpu, room)
        pages = min(room, stored)
        if 0 < pages < counted:
            wanted = self._ahead.ask(gap, pages, pages, in_flight_pages=waiter.others_pages, queued_s=self._queued_s())
            if isinstance(wanted, Refusal):
                self._refuse(waiter, wanted, stored)
                stored = pages = 0
            else:
                pages = min(pages, wanted)
        if not waiter.retries:
            self._counts.refused_by_memory_pages += stored - pages
        mine, spare = cpu.pool.split(slots, pages)
        if pages < room:
            self._released.append(spare)
        if pages:
            read.begin(pages, mine)

    def _refuse(self, waiter: Waiter, why: Refusal, stored: int) -> None:
        """Count pages that are stored and not read, when storage is asked for the first time."""
        if not waiter.retries:
            self._counts.refuse(why.value, stored)

    def _miss(self, read: Read, waiter: Waiter) -> None:
        """Nothing is read: ask again later."""
        del self._reads[read]
        if waiter.read is read:
            self._retire(waiter)
            self._retries.later(read.job, waiter)

    def _retire(self, waiter: Waiter) -> None:
        """Let the request have no read any more."""
        assert waiter.read is not None
        hold, waiter.read = waiter.read.hold, None
        if hold is not None:
            self._cache.moving.let_go(hold)
        self._prefetching.in_flight_pages -= waiter.asked_pages
        waiter.asked_pages = 0

    # --- asking again --------------------------------------------------------------------------------------------------------

    def _ask_again(self, job: Job, waiter: Waiter) -> None:
        waiter.retries += 1
        self._ask(job, waiter)

    def has_lost(self, job: Job, pages: int) -> bool:
        waiter = self._waiters[job]
        if pages >= waiter.found_pages:
            return False
        if waiter.retries >= MOST_RETRIES:
            waiter.found_pages = pages
            return False
        self._ask_again(job, waiter)
        return True

    # --- a request's turn ----------------------------------------------------------------------------------------------------

    def is_ready(self, job: Job) -> bool:
        waiter = self._waiters[job]
        read = waiter.read
        if read is None:
            return True
        wait_s = self._prefetching.wait_s(waiter.asked_pages * self._cache.page_tokens)
        if wait_s > 0:
            if isnan(waiter.deadline_s):
                self._wait(waiter, wait_s)
            if self._env.now < waiter.deadline_s:
                return False
            waiter.is_expired = True
        read.is_stopped = True
        if read.is_reading:
            self._enter(read, waiter)
        else:
            self._retire(waiter)
            if not waiter.is_expired:
                self._retries.later(job, waiter)
        return True

    def _wait(self, waiter: Waiter, wait_s: float) -> None:
        waiter.deadline_s = self._env.now + wait_s
        if wait_s < inf:
            self._env.timeout(wait_s).callbacks.append(self._expired)

    def _expired(self, _: object) -> None:
        self._wake()

    def _enter(self, read: Read, waiter: Waiter) -> None:
        """Enter what has arrived into the tree."""
        pages, cpu = read.arrived_pages, self._cache.moving.cpu
        mine, read.slots = cpu.pool.split(read.slots, pages)
        had = self._ahead.enter(read.gap, pages, mine)
        if pages > had:
            waiter.first_page, waiter.brought_pages = read.gap.first + had, pages - had
        self._retire(waiter)

    def _end(self, read: Read) -> None:
        """A read has ended: enter it for a request that still waits, and give back the slots of what did not come."""
        waiter = self._reads.pop(read)
        if waiter.read is read:
            self._enter(read, waiter)
        if self._cache.moving.cpu.pool.count(read.slots):
            self._released.append(read.slots)

    def admitted(self, job: Job, lease: Lease) -> None:
        waiter = self._waiters.pop(job)
        self._retries.cancel(job)
        first, loaded = lease.gpu_pages, lease.loaded_pages
        end = min(first + loaded, waiter.first_page + waiter.brought_pages)
        used = max(0, end - max(first, waiter.first_page)) if loaded else 0
        if used:
            lease.loaded = [0, 0, used]
        self._counts.used_pages += used
        self._counts.wasted_pages -= used

    def dropped(self, job: Job) -> None:
        waiter = self._waiters.pop(job, None)
        self._retries.cancel(job)
        if waiter is not None and waiter.read is not None:
            waiter.read.is_stopped = True
            self._retire(waiter)

    # --- the end -------------------------------------------------------------------------------------------------------------

    def host_slots(self) -> list[Any]:
        """Return slots of the host that are in no node."""
        return [*self._released, *[read.slots for read in self._reads if read.slots is not None]]

    def forget(self) -> None:
        """Give up all reads and writes, and give back what they hold, since the cache is about to be emptied."""
        moving, residency = self._cache.moving, self._cache.residency
        for waiter in self._waiters.values():
            if waiter.read is not None:
                self._retire(waiter)
            waiter.found_pages = waiter.brought_pages = 0
        for slots in self.host_slots():
            residency.give(moving.cpu, slots)
        self._reads.clear()
        self._asked, self._released = [], []
        self._retries.clear()
        self._reader.empty()
        self._writer.empty()
        moving.take_to_store()
        for hold in moving.under_way()[2]:
            moving.let_go(hold)

    def check(self) -> None:
        """Recount what is in flight. Raises AssertionError."""
        counted = sum([waiter.asked_pages for waiter in self._waiters.values()])
        assert self._prefetching.in_flight_pages == counted, "pages in flight are counted wrong"
