"""A thread that processes tasks one after another."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
PATIENCE_S = 60.0


class Worker(Thread, Generic[T]):
    """Calls ``work`` with each task it is given, in order, and ``failed`` with a task and the error it raised.

    All tasks fail in a thread that cannot use its device.
    """

    def __init__(
        self, name: str, work: Callable[[T], None], failed: Callable[[T, BaseException], None], device: torch.device
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.work = work
        self.failed = failed
        self.device = device
        self.is_closing = False
        """Set when the task under way may end early."""
        self._unusable: Exception | None = None
        """Why the device cannot be used."""
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def give(self, task: T) -> None:
        """Queue a task."""
        self._given.put(partial(self._do, task))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in this thread, which has its own library handles, and wait for it. Raises what the function raises."""
        answer: Future[None] = Future()

        def answered() -> None:
            try:
                self._check_device()
                function()
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self._given.put(answered)
        answer.result()

    def run(self) -> None:
        if self.device.type == "cuda":
            try:
                torch.cuda.set_device(self.device)
            except Exception as error:
                self._unusable = error
        with torch.no_grad():
            while (act := self._given.get()) is not None:
                act()

    def close(self) -> bool:
        """End the thread after the current task, dropping queued ones. Returns whether it has ended within ``PATIENCE_S``."""
        self.is_closing = True
        self._given.put(None)
        self.join(PATIENCE_S)
        return not self.is_alive()

    def _do(self, task: T) -> None:
        if self.is_closing:
            return
        try:
            self._check_device()
            self.work(task)
        except BaseException as error:
            self.failed(task, error)

    def _check_device(self) -> None:
        if self._unusable is not None:
            raise self._unusable
