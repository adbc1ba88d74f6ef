"""Which page lies in which slot of a disk file, kept so that the next process finds the pages again."""

import fcntl
import os
from pathlib import Path
from struct import Struct
from threading import Lock

import numpy as np

KEY_BYTES = 16
ENTRY = np.dtype([("key", "<u8", 2), ("checksum", "<u8"), ("order", "<u8"), ("seal", "<u8")])
"""One slot: its page's key and checksum, the number of the write, and a hash of all that, odd. A seal of 0: no whole page."""
HEADER = Struct("<16sQ")
"""What kind of file this is, and the bytes of a page."""
HEADER_BYTES = 4096
MAGIC = b"kvsim pages 1\n\0\0"


def reserve(file: int, n_bytes: int, path: Path) -> int:
    """Give an open file exactly ``n_bytes`` and room on the disk for them. Returns the bytes that it had.

    Raises OSError, and leaves the file as it was, if there is no such room.
    """
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except OSError as error:
        os.ftruncate(file, before)
        raise OSError(error.errno, f"cannot reserve {n_bytes:,} bytes: {error.strerror}", str(path)) from None
    os.ftruncate(file, n_bytes)
    return before


class DiskIndex:
    """A table in a mapped file, an entry for each slot.

    A slot that is to be filled is first made empty, and named again when its bytes are in the file: whenever the process is
    killed, an entry stands for a page that was whole. What a loss of power or a fault of the disk may have done to the bytes
    only their checksum tells. The methods may be called from several threads, for different slots.
    """

    def __init__(self, path: Path, *, pages: int, page_bytes: int) -> None:
        """Open the index, or make one. Slots from ``pages`` on are forgotten.

        Raises ValueError for a file that is no index, or one of pages of another size, and OSError if another process has it
        or there is no room for it.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock_file()
            is_new = self._check_header(page_bytes)
            if is_new:
                os.ftruncate(self._file, 0)
            reserve(self._file, HEADER_BYTES + pages * ENTRY.itemsize, path)
            if is_new:
                os.pwrite(self._file, HEADER.pack(MAGIC, page_bytes), 0)
            self._entries: np.ndarray = np.memmap(path, ENTRY, "r+", HEADER_BYTES, (pages,))
        except BaseException:
            os.close(self._file)
            raise
        self._entries["seal"][self._seals(np.arange(pages)) != self._entries["seal"]] = 0
        self._orders = Lock()
        self._next_order = int(self._entries["order"].max()) + 1

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, "another process uses these pages", str(self.path)) from None

    def _check_header(self, page_bytes: int) -> bool:
        """Whether the index has yet to be made."""
        header = os.pread(self._file, HEADER.size, 0).ljust(HEADER.size, b"\0")
        if not any(header):
            return True
        magic, there = HEADER.unpack(header)
        if magic != MAGIC:
            raise ValueError(f"{self.path} is not an index of pages: choose another folder")
        if there != page_bytes:
            raise ValueError(f"{self.path} is of pages of {there:,} bytes, not {page_bytes:,}: choose another folder or empty it")
        return False

    def leading(self, slots: np.ndarray, keys: np.ndarray) -> tuple[int, str]:
        """How many of the slots, from the first on, hold a whole page with that key, and what is wrong with the next one.

        That is ``missing`` (no whole page), ``key`` (another one) or nothing. ``keys`` are as ``packed`` returns them.
        """
        entries = self._entries[slots]
        is_missing = entries["seal"] == 0
        wrong = np.flatnonzero(is_missing | (entries["key"] != keys).any(axis=1))
        if not len(wrong):
            return len(slots), ""
        return int(wrong[0]), "missing" if is_missing[wrong[0]] else "key"

    def checksums(self, slots: np.ndarray) -> list[int]:
        """The checksums of the slots' pages."""
        checksums: list[int] = self._entries["checksum"][slots].tolist()
        return checksums

    def clear(self, slots: np.ndarray) -> None:
        """The slots hold no whole pages from now on."""
        self._entries["seal"][slots] = 0

    def fill(self, slots: np.ndarray, keys: np.ndarray, checksums: list[int]) -> None:
        """The slots, cleared before, hold whole pages now. ``keys`` are as ``packed`` returns them."""
        with self._orders:
            first = self._next_order
            self._next_order += len(slots)
        entries = self._entries
        entries["key"][slots] = keys
        entries["checksum"][slots] = checksums
        entries["order"][slots] = np.arange(first, first + len(slots))
        entries["seal"][slots] = self._seals(slots)

    def recovered(self) -> dict[bytes, int]:
        """The slot of each whole page by its key, what was written first at the front; of several copies the last one."""
        slots = np.flatnonzero(self._entries["seal"])
        slots = slots[np.argsort(self._entries["order"][slots])]
        keys = self._entries["key"][slots].tobytes()
        found: dict[bytes, int] = {}
        for at, slot in enumerate(slots.tolist()):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            found.pop(key, None)
            found[key] = slot
        return found

    def close(self) -> None:
        """Let another process have the index. Nothing else may be called after that."""
        del self._entries
        os.close(self._file)

    def _seals(self, slots: np.ndarray) -> np.ndarray:
        """What the entries of these slots must be sealed with: all mixed by MurmurHash3's 64-bit finalizer (Appleby, 2011)."""
        entries = self._entries[slots]
        seals = slots.astype(np.uint64)
        for words in (entries["key"][:, 0], entries["key"][:, 1], entries["checksum"], entries["order"]):
            seals = (seals ^ words) + np.uint64(0x9E3779B97F4A7C15)
            seals = (seals ^ (seals >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
            seals = (seals ^ (seals >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
            seals = seals ^ (seals >> np.uint64(33))
        return seals | np.uint64(1)


def packed(keys: list[bytes]) -> np.ndarray:
    """Keys as rows of two words. Raises ValueError for a key that has not 16 bytes."""
    wrong = next((key for key in keys if len(key) != KEY_BYTES), None)
    if wrong is not None:
        raise ValueError(f"a page's key has {KEY_BYTES} bytes, not {len(wrong)}")
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)
