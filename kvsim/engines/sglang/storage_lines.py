"""Reads from SGLang's storage and writes to it, in time: a line for each direction, which moves one batch after another."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.engine.job import Job
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import PrefetchCounts
from kvsim.engines.sglang.carriers import Landing, Storing
from kvsim.engines.sglang.read_ahead import Gap
from kvsim.engines.sglang.storage import Storage
from kvsim.pages.extents import Extent, count_pages, split_extents

BATCH_PAGES: Final = 128
"""Pages that are read or written at a time (STORAGE_BATCH_SIZE)."""

MakeTransfer = Callable[[int, Landing, bool], Transfer]
"""Makes the transfer of so many pages between host and storage; True: down."""


class StorageWork(Landing):
    """What a line carries out: pages in batches."""

    def __init__(self, line: "StorageLine", runs: tuple[Extent, ...]) -> None:
        super().__init__()
        self.line = line
        self.runs = runs
        self.left = runs
        """Those of them that are neither moved nor being moved."""

    def next_batch(self) -> Transfer | None:
        """Return the transfer that moves the next batch; None at the end."""
        raise NotImplementedError

    def arrived(self, pages: int) -> None:
        """Take note of a batch, ``pages`` pages of which have arrived."""
        raise NotImplementedError

    def landed(self, pages: int) -> list[Transfer]:
        if not self.line.is_at(self):
            return NO_TRANSFERS
        self.arrived(pages)
        return self.line.go_on()


class StorageLine:
    """A line of reads or of writes, as of a thread of the engine's."""

    def __init__(self, storage: Storage, mover: Mover, make: MakeTransfer) -> None:
        self.storage = storage
        self._mover = mover
        self._make = make
        self._works: deque[StorageWork] = deque()
        """The first one is under way."""
        self.ended: list[StorageWork] = []
        """Those that have ended and have not been acknowledged."""

    def add(self, work: StorageWork) -> None:
        """Put work at the end of the line."""
        self._works.append(work)
        if len(self._works) == 1:
            self._mover.submit(self.go_on())

    def move(self, pages: int, work: StorageWork, *, goes_down: bool) -> Transfer:
        """Return the transfer of a batch."""
        return self._make(pages, work, goes_down)

    def is_at(self, work: StorageWork) -> bool:
        """Whether this work is under way, as long as the line has not been emptied since it began."""
        return bool(self._works) and self._works[0] is work

    def go_on(self) -> list[Transfer]:
        """Return the transfer of the next batch, if there is any work left."""
        while self._works:
            transfer = self._works[0].next_batch()
            if transfer is not None:
                return [transfer]
            work = self._works.popleft()
            self.storage.touch(work.runs)
            work.is_done = True
            self.ended.append(work)
        return NO_TRANSFERS

    def take_ended(self) -> list[StorageWork]:
        """Return what has ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def empty(self) -> None:
        """Forget all work. A batch under way lands without effect."""
        self._works.clear()
        self.ended.clear()


class Read(StorageWork):
    """The first pages of a gap, on their way to the host. It ends early if storage has lost a page, or when it is stopped."""

    def __init__(self, line: StorageLine, job: Job, gap: Gap, hold: Storing | None, counts: PrefetchCounts) -> None:
        super().__init__(line, ())
        self.job = job
        self.gap = gap
        self.counts = counts
        self.hold = hold
        """Keeps on the host what the pages follow on."""
        self.slots: Any = None
        """Of the host, for its pages; None before there is an answer, and once all have been used or given back."""
        self.is_reading = False
        """Whether it has joined the line."""
        self.arrived_pages = 0
        self.is_stopped = False
        """Whether nobody waits for it any more. Its batch under way still lands."""
        self._batch = 0

    def begin(self, pages: int, slots: Any) -> None:
        """Read ``pages`` pages into these slots."""
        self.runs = self.left = split_extents(self.gap.runs, pages)[0]
        self.slots, self.is_reading = slots, True
        self.line.add(self)

    def next_batch(self) -> Transfer | None:
        if self.is_stopped or not self.left:
            return None
        storage = self.line.storage
        batch, self.left = split_extents(self.left, BATCH_PAGES)
        found = split_extents(batch, storage.leading_pages(batch))[0]
        if found != batch:
            self.left = ()
        if not found:
            return None
        self._batch = count_pages(found)
        transfer = self.line.move(self._batch, self, goes_down=False)
        transfer.request = self.job.request
        return transfer

    def arrived(self, pages: int) -> None:
        self.counts.fetched_pages += pages
        self.counts.wasted_pages += pages
        if pages < self._batch:
            self.left = ()
        if not self.is_stopped:
            self.arrived_pages += pages


class Write(StorageWork):
    """A node of the host, on its way to storage. A batch is there when it has been written; known pages take no time."""

    def __init__(self, line: StorageLine, hold: Storing) -> None:
        super().__init__(line, tuple([run for node in hold.nodes for run in node.runs]))
        self.hold = hold
        """Keeps it on the host."""
        self._batch: tuple[Extent, ...] = ()
        self._pages = 0

    def next_batch(self) -> Transfer | None:
        while self.left:
            self._batch, self.left = split_extents(self.left, BATCH_PAGES)
            self._pages = self.line.storage.missing_pages(self._batch)
            if self._pages:
                return self.line.move(self._pages, self, goes_down=True)
            self.line.storage.store(self._batch)
        return None

    def arrived(self, pages: int) -> None:
        if pages < self._pages:
            self.left = ()
        else:
            self.line.storage.store(self._batch)
