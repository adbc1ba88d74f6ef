"""Measures the rates at which a disk tier reads and writes pages, by page size and number of threads."""

import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvsim.substrate.hardware.disk.disk_file import DiskFile

DRAWN_BYTES = 4 << 20
LATENCY_PAGES = 100


class DiskRates:
    """Writes pages to a new disk file in ``folder``, reads them back, and removes the file.

    Pages are adjacent, like those of a prompt in a tier that inserts and evicts whole nodes, so one system call reads or writes
    several. The times include all work of the disk tier: checksums, the index and the bytes. ``is_direct`` is False if the
    system's page cache was used. Raises OSError if the disk is full or if pages do not come back intact.
    """

    def __init__(self, folder: Path, *, most_bytes: int, most_pages: int, seed: int) -> None:
        self.folder = folder
        self.most_bytes, self.most_pages = most_bytes, most_pages
        """Limits of one list of pages."""
        drawn = np.random.default_rng(seed).bytes(min(DRAWN_BYTES, most_bytes))
        self.memory = np.frombuffer(mmap.mmap(-1, most_bytes), dtype=np.uint8)
        self.memory[:] = np.resize(np.frombuffer(drawn, dtype=np.uint8), most_bytes)
        self.is_direct = True

    def bytes_per_s(self, page_bytes: int, threads: int) -> tuple[float, float, float]:
        """Return the rate of reading a long list of pages, of writing it, and the total of both at the same time."""
        pages = max(1, min(self.most_pages, self.most_bytes // page_bytes))
        with self._open(pages, page_bytes, threads) as disk:
            write_s = self._seconds(disk, disk.write, np.arange(pages))
            read_s = self._seconds(disk, disk.read, np.arange(pages))
            both_s = self._both_seconds(disk, np.arange(pages), write_s / (read_s + write_s))
        n_bytes = pages * page_bytes
        return n_bytes / read_s, n_bytes / write_s, n_bytes / both_s

    def latency_s(self, page_bytes: int) -> float:
        """Return the median time to read one page from an idle disk."""
        pages = min(LATENCY_PAGES, self.most_bytes // page_bytes)
        with self._open(pages, page_bytes, 1) as disk:
            self._seconds(disk, disk.write, np.arange(pages))
            return statistics.median(self._seconds(disk, disk.read, np.array([page])) for page in range(pages))

    def repeated(self, page_bytes: int, threads: int, n_bytes: int, count: int) -> tuple[list[float], list[float]]:
        """Return the times of ``count`` equal reads and as many equal writes, of ``n_bytes`` but at least one page."""
        pages = max(1, min(n_bytes, self.most_bytes) // page_bytes)
        with self._open(pages, page_bytes, threads) as disk:
            writes = [self._seconds(disk, disk.write, np.arange(pages)) for _ in range(count)]
            reads = [self._seconds(disk, disk.read, np.arange(pages)) for _ in range(count)]
        return reads, writes

    @contextmanager
    def _open(self, pages: int, page_bytes: int, threads: int) -> Iterator[DiskFile]:
        with TemporaryDirectory(dir=self.folder, prefix="kvsim-calibrate-") as inner:
            disk = DiskFile(Path(inner), pages=pages, page_bytes=page_bytes, threads=threads)
            self.is_direct = disk.is_direct
            try:
                yield disk
            finally:
                disk.close()

    def _seconds(self, disk: DiskFile, move: Callable[..., "Future[int]"], order: np.ndarray) -> float:
        """Return the time from the request for pages in this order to the last byte."""
        start = time.perf_counter()
        self._wait(disk, len(order), self._start(disk, move, order))
        return time.perf_counter() - start

    def _both_seconds(self, disk: DiskFile, order: np.ndarray, read_share: float) -> float:
        """Return the time to read the first pages while the others are written; each alone would take about as long."""
        reads = round(read_share * len(order))
        start = time.perf_counter()
        read, written = self._start(disk, disk.read, order[:reads]), self._start(disk, disk.write, order[reads:])
        self._wait(disk, reads, read)
        self._wait(disk, len(order) - reads, written)
        return time.perf_counter() - start

    def _start(self, disk: DiskFile, move: Callable[..., "Future[int]"], order: np.ndarray) -> "Future[int]":
        host = self.memory[: disk.pages * disk.page_bytes].reshape(disk.pages, disk.page_bytes)
        keys = [page.to_bytes(16) for page in order.tolist()]
        return move(order, keys, host, order, cancelled=lambda: False)

    def _wait(self, disk: DiskFile, pages: int, arrived: "Future[int]") -> None:
        if arrived.result() < pages:
            raise OSError(0, f"{pages - arrived.result()} of {pages} pages were lost ({disk.faults})")
