"""How fast a disk reads and writes whole pages, by their size and by how many requests are under way."""

import mmap
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

WRITTEN_BYTES = 4 << 20
ALIGNMENT_BYTES = 4096


class DiskRates:
    """Reads and writes pages at random places of a file that it makes in ``folder``, and removes at the end.

    Each thread has one request under way, as each thread of a disk tier has. The system's page cache is passed by (O_DIRECT);
    where the file system refuses that, ``is_direct`` is False and what is measured may be the cache. Raises OSError if the
    folder cannot hold the file.
    """

    def __init__(self, folder: Path, *, file_bytes: int, seconds: float, seed: int) -> None:
        self.folder = folder
        self.file_bytes = file_bytes
        self.seconds = seconds
        """How long each cell is measured."""
        self.rng = np.random.default_rng(seed)
        self.is_direct = True

    @contextmanager
    def open(self) -> Iterator[int]:
        """The file, filled, as a descriptor."""
        with NamedTemporaryFile(dir=self.folder, prefix="kvsim-calibrate-") as named:
            os.posix_fallocate(named.fileno(), 0, self.file_bytes)
            file, self.is_direct = open_direct(Path(named.name))
            try:
                content = buffer(WRITTEN_BYTES)
                content[:] = self.rng.bytes(WRITTEN_BYTES)
                for place in range(0, self.file_bytes, WRITTEN_BYTES):
                    os.pwrite(file, memoryview(content)[: self.file_bytes - place], place)
                os.fsync(file)
                yield file
            finally:
                os.close(file)

    def latency_s(self, file: int) -> float:
        """The median time of reading one block, nothing else being under way."""
        into = buffer(ALIGNMENT_BYTES)
        times = []
        for place in self.rng.integers(0, self.file_bytes // ALIGNMENT_BYTES, 100):
            start = time.perf_counter()
            os.preadv(file, [into], int(place) * ALIGNMENT_BYTES)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def bytes_per_s(self, file: int, *, page_bytes: int, depth: int, is_write: bool) -> float:
        """The rate of ``depth`` threads, each of which reads or writes one page after another."""
        pages = self.file_bytes // page_bytes
        orders = [self.rng.permutation(pages) for _ in range(depth)]
        contents = [buffer(page_bytes) for _ in range(depth)]
        for content in contents:
            content[:] = self.rng.bytes(page_bytes)
        move = os.pwritev if is_write else os.preadv
        start = time.perf_counter()
        deadline = start + self.seconds

        def run(order: np.ndarray, content: mmap.mmap) -> int:
            done = 0
            while time.perf_counter() < deadline or not done:
                done += move(file, [content], int(order[done // page_bytes % pages]) * page_bytes)
            return done

        with ThreadPoolExecutor(depth) as threads:
            moved = sum(threads.map(run, orders, contents))
        if is_write:
            os.fdatasync(file)
        return moved / (time.perf_counter() - start)


def buffer(n_bytes: int) -> mmap.mmap:
    """Memory that begins at a block's boundary, as O_DIRECT demands."""
    return mmap.mmap(-1, n_bytes)


def open_direct(path: Path) -> tuple[int, bool]:
    """The file, and whether the page cache is passed by."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDWR), False
