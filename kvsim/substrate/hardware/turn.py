"""A lock for running kernels on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Self

import torch


class Turn:
    """A lock held while kernels are launched. On a GPU it does nothing: all threads may launch at once.

    Triton's interpreter keeps the kernel being interpreted in global variables, so only one thread at a time may run on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = None if device.type == "cuda" else Lock()

    def __enter__(self) -> Self:
        if self._lock is not None:
            self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Release the lock while the block runs."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
