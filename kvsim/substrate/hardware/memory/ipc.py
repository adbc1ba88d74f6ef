"""Access to another process's GPU memory (CUDA driver API, inter-process communication)."""

import ctypes

from kvsim.errors import UsageError
from kvsim.substrate.hardware.memory.batch_memcpy import answered, driver

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``."""


class Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def exported(pointer: int) -> tuple[bytes, int]:
    """Return a handle of the allocation that has the address ``pointer``, and the address's offset in it."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    answered(
        driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)), "cuMemGetAddressRange"
    )
    handle = Handle()
    answered(driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base.value)), "cuIpcGetMemHandle")
    return bytes(handle), pointer - base.value


def opened(handle: bytes) -> int:
    """Map another process's allocation for this thread's GPU and return its address.

    Raises UsageError if the GPUs cannot access each other's memory.
    """
    address = ctypes.c_uint64()
    copied = Handle.from_buffer_copy(handle)
    refused = driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), copied, ctypes.c_uint(LAZY_PEER_ACCESS))
    if refused:
        raise UsageError(f"cluster.engines: a GPU cannot access another one's memory (CUDA error {refused})")
    return address.value


def close(pointer: int) -> None:
    """Unmap what ``opened`` has mapped."""
    answered(driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer)), "cuIpcCloseMemHandle")
