"""Tensors over memory that torch has not allocated (DLPack: Open In Memory Tensor Structure, version 0)."""

import ctypes

import torch
import torch.utils.dlpack

CPU, CUDA = 1, 2
"""``kDLCPU`` and ``kDLCUDA``."""
UNSIGNED = 1
"""``kDLUInt``."""


class DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("dimensions", ctypes.c_int32),
        ("type", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_kept: list[object] = []
"""Descriptions of all raw tensors: torch reads them until it frees the tensors. A process makes one per GPU."""


def raw_tensor(pointer: int, n_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory as a tensor of uint8 that belongs to ``device``, whichever device it is in; nothing is copied.

    The caller keeps the memory mapped while the tensor is used. torch's other ways of wrapping GPU memory ask CUDA where it is
    and copy what is another GPU's.
    """
    shape = (ctypes.c_int64 * 1)(n_bytes)
    kind = DLDevice(CUDA if device.type == "cuda" else CPU, device.index or 0)
    described = DLTensor(pointer, kind, 1, DLDataType(UNSIGNED, 8, 1), shape, None, 0)
    managed = DLManagedTensor(described, None, None)
    _kept.extend((shape, managed))
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype, make_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(make_capsule(ctypes.addressof(managed), b"dltensor", None))
    assert made.data_ptr() == pointer, "torch has copied the memory"
    return made
