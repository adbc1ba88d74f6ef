"""Reads and writes lists of pages between memory and a disk file."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from threading import Lock
from typing import Any, Protocol

import numpy as np
import xxhash

from kvsim.substrate.hardware.disk.disk_index import DiskIndex, packed

BLOCK_BYTES = 4096
"""Alignment that O_DIRECT requires of addresses, lengths and file offsets."""


class PageFile(Protocol):
    """What a job needs of the file that its pages lie in."""

    pages: int
    page_bytes: int
    slot_bytes: int
    index: DiskIndex
    file: int
    """The file's descriptor."""
    is_direct: bool
    is_closed: bool

    def ranges(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """Split a list of slots into ranges, each small enough for one system call."""

    def buffer(self) -> np.ndarray:
        """Return the calling thread's own buffer for one range, ``[slots, slot_bytes]``, aligned to blocks."""

    def count_fault(self, kind: str) -> None:
        """Count a fault that ended a list early."""


class DiskJob:
    """One list of pages to read or write. Workers take its ranges in turn; the last worker to stop sets the result."""

    def __init__(
        self,
        disk: PageFile,
        slots: np.ndarray,
        keys: list[bytes],
        host: np.ndarray,
        host_slots: np.ndarray,
        cancelled: Callable[[], bool],
    ) -> None:
        self.disk = disk
        self.slots = check_slots(slots, disk.pages, "slots")
        self.keys = packed(keys)
        self.host = host
        self.host_slots = check_slots(host_slots, len(host), "host_slots")
        self.cancelled = cancelled
        if not len(slots) == len(keys) == len(host_slots):
            raise ValueError(f"{len(slots)} slots, {len(keys)} keys and {len(host_slots)} host_slots: the numbers must be equal")
        if host.dtype != np.uint8 or host.shape[1:] != (disk.page_bytes,) or not host.flags.c_contiguous:
            raise ValueError(f"host must be contiguous uint8 [pages, {disk.page_bytes}], not {host.dtype} {list(host.shape)}")
        is_aligned = host.ctypes.data % BLOCK_BYTES == 0 or not disk.is_direct
        self.is_in_place = is_aligned and disk.slot_bytes == disk.page_bytes
        self.ranges = disk.ranges(self.slots)
        self.result: Future[int] = Future()
        self.result.set_running_or_notify_cancel()
        self.workers = 0
        self._lock = Lock()
        self._turn = count()
        self._moved = [0] * len(self.ranges)
        self._is_over = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Process ranges until none is left; runs in each worker."""
        try:
            while not self._is_over and (turn := next(self._turn)) < len(self.ranges) and not self._is_cancelled():
                start, stop = self.ranges[turn]
                self._moved[turn] = self.move(slice(start, stop))
                if self._moved[turn] < stop - start:
                    self._is_over = True
        except BaseException as error:
            self._is_over, self._error = True, error
        with self._lock:
            self.workers -= 1
            if self.workers:
                return
        if self._error is not None:
            self.result.set_exception(self._error)
        else:
            self.result.set_result(self._whole_pages())

    def move(self, part: slice) -> int:
        """Move one range, and return the number of complete pages moved, from its first page on."""
        raise NotImplementedError

    def _is_cancelled(self) -> bool:
        return self.disk.is_closed or self.cancelled()

    def _whole_pages(self) -> int:
        pages = 0
        for (start, stop), moved in zip(self.ranges, self._moved, strict=True):
            pages += moved
            if moved < stop - start:
                break
        return pages

    def memory(self, rows: np.ndarray) -> list[Any]:
        """Return the memory of a range's pages, in as few pieces as possible: their rows, or this thread's buffer."""
        if not self.is_in_place:
            return [self.disk.buffer()[: len(rows)]]
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        starts, stops = rows[[0, *breaks]].tolist(), (rows[[*(breaks - 1), -1]] + 1).tolist()
        return [self.host[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def digests(self, rows: np.ndarray) -> list[int]:
        """Return the checksum of each row."""
        return [xxhash.xxh3_64_intdigest(self.host[row]) for row in rows.tolist()]

    def place(self, part: slice) -> int:
        """Return the range's offset in the file."""
        return int(self.slots[part.start]) * self.disk.slot_bytes


class ReadJob(DiskJob):
    """Reads pages from the file."""

    def move(self, part: slice) -> int:
        disk, slots, rows = self.disk, self.slots[part], self.host_slots[part]
        whole, fault = disk.index.leading(slots, self.keys[part])
        if whole:
            rows = rows[:whole]
            arrived, failure = self._read(part, rows)
            if arrived < whole:
                whole, fault = arrived, failure
        if fault:
            disk.count_fault(fault)
            if fault not in ("missing", "key"):
                disk.index.clear(slots[whole : whole + 1])
        return whole

    def _read(self, part: slice, rows: np.ndarray) -> tuple[int, str]:
        """Read the first pages of a range into these rows. Returns how many are complete, and the fault of the next one."""
        disk, memory = self.disk, self.memory(rows)
        try:
            arrived = os.preadv(disk.file, memory, self.place(part)) // disk.slot_bytes
        except OSError:
            return 0, "read_error"
        if not self.is_in_place:
            self.host[rows[:arrived]] = memory[0][:arrived, : disk.page_bytes]
        expected = disk.index.checksums(self.slots[part])
        for at, digest in enumerate(self.digests(rows[:arrived])):
            if digest != expected[at]:
                return at, "checksum"
        return arrived, "short_read"


class WriteJob(DiskJob):
    """Writes pages to the file."""

    def move(self, part: slice) -> int:
        disk, slots, rows = self.disk, self.slots[part], self.host_slots[part]
        checksums, memory = self.digests(rows), self.memory(rows)
        if not self.is_in_place:
            memory[0][:, : disk.page_bytes] = self.host[rows]
        disk.index.clear(slots)
        try:
            whole = os.pwritev(disk.file, memory, self.place(part)) // disk.slot_bytes
        except OSError:
            whole = 0
        disk.index.fill(slots[:whole], self.keys[part][:whole], checksums[:whole])
        if whole < len(slots):
            disk.count_fault("write_error")
        return whole


def check_slots(slots: np.ndarray, pages: int, name: str) -> np.ndarray:
    """Return the slots as int64. Raises ValueError if one is out of range."""
    if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < pages):
        raise ValueError(f"{name} must lie in 0 ... {pages - 1}, not {int(slots.min())} ... {int(slots.max())}")
    return slots.astype(np.int64)
