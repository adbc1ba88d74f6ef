"""Copies of pages by the GPU's copy engines in other ways than kvsim's own, for copy_variants.py.

Without a GPU, the same addresses are copied by the processor.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvsim.substrate.hardware.memory.batch_memcpy import answered, copy_batch, driver
from kvsim.substrate.hardware.memory.tier_copy import TierCopy, Way

UNIFIED = 4
"""``CU_MEMORYTYPE_UNIFIED``: the driver finds out which memory an address is in."""


class Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the CUDA driver API."""

    _fields_ = (
        *(
            (f"{side}_{name}", kind)
            for side in ("source", "target")
            for name, kind in (
                ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_int), ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )  # fmt: skip


Stream = torch.cuda.Stream | None
Side = tuple[int, int]
"""Address of the first row, and the distance from a row to the next."""


def copy_rows(target: Side, source: Side, width: int, height: int, stream: Stream) -> None:
    """Copy ``height`` rows of ``width`` bytes in one call."""
    if stream is None:
        for row in range(height):
            ctypes.memmove(target[0] + row * target[1], source[0] + row * source[1], width)
        return
    copy = Copy2D(
        source_kind=UNIFIED, source_device=source[0], source_pitch=source[1],
        target_kind=UNIFIED, target_device=target[0], target_pitch=target[1], width=width, height=height,
    )  # fmt: skip
    answered(driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream.cuda_stream)), "cuMemcpy2DAsync")


class Engines:
    """Copies the pages of two lists, in order, between the pools of ``tiers``."""

    def __init__(self, tiers: TierCopy, way: Way, gpu_pages: np.ndarray, host_pages: np.ndarray, run: int) -> None:
        self.tiers, self.way, self.run = tiers, way, run
        self.layers, self.width = tiers.layers, tiers.fragment_bytes
        self.gpu = tiers.gpu.data_ptr() + gpu_pages.astype(np.int64) * tiers.gpu.stride(0)
        self.host = tiers.host.data_ptr() + host_pages.astype(np.int64) * tiers.host_stride
        self.gpu_layer, self.host_layer = tiers.gpu.stride(1), tiers.host.stride(1)

    def each(self) -> None:
        """A call for each fragment."""
        layer = np.arange(self.layers)
        gpu, host = ((pages[:, None] + layer * step).ravel() for pages, step in self._sides())
        pairs = self._ordered(gpu.tolist(), host.tolist())
        copies = list(zip(*pairs, strict=True))
        width = ctypes.c_size_t(self.width)

        def submit(number: int, stream: Stream) -> None:
            target, source = copies[number]
            if stream is None:
                ctypes.memmove(target, source, self.width)
                return
            handle = ctypes.c_void_p(stream.cuda_stream)
            answered(driver().cuMemcpyAsync(ctypes.c_uint64(target), ctypes.c_uint64(source), width, handle), "cuMemcpyAsync")

        self._spread(len(copies), submit)

    def pages(self) -> None:
        """A call for each page: its fragments are the rows."""
        pairs = list(zip(self.gpu.tolist(), self.host.tolist(), strict=True))

        def submit(number: int, stream: Stream) -> None:
            gpu, host = pairs[number]
            copy_rows(*self._ordered((gpu, self.gpu_layer), (host, self.host_layer)), self.width, self.layers, stream)

        self._spread(len(pairs), submit)

    def runs(self) -> None:
        """A call for each run of neighbours in each layer: its pages are the rows."""
        gpu_step, host_step = self.tiers.gpu.stride(0), self.tiers.host_stride
        firsts = list(zip(self.gpu[:: self.run].tolist(), self.host[:: self.run].tolist(), strict=True))

        def submit(number: int, stream: Stream) -> None:
            gpu, host = firsts[number // self.layers]
            layer = number % self.layers
            sides = (gpu + layer * self.gpu_layer, gpu_step), (host + layer * self.host_layer, host_step)
            copy_rows(*self._ordered(*sides), self.width, self.run, stream)

        self._spread(len(firsts) * self.layers, submit)

    def batch(self) -> None:
        """A copy for each fragment, page by page, submitted in two calls for each stream."""
        layer = np.arange(self.layers)
        parts = np.array_split(np.arange(len(self.gpu)), min(len(self.gpu), 2 * len(self.tiers.loading)))

        def submit(number: int, stream: Stream) -> None:
            gpu, host = ((pages[parts[number], None] + layer * step).ravel() for pages, step in self._sides())
            copy_batch(*self._ordered(gpu, host), self.width, stream)

        self._spread(len(parts), submit)

    def merged(self) -> None:
        """One call for all fragments, layer by layer, in which neighbours on both sides are one copy."""
        layer = np.arange(self.layers)[:, None]
        gpu, host = ((pages[None, :] + layer * step).ravel() for pages, step in self._sides())
        self._spread(1, lambda _, stream: copy_batch(*self._ordered(gpu, host), self.width, stream))

    def _sides(self) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
        return (self.gpu, self.gpu_layer), (self.host, self.host_layer)

    def _ordered(self, gpu: Any, host: Any) -> tuple[Any, Any]:
        """Return target and source."""
        return (gpu, host) if self.way == "load" else (host, gpu)

    def _spread(self, count: int, submit: Callable[[int, Stream], None]) -> None:
        """Submit copies to several streams in turn; the current one waits for all of them.

        The current one gets no copy itself: it may be the default stream, in which the driver takes no batch.
        """
        caller = torch.cuda.current_stream(self.tiers.device) if self.tiers.gpu.is_cuda else None
        begun = None if caller is None else caller.record_event()
        lanes = self.tiers.loading[: min(count, len(self.tiers.loading))]
        for lane in lanes:
            lane.follow(begun)
        for number in range(count):
            submit(number, lanes[number % len(lanes)].stream)
        for lane in lanes:
            lane.precede(caller)
