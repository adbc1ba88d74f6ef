"""A GPU of another process, as the engine's process sees it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from threading import Lock, Thread
from time import perf_counter
from typing import Any

from kvsim.engine.substrate import LOST
from kvsim.errors import UsageError
from kvsim.substrate.hardware.orders import Answers, CopyOrder, GpuReport, SendOrder, StateOrder, StepOrder
from kvsim.substrate.hardware.process.channel import Channel

PATIENCE_S = 60.0
"""Time after which a process that does not end is killed."""


class GpuLost(UsageError):
    """The process of a GPU has ended."""


class RemoteGpu:
    """Starts a process for one GPU and passes orders to it and answers back.

    A process that ends too early, for whatever reason, is noticed at once, and reported as lost when the system has released its
    memory: until then, its GPU may still write to pages. Then what it was asked for ends, copies with 0 pages and steps with
    ``LOST``, as does all that it is asked for later.
    """

    def __init__(self, number: int, answers: Answers, files: Sequence[int]) -> None:
        """Start the process of GPU ``number``, which inherits the descriptors ``files``."""
        self.number, self.answers = number, answers
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = start_process(theirs.fileno(), files)
        self._channel = Channel(ours.detach())
        self._lock = Lock()
        self._orders: dict[int, int] = {}
        """Orders that have not been answered, each with its value if the process is lost."""
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = count()
        self.is_closing = False
        """Set when the process may end."""
        self._is_lost = False
        self._reader = Thread(target=self._read, name=f"answers of GPU {number}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self.process.pid

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the process and return its result to come. Raises GpuLost there if the process is lost."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = answer
            self._send(number, method, *arguments)
        return answer

    def copy(self, order: CopyOrder) -> None:
        self._order(order.number, 0, "copy", order)

    def copy_states(self, order: StateOrder) -> None:
        self._order(order.number, 0, "copy_states", order)

    def send(self, order: SendOrder) -> None:
        self._order(order.number, 0, "send", order)

    def compute(self, order: StepOrder) -> None:
        self._order(order.number, LOST, "compute", order)

    def cancel(self, number: int) -> None:
        with self._lock:
            self._send(None, "cancel", number)

    def stop(self, number: int) -> None:
        with self._lock:
            self._send(None, "stop", number)

    def abandon(self) -> None:
        self.process.kill()

    def report(self) -> GpuReport:
        """Return what the GPU measured. Raises GpuLost if the process is lost."""
        report: GpuReport = self.call("report").result(PATIENCE_S)
        return report

    def close(self) -> bool:
        """Wait until the process, which has been asked to close, has ended; kill it if that takes too long."""
        self.is_closing = True
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE_S)
        self._channel.close()
        return True

    def _order(self, number: int, value_if_lost: int, method: str, order: object) -> None:
        with self._lock:
            self._orders[number] = value_if_lost
            self._send(None, method, order)

    def _send(self, call: int | None, method: str, *arguments: Any) -> None:
        """Send a message. If the process is lost, what it was asked for ends in the reading thread, or here after that."""
        if self._is_lost:
            self._end_all()
            return
        with suppress(OSError):  # the reading thread finds out as well
            self._channel.send((call, method, arguments))

    def _read(self) -> None:
        while True:
            try:
                kind, *content = self._channel.receive()
            except (EOFError, OSError):
                self._notice_loss()
                return
            if kind == "ended":
                if self._orders.pop(content[0], None) is not None:
                    self.answers.ended(*content)
            elif kind == "failed":
                self.answers.failed(*content)
            else:
                self._answer(*content)

    def _answer(self, number: int, result: Any, error: BaseException | None) -> None:
        answer = self._calls.pop(number)
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _notice_loss(self) -> None:
        """Report the loss, once nothing of the process can write to shared memory or to another GPU any more."""
        if not self.is_closing:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_S)
        with self._lock:
            self._is_lost = True
            if not self.is_closing:
                self.answers.lost()
            self._end_all()

    def _end_all(self) -> None:
        """End all that the process was asked for."""
        now = perf_counter()
        for number in list(self._orders):
            if (value := self._orders.pop(number, None)) is not None:
                self.answers.ended(number, value, now, now)
        for call in list(self._calls):
            answer = self._calls.pop(call)
            answer.set_exception(self.loss())

    def loss(self) -> GpuLost:
        try:
            code = self.process.wait(1.0)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        return GpuLost(f"substrate: the process of GPU {self.number} {how}: see above, or whether the system ran out of memory")


def start_process(handle: int, files: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Start the process of a GPU, which imports kvsim from where this process does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", "kvsim.substrate.hardware.process.gpu_process", str(handle)],
        pass_fds=[handle, *files],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
    )
