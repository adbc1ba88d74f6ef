"""The disk tier: pages in the slots of one file, read and written by threads, and verified when read."""

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock, local

import numpy as np

from kvsim.files.locking import Lock as FolderLock
from kvsim.numbers import Whole, check_number
from kvsim.substrate.hardware.disk.disk_index import DiskIndex, reserve
from kvsim.substrate.hardware.disk.disk_job import BLOCK_BYTES, DiskJob, ReadJob, WriteJob

IO_BYTES = 4 << 20
"""Most bytes of neighbouring slots that are read or written at once."""
MOST_BUFFERS = 1024
"""Most pieces of memory that one system call reads or writes."""
FAULTS = ("missing", "key", "checksum", "short_read", "read_error", "write_error")

SlotRange = tuple[int, int]
"""Begin and end (exclusive) in a list of pages; the slots in between are neighbours."""


class DiskFile:
    """Slots for ``pages`` pages of ``page_bytes`` bytes, stored in their own folder and kept between runs.

    All disk space is reserved at the start. If ``is_direct``, I/O bypasses the system's page cache (O_DIRECT); file systems that
    do not support this use the page cache. Slots are rounded up to blocks of 4096 bytes. Memory that is not aligned to blocks,
    or pages that do not fill their slots, cost a copy. ``threads`` threads read and as many write. Neighbouring slots form an
    range; as many threads as a list has ranges work on it at once.

    A page can be found by its 16-byte key until its slot is overwritten, also by the next process, however this one ends. After
    a power loss, pages may be missing. In any case a page is read completely or not at all, which the checksum of its bytes
    (xxh3_64) guarantees.

    ``faults`` counts the faults that ended a list early, by kind:

        missing, key            the slot has no complete page; it has a different page
        checksum, short_read    the bytes differ from those written; the file ends within the page
        read_error              the system could not read. A page with one of these three faults counts as missing afterwards
        write_error             the system could not write, or not completely
    """

    def __init__(self, folder: Path, *, pages: int, page_bytes: int, threads: int = 4, is_direct: bool = True) -> None:
        """Open the pages in a folder, or create it. The number of slots may differ from before.

        Raises ValueError for a number below 1 or a folder with another page size, UsageError if the folder cannot be written or
        another process uses it, and OSError with the file's name if a file cannot be used or the disk is full.
        """
        for name, value in (("pages", pages), ("page_bytes", page_bytes), ("threads", threads)):
            check_number(name, Whole(1), value)
        self.pages = pages
        self.page_bytes = page_bytes
        self.slot_bytes = -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.threads = threads
        self.faults = dict.fromkeys(FAULTS, 0)
        self._most = max(1, min(IO_BYTES // self.slot_bytes, MOST_BUFFERS))
        self._buffers = local()
        self._lock = Lock()
        self.is_closed = False
        with ExitStack() as opened:
            opened.enter_context(FolderLock(folder, ".pages.lock", subject="disk.folder", again=False))
            self.index = DiskIndex(folder / "pages.index", pages=pages, page_bytes=page_bytes)
            opened.callback(self.index.close)
            self.file, self.is_direct, old_bytes = open_data(folder / "pages.data", pages * self.slot_bytes, is_direct)
            opened.callback(os.close, self.file)
            self._opened = opened.pop_all()
        self.index.clear(np.arange(old_bytes // self.slot_bytes, pages))
        self._readers = ThreadPoolExecutor(threads, "disk-read")
        self._writers = ThreadPoolExecutor(threads, "disk-write")

    def recovered(self) -> dict[bytes, int]:
        """Return the slot of each stored page by its key, in order of writing."""
        return self.index.recovered()

    def read(
        self, slots: np.ndarray, keys: list[bytes], host: np.ndarray, host_slots: np.ndarray, *, cancelled: Callable[[], bool]
    ) -> "Future[int]":
        """Read pages with these keys from slots of the file into rows of ``host``, uint8 ``[pages, page_bytes]``.

        The result is the number of complete pages that arrived, from the first on; other rows have undefined content. Reading
        stops at the first fault, which is counted, and soon after ``cancelled`` returns True. ``slots`` and ``host_slots`` have
        one integer per page. The slots must not be written meanwhile. Raises ValueError if the lists do not match, or after
        ``close``.
        """
        return self._start(self._readers, ReadJob(self, slots, keys, host, host_slots, cancelled))

    def write(
        self, slots: np.ndarray, keys: list[bytes], host: np.ndarray, host_slots: np.ndarray, *, cancelled: Callable[[], bool]
    ) -> "Future[int]":
        """Write rows of ``host`` to slots of the file; each slot loses its old page as soon as its turn comes.

        The result is the number of complete pages written, from the first on. Everything else is as for ``read``.
        """
        return self._start(self._writers, WriteJob(self, slots, keys, host, host_slots, cancelled))

    def close(self) -> None:
        """Stop as if all lists were cancelled, and release the folder for other processes. Must not be called by a worker."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self._readers.shutdown()
        self._writers.shutdown()
        self._opened.close()

    def _start(self, workers: ThreadPoolExecutor, job: DiskJob) -> "Future[int]":
        with self._lock:
            if self.is_closed:
                raise ValueError("the disk file is closed")
            job.workers = min(self.threads, len(job.ranges))
            for _ in range(job.workers):
                workers.submit(job.run)
        if not job.ranges:
            job.result.set_result(0)
        return job.result

    def count_fault(self, kind: str) -> None:
        with self._lock:
            self.faults[kind] += 1

    def buffer(self) -> np.ndarray:
        """Return the calling thread's own buffer for one range, ``[slots, slot_bytes]``, aligned to blocks."""
        if not hasattr(self._buffers, "own"):
            memory = mmap.mmap(-1, self._most * self.slot_bytes)
            self._buffers.own = np.frombuffer(memory, dtype=np.uint8).reshape(self._most, self.slot_bytes)
        own: np.ndarray = self._buffers.own
        return own

    def ranges(self, slots: np.ndarray) -> list[SlotRange]:
        """Split a list of slots into ranges, each small enough for one system call."""
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        return [
            (at, min(at + self._most, stop))
            for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(slots)], strict=True)
            for at in range(start, stop, self._most)
        ]


def open_data(path: Path, n_bytes: int, is_direct: bool) -> tuple[int, bool, int]:
    """Open a file of ``n_bytes`` with all space reserved. Returns its descriptor, whether it uses O_DIRECT, and its old size."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        old_bytes = reserve(file, n_bytes, path)
        direct = open_directly(path) if is_direct else None
    except BaseException:
        os.close(file)
        raise
    if direct is None:
        return file, False, old_bytes
    os.close(file)
    return direct, True, old_bytes


def open_directly(path: Path) -> int | None:
    """Open an existing file with O_DIRECT; None if the file system does not support it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    try:
        os.preadv(file, [mmap.mmap(-1, BLOCK_BYTES)], 0)
    except OSError:
        os.close(file)
        return None
    return file
