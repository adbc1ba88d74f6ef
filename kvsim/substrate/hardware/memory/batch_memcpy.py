"""Submits many copies to the GPU's copy engines in one call."""

import ctypes
from dataclasses import dataclass
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

POINTER = 1
"""``CU_MEMCPY_OPERAND_TYPE_POINTER``."""
MAX_PITCH = (1 << 31) - 1
"""``CU_DEVICE_ATTRIBUTE_MAX_PITCH`` of every GPU so far: the largest distance in bytes from a row to the next."""
BLOCKS_CALL = "cuMemcpy3DBatchAsync_v2"
"""Available from CUDA 13.0."""

OPERAND = [("kind", np.uint64), ("address", np.uint64), ("pitch", np.uint64), ("rows", np.uint64), ("location", np.int32, 2)]
BLOCK = np.dtype([
    ("source", OPERAND), ("target", OPERAND), ("width", np.uint64), ("height", np.uint64), ("depth", np.uint64),
    ("source_access_order", np.int32), ("flags", np.uint32),
])  # fmt: skip
"""``CUDA_MEMCPY3D_BATCH_OP``, of pointers: 112 bytes."""


@dataclass(frozen=True)
class Blocks:
    """One side of copies of blocks: their first rows' addresses (int64), and the bytes from a row to the next."""

    addresses: np.ndarray
    pitch: int


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


def takes_blocks(pitch: int) -> bool:
    """Return whether the driver copies blocks of rows that are ``pitch`` bytes apart."""
    return pitch <= MAX_PITCH and hasattr(driver(), BLOCKS_CALL)


def copy_blocks(targets: Blocks, sources: Blocks, rows: int, n_bytes: int, stream: torch.cuda.Stream | None) -> None:
    """Copy ``rows`` rows of ``n_bytes`` from each block of ``sources`` to the corresponding one of ``targets``, in ``stream``.

    Otherwise like ``copy_batch``, which copies the rows one by one where the driver takes no blocks, or their rows are too far
    apart: that takes up to 12 times as long (experiments/hardware/copy_variants.md).
    """
    if stream is not None and rows > 1 and takes_blocks(max(targets.pitch, sources.pitch)):
        submit_blocks(described(targets, sources, rows, n_bytes), stream.cuda_stream)
        return
    row = np.arange(rows)
    each = [(side.addresses[:, None] + row * side.pitch).ravel() for side in (targets, sources)]
    copy_batch(each[0], each[1], n_bytes, stream)


def described(targets: Blocks, sources: Blocks, rows: int, n_bytes: int) -> np.ndarray:
    """Return the driver's description of copies of blocks: three-dimensional ones with one layer."""
    blocks = np.zeros(len(targets.addresses), dtype=BLOCK)
    for name, side in (("source", sources), ("target", targets)):
        operands = blocks[name]
        operands["kind"], operands["address"], operands["pitch"], operands["rows"] = POINTER, side.addresses, side.pitch, rows
    blocks["width"], blocks["height"], blocks["depth"], blocks["source_access_order"] = n_bytes, rows, 1, IN_STREAM_ORDER
    return blocks


def submit_blocks(blocks: np.ndarray, stream: int) -> None:
    """Submit all copies of blocks in one driver call."""
    if not len(blocks):
        return
    call, array = getattr(driver(), BLOCKS_CALL), ctypes.c_void_p(blocks.ctypes.data)
    answered(call(ctypes.c_size_t(len(blocks)), array, ctypes.c_ulonglong(0), ctypes.c_void_p(stream)), "cuMemcpy3DBatchAsync")


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
