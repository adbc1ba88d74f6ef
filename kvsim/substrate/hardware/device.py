"""Finds the device to run on."""

import os
from typing import TYPE_CHECKING

from kvsim.errors import UsageError

if TYPE_CHECKING:
    import torch


def find_device(number: int | None = None) -> "torch.device":
    """Return the current GPU, or make the one with this number current; without GPUs, return the CPU, on which Triton interprets
    kernels.

    Call this before Triton is imported and CUDA is initialized, because both read the environment then. Raises UsageError if
    torch or triton is missing.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # Streams that share a hardware queue wait for each other.
    try:
        import torch

        has_gpu = torch.cuda.is_available()
        if not has_gpu:
            os.environ["TRITON_INTERPRET"] = "1"
        import triton  # noqa: F401
    except ImportError as error:
        raise UsageError(f"substrate=hardware needs torch and triton ({error}): install kvsim[hardware]") from error
    if not has_gpu:
        return torch.device("cpu")
    if number is not None:
        torch.cuda.set_device(number)
    return torch.device("cuda", torch.cuda.current_device())
