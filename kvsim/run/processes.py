"""Jobs in forked processes, one for each, that talk with the process that waits for them."""

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from traceback import format_exc
from types import TracebackType
from typing import Any

from kvsim.errors import PolicyFailed, UsageError
from kvsim.plans.apart import ALONE, KEY

DONE = "done"


class Line:
    """What a job has to talk through."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, kind: str, content: Any) -> None:
        """Tell the process that waits something. Ends this process if that has gone."""
        try:
            self._connection.send((kind, content))
        except BrokenPipeError:
            raise SystemExit(1) from None

    def order(self) -> Any:
        """Return what that process says next. Ends this process if it has gone."""
        try:
            return self._connection.recv()
        except EOFError:
            raise SystemExit(1) from None


Job = Callable[[Line], Any]


class Processes:
    """A process for each job. Those that still run are ended at the end of the ``with`` statement."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        """Begin all jobs. Raises UsageError where processes cannot be forked."""
        if "fork" not in multiprocessing.get_all_start_methods():
            raise UsageError(f"{KEY}: this operating system cannot fork processes: {ALONE}")
        forking = multiprocessing.get_context("fork")
        self._running: dict[int, tuple[Connection, ForkProcess]] = {}
        for number, job in enumerate(jobs):
            ours, theirs = forking.Pipe()
            others = [connection for connection, _ in self._running.values()]
            process = forking.Process(target=_work, args=(job, theirs, [ours, *others]), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which a simulation does not use
                process.start()
            theirs.close()
            self._running[number] = ours, process

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, process in self._running.values():
            process.terminate()
            process.join()

    def __len__(self) -> int:
        """How many run."""
        return len(self._running)

    def order(self, order: Any) -> None:
        """Tell all that run what to do next. One that has died is found when it is listened to."""
        for connection, _ in self._running.values():
            try:
                connection.send(order)
            except ConnectionError:
                continue

    def listen(self, number: int) -> tuple[str, Any]:
        """Return what a job says next: ``DONE`` and what it has returned, or as it has told. Raises UsageError as the job does,
        and if its process has died."""
        connection, process = self._running[number]
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):
            kind, content = "error", UsageError(f"{KEY}: a worker process died, perhaps for lack of memory: use fewer workers")
        if kind in (DONE, "error"):
            del self._running[number]
            process.join()
        if kind == "error":
            raise content
        return kind, content

    def next_words(self) -> list[int]:
        """Wait until some job says something, and return which ones do."""
        numbers = {connection: number for number, (connection, _) in self._running.items()}
        return [numbers[connection] for connection in wait(list(numbers)) if isinstance(connection, Connection)]


def finish(processes: Processes, advance: Callable[[int], None] | None, ended: int = 0) -> list[Any]:
    """Return what each job returns. On their way, they tell how many more requests have ended, besides ``ended``."""
    found: dict[int, Any] = {}
    while len(processes):
        for number in processes.next_words():
            kind, content = processes.listen(number)
            if kind == DONE:
                found[number] = content
                continue
            ended += content
            if advance:
                advance(ended)
    return [found[number] for number in sorted(found)]


def _work(job: Job, parent: Connection, others: Sequence[Connection]) -> None:
    """Do a job in this process, which ends when the one that waits for it says so, or has gone. Ctrl-C is left to that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for connection in others:
        connection.close()
    line = Line(parent)
    try:
        line.tell(DONE, job(line))
    except UsageError as error:
        kind = PolicyFailed if isinstance(error, PolicyFailed) else UsageError
        line.tell("error", kind(str(error)))
    except Exception:
        line.tell("error", RuntimeError(f"a worker process failed:\n{format_exc()}"))
