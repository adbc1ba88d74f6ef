"""A thread that does one thing after another."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
PATIENCE_S = 60.0


class Worker(Thread, Generic[T]):
    """Does ``work`` with everything that it is given, in order. ``failed`` is told of what went wrong with which one."""

    def __init__(
        self, name: str, work: Callable[[T], None], failed: Callable[[T, BaseException], None], device: torch.device
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.work = work
        self.failed = failed
        self.device = device
        self._is_closing = False
        self._given: SimpleQueue[T | None] = SimpleQueue()
        self.start()

    def give(self, task: T) -> None:
        """Queue something to be done."""
        self._given.put(task)

    def run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.no_grad():
            while (task := self._given.get()) is not None:
                try:
                    if not self._is_closing:
                        self.work(task)
                except BaseException as error:
                    self.failed(task, error)

    def close(self) -> bool:
        """End after the task under way; what is queued is dropped. Returns whether the thread has ended."""
        self._is_closing = True
        self._given.put(None)
        self.join(PATIENCE_S)
        return not self.is_alive()
