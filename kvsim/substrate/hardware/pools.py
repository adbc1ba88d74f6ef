"""The memory behind the slots of the GPU and CPU tiers."""

import mmap
from contextlib import suppress

import numpy as np
import torch

from kvsim.errors import UsageError
from kvsim.kernels.page_copy import check_pools
from kvsim.substrate.hardware.memory import GIB, available_bytes, gib

GPU_RESERVE_BYTES = 4 * GIB
"""GPU memory left for activations, staging buffers and the libraries."""
REGISTER_PORTABLE_AND_MAPPED = 1 | 2
"""``cudaHostRegisterPortable | cudaHostRegisterMapped``."""


class Pools:
    """Memory for pages on the GPU and on the host.

    ``gpu`` is ``[layer, page, fragment]``; a fragment is a page's bytes in one layer. ``host`` is ``[page, layer, fragment]``
    in pinned memory, so a page is contiguous there; None without a CPU tier. Both hold bytes (uint8). The host's pool begins at
    a multiple of 4096 bytes. Without a GPU, both are pageable host memory.
    """

    def __init__(
        self, *, layers: int, fragment_bytes: int, gpu_pages: int, cpu_pages: int, weight_bytes: int, device: torch.device
    ) -> None:
        """Allocate both pools, leaving room for ``weight_bytes`` of weights. Raises UsageError if memory is insufficient."""
        self.device = device
        self.page_bytes = layers * fragment_bytes
        self._map: mmap.mmap | None = None
        self._is_registered = False
        gpu_bytes, host_bytes = gpu_pages * self.page_bytes, cpu_pages * self.page_bytes
        self._check_room(gpu_bytes, host_bytes, weight_bytes)
        try:
            self.gpu = torch.zeros((layers, gpu_pages, fragment_bytes), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise UsageError(f"tiers.gpu.capacity: the GPU cannot allocate {gib(gpu_bytes)}; decrease it") from error
        try:
            check_pools(self.gpu.transpose(0, 1))
        except ValueError as error:
            raise UsageError(f"page_tokens: {error}; choose another page size") from error
        self.host = self._pinned(host_bytes).view(cpu_pages, layers, fragment_bytes) if cpu_pages else None

    @property
    def rows(self) -> np.ndarray:
        """The host's pool as ``[page, bytes]``."""
        assert self.host is not None
        rows: np.ndarray = self.host.view(self.host.shape[0], self.page_bytes).numpy()
        return rows

    def close(self) -> None:
        """Free the memory."""
        if self._is_registered and self.host is not None:
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())  # type: ignore[no-untyped-call]
            self._is_registered = False
        self.gpu, self.host, self._map = torch.empty(0), None, None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_room(self, gpu_bytes: int, host_bytes: int, weight_bytes: int) -> None:
        available = available_bytes()
        if self.device.type != "cuda":
            wanted = gpu_bytes + host_bytes + weight_bytes
            if wanted > available:
                raise UsageError(
                    f"tiers: without a GPU, both tiers and the weights are in host memory: {gib(gpu_bytes)} + {gib(host_bytes)} "
                    f"+ {gib(weight_bytes)}, but only {gib(available)} are available: decrease the tiers, or set model=tiny"
                )
            return
        free = torch.cuda.mem_get_info(self.device)[0]
        if gpu_bytes + weight_bytes + GPU_RESERVE_BYTES > free:
            raise UsageError(
                f"tiers.gpu.capacity: {gib(gpu_bytes)}, {gib(weight_bytes)} of weights and {gib(GPU_RESERVE_BYTES)} for "
                f"activations do not fit: the GPU has {gib(free)} free; decrease it"
            )
        if host_bytes > available:
            raise UsageError(
                f"tiers.cpu.capacity: {gib(host_bytes)} of pinned memory needed, only {gib(available)} available: decrease it"
            )

    def _pinned(self, n_bytes: int) -> torch.Tensor:
        """Allocate pinned, page-aligned memory. torch's own pinned allocator would round the size up to a power of two."""
        try:
            self._map = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UsageError(f"tiers.cpu.capacity: cannot allocate {gib(n_bytes)}: {error.strerror}; decrease it") from error
        with suppress(OSError):  # where the system has no huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        if self.device.type == "cuda":
            refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), n_bytes, REGISTER_PORTABLE_AND_MAPPED))  # type: ignore[no-untyped-call]
            if refused:
                raise UsageError(
                    f"tiers.cpu.capacity: CUDA cannot pin {gib(n_bytes)} (error {refused}): decrease it, or raise the limit on "
                    "locked memory (ulimit -l)"
                )
            self._is_registered = True
        return memory
