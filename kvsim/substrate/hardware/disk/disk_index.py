"""A persistent index of which page is in which slot of a disk file, so that the next process finds the pages."""

import os
from pathlib import Path
from struct import Struct
from threading import Lock

import numpy as np

KEY_BYTES = 16
ENTRY = np.dtype([("key", "<u8", 2), ("checksum", "<u8"), ("order", "<u8"), ("seal", "<u8")])
"""The entry of a slot: key and checksum of its page, number of the write, and an odd hash of these. A seal of 0 means that the
slot has no complete page."""
LAST_ORDER = 1 << 62
"""No disk is written to that often."""
HEADER = Struct("<16sQ")
"""File type and bytes per page."""
HEADER_BYTES = 4096
MAGIC = b"kvsim pages 1\n\0\0"


def reserve(file: int, n_bytes: int, path: Path) -> int:
    """Resize an open file to exactly ``n_bytes``, reserve the disk space, and return the previous size.

    Raises OSError, leaving the size unchanged, if the space is not available.
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
    """A table in a memory-mapped file, with one entry per slot.

    Before a slot is filled, its entry is cleared; it is set again when the bytes are in the file. If the process is killed at
    any time, every entry therefore refers to a complete page. Damage by power loss or disk faults is only detected by the
    checksum. The methods may be called from several threads, for different slots.
    """

    def __init__(self, path: Path, *, pages: int, page_bytes: int) -> None:
        """Open the index, or create it. Entries of slots from ``pages`` on are dropped, and damaged ones.

        Raises ValueError if the file is not an index or has another page size, and OSError if it cannot be used or the disk is
        full.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
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
        orders, seals = self._entries["order"], self._entries["seal"]
        seals[(self._seals(np.arange(pages)) != seals) | (orders > LAST_ORDER)] = 0
        self._orders = Lock()
        self._next_order = int(orders[seals != 0].max(initial=0)) + 1

    def _check_header(self, page_bytes: int) -> bool:
        """Check the header, and return whether the index has yet to be created."""
        header = os.pread(self._file, HEADER.size, 0)
        if not any(header) or len(header) < HEADER.size and HEADER.pack(MAGIC, page_bytes).startswith(header):
            return True
        header = header.ljust(HEADER.size, b"\0")
        magic, there = HEADER.unpack(header)
        if magic != MAGIC:
            raise ValueError(f"{self.path} is not an index of pages: choose another folder")
        if there != page_bytes:
            raise ValueError(f"{self.path} has pages of {there:,} bytes, not {page_bytes:,}: choose another folder or empty it")
        return False

    def leading(self, slots: np.ndarray, keys: np.ndarray) -> tuple[int, str]:
        """Return how many leading slots hold a complete page with the expected key, and the fault of the next one.

        The fault is ``missing`` (no complete page), ``key`` (another page) or empty (none). ``keys`` come from ``packed``.
        """
        entries = self._entries[slots]
        is_missing = entries["seal"] == 0
        wrong = np.flatnonzero(is_missing | (entries["key"] != keys).any(axis=1))
        if not len(wrong):
            return len(slots), ""
        return int(wrong[0]), "missing" if is_missing[wrong[0]] else "key"

    def checksums(self, slots: np.ndarray) -> list[int]:
        """Return the checksums of the slots' pages."""
        checksums: list[int] = self._entries["checksum"][slots].tolist()
        return checksums

    def clear(self, slots: np.ndarray) -> None:
        """Mark the slots as having no complete page."""
        self._entries["seal"][slots] = 0

    def fill(self, slots: np.ndarray, keys: np.ndarray, checksums: list[int]) -> None:
        """Mark the slots, cleared before, as holding complete pages. ``keys`` come from ``packed``."""
        with self._orders:
            first = self._next_order
            self._next_order += len(slots)
        entries = self._entries
        entries["key"][slots] = keys
        entries["checksum"][slots] = checksums
        entries["order"][slots] = np.arange(first, first + len(slots))
        entries["seal"][slots] = self._seals(slots)

    def recovered(self) -> dict[bytes, int]:
        """Return the slot of each complete page by key, in order of writing; of several copies, only the last written."""
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
        """Release the index for other processes. No method may be called afterwards."""
        del self._entries
        os.close(self._file)

    def _seals(self, slots: np.ndarray) -> np.ndarray:
        """Return the seals of these slots' entries: slot and fields mixed by MurmurHash3's 64-bit finalizer (Appleby, 2011)."""
        entries = self._entries[slots]
        seals = slots.astype(np.uint64)
        for words in (entries["key"][:, 0], entries["key"][:, 1], entries["checksum"], entries["order"]):
            seals = (seals ^ words) + np.uint64(0x9E3779B97F4A7C15)
            seals = (seals ^ (seals >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
            seals = (seals ^ (seals >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
            seals = seals ^ (seals >> np.uint64(33))
        return seals | np.uint64(1)


def packed(keys: list[bytes]) -> np.ndarray:
    """Return keys as rows of two 64-bit words. Raises ValueError for a key that does not have 16 bytes."""
    wrong = next((key for key in keys if len(key) != KEY_BYTES), None)
    if wrong is not None:
        raise ValueError(f"a page's key must have {KEY_BYTES} bytes, not {len(wrong)}")
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)
