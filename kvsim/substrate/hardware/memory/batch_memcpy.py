"""Submits many copies to the GPU's copy engines in one call."""

import ctypes
from functools import cache

import numpy as np
import torch


class CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of the CUDA driver API, available from version 12.8."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


IN_STREAM_ORDER = 1
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: sources are read after the preceding work in the stream."""


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def merged(targets: np.ndarray, sources: np.ndarray, n_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge copies of ``n_bytes`` each that are adjacent on both sides, and return (targets, sources, bytes)."""
    is_first = np.ones(len(targets), dtype=bool)
    is_first[1:] = (np.diff(targets) != n_bytes) | (np.diff(sources) != n_bytes)
    first = np.flatnonzero(is_first)
    counts = np.diff(first, append=len(targets))
    return targets[first], sources[first], counts * n_bytes


def copy_batch(targets: np.ndarray, sources: np.ndarray, n_bytes: int, stream: torch.cuda.Stream | None) -> None:
    """Copy ``n_bytes`` from each address in ``sources`` to the corresponding one in ``targets`` (int64), in ``stream``.

    The host side is pinned memory. ``stream`` must not be the default stream, in which the driver takes no batch (error 1).
    Without a stream, both sides are host memory, and the copies are complete on return.
    Drivers older than CUDA 12.8 get the copies one by one, which costs microseconds each. Raises RuntimeError if the driver
    reports an error.
    """
    targets, sources, lengths = merged(targets, sources, n_bytes)
    if stream is None:
        for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            ctypes.memmove(target, source, length)
    elif hasattr(driver(), "cuMemcpyBatchAsync"):
        submit(targets, sources, lengths, stream.cuda_stream)
    else:
        copies = zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)
        handle = ctypes.c_void_p(stream.cuda_stream)
        for copy in copies:
            answered(driver().cuMemcpyAsync(*map(ctypes.c_uint64, copy), handle), "cuMemcpyAsync")


def submit(targets: np.ndarray, sources: np.ndarray, lengths: np.ndarray, stream: int) -> None:
    """Submit all copies in one driver call."""
    attributes = CopyAttributes(source_access_order=IN_STREAM_ORDER)
    applies_from, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    arrays = [np.ascontiguousarray(array, dtype=np.uint64) for array in (targets, sources, lengths)]
    answer = driver().cuMemcpyBatchAsync(
        *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
        ctypes.c_size_t(len(targets)),
        ctypes.byref(attributes),
        ctypes.byref(applies_from),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(stream),
    )
    answered(answer, "cuMemcpyBatchAsync")


def answered(answer: int, call: str) -> None:
    if answer:
        raise RuntimeError(f"CUDA driver call {call} failed with error {answer}")
