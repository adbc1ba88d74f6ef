"""Copies pages between the GPU's pool and the host's, with the method that suits their size."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, get_args

import numpy as np
import torch

from kvsim.hardware.copy_rule import CopyRule, Method
from kvsim.kernels.page_copy import check_pools, copy_pages
from kvsim.substrate.hardware.memory.batch_memcpy import Blocks, copy_batch, copy_blocks, takes_blocks
from kvsim.substrate.hardware.memory.page_list import ALIGNED_ENTRIES, check_range, check_unique, upload_page_lists

Way = Literal["load", "store"]
WAYS: tuple[Way, ...] = get_args(Way)
PART_BYTES = 96 << 20
"""Smallest part, a group of layers, into which a load is split. A part costs about 0.6 ms of calls, and twice that in a busy
process: on an H200, parts of 32 MiB reached 40 GB/s, and 29 in a worker process, while parts of 64 MiB reach 54."""

FRAGMENT_BYTES = 1 << 15
"""Smallest fragment that is a copy of its own where pages cannot be one; below, staging is faster
(experiments/hardware/copies.md). A rule does not know of this, as the pools with which it was measured may be smaller."""


class TierCopy:
    """Copies pages in both directions between a layer-first GPU pool and a page-first host pool.

    ``gpu`` is ``[layer, page, fragment]``; ``host`` is pinned and ``[page, layer, fragment]``, a page contiguous there. Between
    pages there may be gaps, such as the shares of other GPUs.
    With ``unit_pages``, that many pages form a larger one, ``[layer, page, fragment]`` on the host: page ``n`` is in the larger
    page ``n // unit_pages``. A kernel copies them one by one, wherever they are on the GPU, and layer by layer, in which they
    are neighbours on the host; a list may begin or end inside a larger page.
    Copies are ordered with the current stream like any kernel. Calls do not wait for the GPU, but a driver whose queue is full
    blocks the caller, so submit long lists for copy engines from a thread. Streams that share a hardware queue wait for each
    other, and copies use several: set ``CUDA_DEVICE_MAX_CONNECTIONS=32`` before CUDA starts.
    The n-th page of one list is copied to the n-th page of the other. A list with a page that the pool does not have raises
    ValueError, and nothing is copied. A list with a duplicate page raises ValueError, too, but it is looked for while the GPU
    copies: the content of the target pages is then undefined.
    """

    def __init__(
        self,
        gpu: torch.Tensor,
        host: torch.Tensor,
        rule: CopyRule,
        *,
        lanes: int = 4,
        lane_bytes: int = 16 << 20,
        unit_pages: int = 1,
    ) -> None:
        if not host[0].is_contiguous():
            raise ValueError("a page of the host's pool must be contiguous [layer, fragment], without gaps")
        self.gpu = gpu.view(torch.uint8).transpose(0, 1)
        self.unit_pages, self.host_pages = unit_pages, host.shape[0] * unit_pages
        self.host = fragments_of(host.view(torch.uint8), unit_pages)
        self.unit_fragments = host.stride(0) * host.element_size() // self.host.shape[2]
        """Fragments from the beginning of one larger page to that of the next."""
        self.rule = rule
        self.fragment_bytes = check_pools(self.gpu, self.host)
        self.layers = self.gpu.shape[1]
        self.page_bytes = self.layers * self.fragment_bytes
        self.host_stride = self.host.stride(0)
        self.device = gpu.device
        self.takes_blocks = not gpu.is_cuda or self.layers == 1 or takes_blocks(self.gpu.stride(1))
        """Whether a page is one copy for the copy engines; otherwise each of its fragments is."""
        self.gpu_seen, self.host_seen = (np.zeros(pages, dtype=np.int32) for pages in (self.gpu.shape[0], self.host_pages))
        self.programs = 4 if not gpu.is_cuda else torch.cuda.get_device_properties(gpu.device).multi_processor_count
        lane_pages = max(1, lane_bytes // self.page_bytes)
        self.lane_list = torch.arange(lane_pages, dtype=torch.int32, device=self.device)
        self.loading, self.storing = ([Lane(self, lane_pages) for _ in range(lanes)] for _ in range(2))

    def close(self) -> None:
        """Release the pools at once: lanes refer to this object."""
        self.loading, self.storing = [], []

    def layerwise(self, pages: int) -> int:
        """Return how many layers of ``pages`` pages to load at a time, so that the first can be used before the last arrive."""
        parts = max(1, min(self.layers, pages * self.page_bytes // PART_BYTES))
        return -(-self.layers // parts)

    def load(
        self,
        host_pages: np.ndarray,
        gpu_pages: np.ndarray,
        method: Method | None = None,
        *,
        is_shared: bool = False,
        layers_at_once: int | None = None,
        submitted: Callable[[], None] | None = None,
    ) -> None:
        """Copy pages to the GPU by ``method``, or by the method that the rule chooses.

        ``is_shared`` means that pages are, or will be, stored meanwhile. All pages are copied in groups of ``layers_at_once``
        layers (by default all layers), the first layers first. ``submitted`` is called after each group has been submitted; an
        event recorded then in the current stream marks its end.
        """
        layers_at_once = layers_at_once or self.layers
        part_bytes = layers_at_once * self.fragment_bytes
        method = method or self._method(self.rule.load_method(self.fragment_bytes, part_bytes, is_shared=is_shared))
        lists = self._lists(gpu_pages, host_pages, method)
        for first in range(0, self.layers, layers_at_once):
            layers = slice(first, min(first + layers_at_once, self.layers))
            if method == "kernel" and lists is not None:
                source, target = self.host[:, layers], self.gpu[:, layers]
                copy_pages(source, target, lists[1], lists[0], programs=self.rule.programs, is_by_layer=self.unit_pages > 1)
            else:
                self._spread(self.loading, "load", gpu_pages, host_pages, lists, layers)
            if submitted is not None:
                submitted()
        self._check_unique(gpu_pages, host_pages)

    def store(
        self, gpu_pages: np.ndarray, host_pages: np.ndarray, method: Method | None = None, *, is_shared: bool = False
    ) -> None:
        """Copy pages to the host by ``method``, or by the method that the rule chooses.

        ``is_shared`` means that pages are, or will be, loaded meanwhile: the kernel then leaves room on the link for them.
        """
        method = method or self._method(self.rule.store_method(self.fragment_bytes, self.page_bytes))
        lists = self._lists(gpu_pages, host_pages, method)
        if method == "kernel" and lists is not None:
            pace = self.rule.store_beside_load_bytes_per_s if is_shared else None
            copy_pages(
                self.gpu,
                self.host,
                lists[0],
                lists[1],
                programs=self.rule.programs,
                bytes_per_s=pace,
                is_by_layer=self.unit_pages > 1,
            )
        else:
            self._spread(self.storing, "store", gpu_pages, host_pages, lists, slice(0, self.layers))
        self._check_unique(gpu_pages, host_pages)

    def _method(self, chosen: Method) -> Method:
        """Return the method that the rule has chosen, or the one that suits these pools.

        Only a kernel finds pages inside larger ones.
        """
        if self.unit_pages > 1:
            return "kernel"
        is_short = not self.takes_blocks and self.fragment_bytes < FRAGMENT_BYTES
        return "staged" if chosen == "memcpy" and is_short else chosen

    def _lists(self, gpu_pages: np.ndarray, host_pages: np.ndarray, method: Method) -> torch.Tensor | None:
        """Check the ranges of both lists and return them in GPU memory, as indices into ``gpu`` and ``host``.

        ``memcpy`` needs none there: only a kernel reads lists.
        """
        if len(gpu_pages) != len(host_pages):
            raise ValueError(f"{len(gpu_pages)} pages of the GPU do not match {len(host_pages)} pages of the host")
        check_range(gpu_pages, self.gpu.shape[0], name="gpu_pages")
        check_range(host_pages, self.host_pages, name="host_pages")
        if method == "memcpy":
            return None
        if self.unit_pages > 1:
            host_pages = host_pages // self.unit_pages * self.unit_fragments + host_pages % self.unit_pages
        return upload_page_lists(gpu_pages, host_pages, device=self.device)

    def _check_unique(self, gpu_pages: np.ndarray, host_pages: np.ndarray) -> None:
        check_unique(gpu_pages, self.gpu_seen, name="gpu_pages")
        check_unique(host_pages, self.host_seen, name="host_pages")

    def _spread(
        self,
        lanes: list["Lane"],
        way: Way,
        gpu_pages: np.ndarray,
        host_pages: np.ndarray,
        lists: torch.Tensor | None,
        layers: slice,
    ) -> None:
        """Distribute chunks of the lists over the lanes in turn, so that one lane's copies fill the gaps of the others.

        With lists in GPU memory pages are staged, without by memcpy. Where a page is one copy, one call for all of them suffices.
        """
        caller = torch.cuda.current_stream(self.device) if self.gpu.is_cuda else None
        begun = None if caller is None else caller.record_event()
        calls = 1 if lists is None and self.takes_blocks else 2 * len(lanes)
        chunk = max(1, -(-len(gpu_pages) // calls))
        if lists is not None:
            chunk = min(chunk, len(self.lane_list))
        if chunk > ALIGNED_ENTRIES and calls > 1:
            chunk -= chunk % ALIGNED_ENTRIES
        lanes = lanes[: -(-len(gpu_pages) // chunk)]
        for lane in lanes:
            lane.follow(begun)
        for turn, first in enumerate(range(0, len(gpu_pages), chunk)):
            part, lane = slice(first, first + chunk), lanes[turn % len(lanes)]
            with lane.active():
                if lists is not None:
                    getattr(lane, way)(host_pages[part], lists[0, part], layers)
                else:
                    lane.move(way, gpu_pages[part], host_pages[part], layers)
        for lane in lanes:
            lane.precede(caller)


class Lane:
    """A stream with its own staging buffer. The stream works in order, so the buffer is free when it is used again."""

    def __init__(self, tiers: TierCopy, pages: int) -> None:
        self.tiers = tiers
        self.pages = pages
        self.staging: torch.Tensor | None = None
        self.stream = torch.cuda.Stream(tiers.device, priority=-1) if tiers.gpu.is_cuda else None  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[None]:
        """Make the lane's stream the current one."""
        return torch.cuda.stream(self.stream)

    def follow(self, begun: "torch.cuda.Event | None") -> None:
        if self.stream is not None and begun is not None:
            self.stream.wait_event(begun)

    def precede(self, caller: "torch.cuda.Stream | None") -> None:
        if self.stream is not None and caller is not None:
            caller.wait_event(self.stream.record_event())

    def load(self, host_pages: np.ndarray, gpu_list: torch.Tensor, layers: slice) -> None:
        """Copy some layers of pages to the staging buffer, then scatter them to their places."""
        tiers, staging = self.tiers, self.buffer(len(host_pages), layers)
        copy_batch(self._staged(staging), self._hosted(host_pages, layers), staging[0].numel(), self.stream)
        copy_pages(staging, tiers.gpu[:, layers], tiers.lane_list[: len(host_pages)], gpu_list, programs=tiers.programs)

    def store(self, host_pages: np.ndarray, gpu_list: torch.Tensor, layers: slice) -> None:
        """Gather some layers of pages in the staging buffer, then copy them to the host."""
        tiers, staging = self.tiers, self.buffer(len(host_pages), layers)
        copy_pages(tiers.gpu[:, layers], staging, gpu_list, tiers.lane_list[: len(host_pages)], programs=tiers.programs)
        copy_batch(self._hosted(host_pages, layers), self._staged(staging), staging[0].numel(), self.stream)

    def move(self, way: Way, gpu_pages: np.ndarray, host_pages: np.ndarray, layers: slice) -> None:
        """Copy pages to their places: their layers are the rows of a block."""
        tiers, (page_stride, layer_stride, _) = self.tiers, self.tiers.gpu.stride()
        first = tiers.gpu.data_ptr() + layers.start * layer_stride
        gpu = Blocks(first + gpu_pages.astype(np.int64) * page_stride, layer_stride)
        host = Blocks(self._hosted(host_pages, layers), tiers.fragment_bytes)
        target, source = (gpu, host) if way == "load" else (host, gpu)
        copy_blocks(target, source, layers.stop - layers.start, tiers.fragment_bytes, self.stream)

    def buffer(self, pages: int, layers: slice) -> torch.Tensor:
        """Return the part of the staging buffer for some layers of ``pages`` pages. The buffer is allocated on first use."""
        tiers, shape = self.tiers, (pages, layers.stop - layers.start, self.tiers.fragment_bytes)
        if self.staging is None:
            self.staging = torch.empty(self.pages * tiers.page_bytes, dtype=torch.uint8, device=tiers.device)
        return self.staging[: shape[0] * shape[1] * shape[2]].view(shape)

    def _staged(self, staging: torch.Tensor) -> np.ndarray:
        return staging.data_ptr() + np.arange(staging.shape[0], dtype=np.int64) * staging[0].numel()

    def _hosted(self, host_pages: np.ndarray, layers: slice) -> np.ndarray:
        first = self.tiers.host.data_ptr() + layers.start * self.tiers.fragment_bytes
        addresses: np.ndarray = first + host_pages.astype(np.int64) * self.tiers.host_stride
        return addresses


def fragments_of(host: torch.Tensor, unit_pages: int) -> torch.Tensor:
    """Return a host pool ``[larger page, layer, fragments]`` as ``[start, layer, fragment]``, without copying.

    Each fragment of the pool is a start: that of a page in its first layer is followed, a layer of the larger page further on,
    by that in the second. Without larger pages, it is the pool itself. Raises ValueError if there are too many for an int32.
    """
    if unit_pages == 1:
        return host
    pages, layers, layer_bytes = host.shape
    fragment_bytes = layer_bytes // unit_pages
    starts = (pages - 1) * (host.stride(0) // fragment_bytes) + unit_pages
    if starts > torch.iinfo(torch.int32).max:
        raise ValueError(f"the host's pool has {starts} fragments, more than a kernel can number: decrease it")
    return host.as_strided((starts, layers, fragment_bytes), (fragment_bytes, host.stride(1), 1))
