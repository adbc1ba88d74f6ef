"""The memory behind the slots of a GPU tier, and other GPUs' access to it."""

import gc

import numpy as np
import torch

from kvsim.errors import UsageError
from kvsim.kernels.page_copy import check_pools, copy_pages
from kvsim.substrate.hardware.memory import ipc
from kvsim.substrate.hardware.memory.available import GIB, gib
from kvsim.substrate.hardware.memory.host_pool import mapped
from kvsim.substrate.hardware.memory.page_list import check_range, check_unique, upload_page_lists
from kvsim.substrate.hardware.memory.raw_tensor import raw_tensor
from kvsim.substrate.hardware.orders import PoolAddress

GPU_RESERVE_BYTES = 4 * GIB
"""GPU memory left for activations, staging buffers and the libraries."""
SEND_PROGRAMS = 32
"""Programs of the kernel that copies pages to another GPU."""


class GpuPool:
    """A GPU's pool ``pages``, ``[layer, page, fragment]`` of uint8; a fragment is a page's bytes in one layer.

    Other processes find it by its ``address``. Without a GPU it is host memory: ``file``'s, if a descriptor is given. Pages
    that have not been filled yet are random bits on a GPU (``random_bytes``), and 0 in host memory.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        fragment_bytes: int,
        weight_bytes: int,
        device: torch.device,
        state_bytes: int = 0,
        file: int | None = None,
    ) -> None:
        """Allocate the pool, leaving room for weights and recurrent states. Raises UsageError if memory is insufficient."""
        self.device, self.file = device, file
        n_bytes = layers * pages * fragment_bytes
        if device.type == "cuda":
            check_room(n_bytes, weight_bytes, state_bytes, device)
        try:
            if file is None:
                memory = random_bytes(n_bytes, device) if device.type == "cuda" else torch.zeros(n_bytes, dtype=torch.uint8)
            else:
                memory = shared_bytes(n_bytes, file)
        except torch.OutOfMemoryError as error:
            raise UsageError(f"tiers.gpu.capacity: the GPU cannot allocate {gib(n_bytes)}; decrease it") from error
        self.pages = memory.view(layers, pages, fragment_bytes)
        try:
            check_pools(self.pages.transpose(0, 1))
        except ValueError as error:
            raise UsageError(f"page_tokens: {error}; choose another page size") from error

    @property
    def address(self) -> PoolAddress:
        """Where another process finds this pool."""
        count = self.pages.shape[1]
        if self.device.type != "cuda":
            return PoolAddress(pages=count, file=self.file)
        handle, offset = ipc.exported(self.pages.data_ptr())
        return PoolAddress(pages=count, handle=handle, offset=offset)

    def close(self) -> None:
        """Free the memory."""
        self.pages = torch.empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class PeerPools:
    """The pools of other GPUs of this host; a kernel sends pages by writing to their memory."""

    def __init__(self, own: torch.Tensor, addresses: dict[int, PoolAddress]) -> None:
        """Open the pools at ``addresses``, by GPU number. Their pages have the same layers and bytes as those of ``own``.

        Raises UsageError if the GPUs cannot access each other's memory.
        """
        self.own = own.transpose(0, 1)
        self._opened: list[int] = []
        self.pools = {number: self._open(own, address).transpose(0, 1) for number, address in addresses.items()}
        longest = max((pool.shape[0] for pool in self.pools.values()), default=0)
        self._seen = np.zeros(max(longest, self.own.shape[0]), dtype=np.int32)

    def send(self, peer: int, sources: np.ndarray, targets: np.ndarray, *, programs: int = SEND_PROGRAMS) -> None:
        """Copy pages to another GPU's pool on the current stream, without waiting for it.

        Raises ValueError for a list with a page that a pool does not have, or with a duplicate page: the content of the target
        pages is then undefined.
        """
        pool = self.pools[peer]
        check_range(sources, self.own.shape[0], name="sources")
        check_range(targets, pool.shape[0], name="targets")
        lists = upload_page_lists(sources, targets, device=self.own.device)
        copy_pages(self.own, pool, lists[0], lists[1], programs=programs)
        check_unique(sources, self._seen, name="sources")
        check_unique(targets, self._seen, name="targets")

    def close(self) -> None:
        """Give up the access."""
        self.pools = {}
        for pointer in self._opened:
            ipc.close(pointer)
        self._opened = []

    def _open(self, own: torch.Tensor, address: PoolAddress) -> torch.Tensor:
        layers, _, fragment_bytes = own.shape
        shape = layers, address.pages, fragment_bytes
        if address.file is not None:
            return shared_bytes(layers * address.pages * fragment_bytes, address.file).view(shape)
        pointer = ipc.opened(address.handle)
        self._opened.append(pointer)
        return raw_tensor(pointer + address.offset, layers * address.pages * fragment_bytes, own.device).view(shape)


def random_bytes(n_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory full of random bits.

    Zeros would make steps faster: on an H200, attention to pages of zeros made prefill take 4 % less time, because products
    of zeros need less power, and a GPU at its power limit then runs at a higher clock.
    """
    words = torch.empty(-(-n_bytes // 8), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return words.random_(torch.iinfo(torch.int64).min, None, generator=generator).view(torch.uint8)[:n_bytes]


def shared_bytes(n_bytes: int, file: int) -> torch.Tensor:
    """Return the memory of a shared file."""
    return torch.from_numpy(np.frombuffer(mapped(n_bytes, file), dtype=np.uint8))


def check_room(gpu_bytes: int, weight_bytes: int, state_bytes: int, device: torch.device) -> None:
    """Raise UsageError unless the GPU has room for the pool, the weights, recurrent states and activations.

    What torch still keeps of work that has ended, such as a calibration's, counts as free.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if gpu_bytes + weight_bytes + state_bytes + GPU_RESERVE_BYTES > free:
        states = (
            f" {gib(state_bytes)} of recurrent states (engine.max_running_requests, tiers.gpu.states)," if state_bytes else ""
        )
        raise UsageError(
            f"tiers.gpu.capacity: {gib(gpu_bytes)},{states} {gib(weight_bytes)} of weights and {gib(GPU_RESERVE_BYTES)} for "
            f"activations do not fit: the GPU has {gib(free)} free; decrease it"
        )
