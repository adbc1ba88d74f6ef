"""The memory behind the slots of the CPU tier."""

import mmap
import os
from contextlib import suppress

import numpy as np
import torch

from kvsim.errors import UsageError
from kvsim.substrate.hardware.memory.available import available_bytes, gib

REGISTER_PORTABLE_AND_MAPPED = 1 | 2
"""``cudaHostRegisterPortable | cudaHostRegisterMapped``."""


def shared_file(name: str, n_bytes: int) -> int:
    """Create shared memory without a name in any file system and return its descriptor.

    It is freed when the last process that has it open has ended, however that happens.
    """
    file = os.memfd_create(f"kvsim-{name}", os.MFD_CLOEXEC)
    os.ftruncate(file, n_bytes)
    return file


def mapped(n_bytes: int, file: int | None = None) -> mmap.mmap:
    """Map private memory, or that of a shared file. In huge pages, where the system has them."""
    if file is None:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(file, n_bytes, flags=mmap.MAP_SHARED)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class HostPool:
    """Host memory for ``pages`` pages of ``page_bytes`` bytes. Begins at a multiple of 4096 bytes.

    With ``file``, a descriptor of ``shared_file``, several processes can map the same pages. ``setting`` is the one that decides
    the size. The same holds for recurrent states that have their own memory.
    """

    def __init__(self, pages: int, page_bytes: int, file: int | None = None, *, setting: str = "tiers.cpu.capacity") -> None:
        """Allocate or map the pool. Raises UsageError if memory is insufficient."""
        self.pages, self.page_bytes, self.file, self.setting = pages, page_bytes, file, setting
        n_bytes = pages * page_bytes
        try:
            self._map: mmap.mmap | None = mapped(n_bytes, file)
        except OSError as error:
            raise UsageError(f"{setting}: cannot allocate {gib(n_bytes)}: {error.strerror}; decrease it") from error
        # torch's own pinned allocator would round the size up to a power of two.
        self._bytes = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        self._is_pinned = False

    @property
    def rows(self) -> np.ndarray:
        """The pool as ``[page, bytes]``."""
        rows: np.ndarray = self._bytes.view(self.pages, self.page_bytes).numpy()
        return rows

    def share(self, layers: int, rank: int = 0, ranks: int = 1, *, unit_pages: int = 1) -> torch.Tensor:
        """Return a rank's share of each page as ``[page, layer, fragment]``; with one rank, all of it.

        ``unit_pages`` pages form a larger one, ``[layer, fragments]``: those of a layer are neighbours there.
        """
        return self._bytes.view(self.pages // unit_pages, ranks, layers, -1)[:, rank]

    def pin(self) -> None:
        """Let this process's GPUs access the pool. Raises UsageError if CUDA refuses."""
        n_bytes = self._bytes.numel()
        refused = int(
            torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), n_bytes, REGISTER_PORTABLE_AND_MAPPED)  # type: ignore[no-untyped-call]
        )
        if refused:
            raise UsageError(
                f"{self.setting}: CUDA cannot pin {gib(n_bytes)} (error {refused}): decrease it, or raise the limit on "
                "locked memory (ulimit -l)"
            )
        self._is_pinned = True

    def close_file(self) -> None:
        """Close the shared file. The mappings of all processes stay."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def close(self) -> None:
        """Release the memory."""
        self.close_file()
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
            self._is_pinned = False
        self._bytes, self._map = torch.empty(0, dtype=torch.uint8), None


def check_host_room(gpu_bytes: int, host_bytes: int, weight_bytes: int, device: torch.device) -> None:
    """Raise UsageError unless the host has memory for its pools and, without a GPU, for what would be in GPU memory."""
    available = available_bytes()
    if device.type == "cuda":
        if host_bytes > available:
            raise UsageError(
                f"tiers.cpu.capacity: {gib(host_bytes)} of pinned memory needed, only {gib(available)} available: decrease it"
            )
    elif gpu_bytes + host_bytes + weight_bytes > available:
        raise UsageError(
            f"tiers: without a GPU, both tiers and the weights are in host memory: {gib(gpu_bytes)} + {gib(host_bytes)} "
            f"+ {gib(weight_bytes)}, but only {gib(available)} are available: decrease the tiers, or set model=tiny"
        )
