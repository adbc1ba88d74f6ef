"""Who may run kernels on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Self

import torch


class Turn:
    """Held while kernels are launched. On a GPU, all threads may launch at once.

    Triton's interpreter keeps the kernel that it interprets in global variables, so on a CPU one thread runs at a time.
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
        """Lets others run meanwhile."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
