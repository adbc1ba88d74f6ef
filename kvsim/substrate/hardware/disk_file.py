"""The disk tier: pages in the slots of one file, read and written by threads, each page checked when it is read."""

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock, local

import numpy as np

from kvsim.substrate.hardware.disk_index import DiskIndex, reserve
from kvsim.substrate.hardware.disk_job import BLOCK_BYTES, DiskJob, ReadJob, WriteJob

IO_BYTES = 4 << 20
"""Neighbouring slots are read or written at once up to so many bytes."""
MOST_BUFFERS = 1024
"""Pieces of memory that one system call reads or writes at most."""
FAULTS = ("missing", "key", "checksum", "short_read", "read_error", "write_error")

Extent = tuple[int, int]
"""Of a list of pages, those from the first place to before the second: their slots are neighbours."""


class DiskFile:
    """Slots for ``pages`` pages of ``page_bytes`` bytes in a folder of their own, kept from run to run.

    All disk space is reserved at the beginning. Memory is read and written without the system's page cache (O_DIRECT), as
    ``is_direct`` says; where the file system cannot do that, through it. Slots are rounded up to blocks of 4096 bytes.
    Memory that is not aligned to blocks, or pages that do not fill their slots, cost a copy. ``threads`` read and as many
    write, each list of pages by as many of them as it has extents: neighbouring slots are one extent.

    A page is found again under its key, 16 bytes, as long as its slot is not written anew: also by the next process, however
    this one ends. After a loss of power pages may be missing. Whatever happens, a page is read whole or not at all: the
    checksum of its bytes (xxh3_64) decides.

    ``faults`` counts what ended a list early, by kind:

        missing, key            there is no whole page in the slot; there is another one
        checksum, short_read    the bytes are not those that were written; the file ends before the page does
        read_error              the system could not read. A page with one of these three faults is missing from then on
        write_error             the system could not write, or not everything
    """

    def __init__(self, folder: Path, *, pages: int, page_bytes: int, threads: int = 4, is_direct: bool = True) -> None:
        """Open the pages that a folder has, or make it. It may have had more or fewer slots.

        Raises ValueError for a number below 1 or a folder with pages of another size, and OSError, which names the file, if
        it cannot be used, another process uses it, or the disk is full.
        """
        for name, value in (("pages", pages), ("page_bytes", page_bytes), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.pages = pages
        self.page_bytes = page_bytes
        self.slot_bytes = -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.threads = threads
        self.faults = dict.fromkeys(FAULTS, 0)
        self._most = max(1, min(IO_BYTES // self.slot_bytes, MOST_BUFFERS))
        self._buffers = local()
        self._lock = Lock()
        self.is_closed = False
        folder.mkdir(parents=True, exist_ok=True)
        self.index = DiskIndex(folder / "pages.index", pages=pages, page_bytes=page_bytes)
        try:
            self.file, self.is_direct, old_bytes = open_data(folder / "pages.data", pages * self.slot_bytes, is_direct)
        except BaseException:
            self.index.close()
            raise
        self.index.clear(np.arange(old_bytes // self.slot_bytes, pages))
        self._readers = ThreadPoolExecutor(threads, "disk-read")
        self._writers = ThreadPoolExecutor(threads, "disk-write")

    def recovered(self) -> dict[bytes, int]:
        """The slot of each page that can be read, by its key; what was written first is at the front."""
        return self.index.recovered()

    def read(
        self, slots: np.ndarray, keys: list[bytes], host: np.ndarray, host_slots: np.ndarray, *, cancelled: Callable[[], bool]
    ) -> "Future[int]":
        """Read pages with these keys from slots of the file into rows of ``host``, uint8 ``[pages, page_bytes]``.

        The result is how many arrived whole, from the first on; other rows may hold anything. It ends early at the first
        fault, which it counts, and soon after ``cancelled`` answers True. ``slots`` and ``host_slots`` are integers, one a
        page. A slot must not be written meanwhile. Raises ValueError if the lists do not fit, or after ``close``.
        """
        return self._start(self._readers, ReadJob(self, slots, keys, host, host_slots, cancelled))

    def write(
        self, slots: np.ndarray, keys: list[bytes], host: np.ndarray, host_slots: np.ndarray, *, cancelled: Callable[[], bool]
    ) -> "Future[int]":
        """Write rows of ``host`` to slots of the file; what these held before is gone as soon as their turn has come.

        The result is how many were written whole, from the first on. As ``read`` for all else.
        """
        return self._start(self._writers, WriteJob(self, slots, keys, host, host_slots, cancelled))

    def close(self) -> None:
        """Stop, as if all lists had been cancelled, and let another process have the folder. Not to be called by a worker."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self._readers.shutdown()
        self._writers.shutdown()
        self.index.close()
        os.close(self.file)

    def _start(self, workers: ThreadPoolExecutor, job: DiskJob) -> "Future[int]":
        with self._lock:
            if self.is_closed:
                raise ValueError("the disk file is closed")
            job.workers = min(self.threads, len(job.extents))
            for _ in range(job.workers):
                workers.submit(job.run)
        if not job.extents:
            job.result.set_result(0)
        return job.result

    def count_fault(self, kind: str) -> None:
        with self._lock:
            self.faults[kind] += 1

    def buffer(self) -> np.ndarray:
        """The calling thread's own memory for one extent, ``[slots, slot_bytes]``, aligned to blocks."""
        if not hasattr(self._buffers, "own"):
            memory = mmap.mmap(-1, self._most * self.slot_bytes)
            self._buffers.own = np.frombuffer(memory, dtype=np.uint8).reshape(self._most, self.slot_bytes)
        own: np.ndarray = self._buffers.own
        return own

    def extents(self, slots: np.ndarray) -> list[Extent]:
        """A list of slots as extents, each small enough for one system call."""
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        return [
            (at, min(at + self._most, stop))
            for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(slots)], strict=True)
            for at in range(start, stop, self._most)
        ]


def open_data(path: Path, n_bytes: int, is_direct: bool) -> tuple[int, bool, int]:
    """Open a file of ``n_bytes``, all of them reserved. Returns it, whether it is read and written directly, and its old size."""
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
    """Open a file that exists with O_DIRECT; None where the file system does not let it be read like that."""
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
