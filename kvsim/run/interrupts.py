"""Ctrl-C and SIGTERM, which a command remembers until it ends.

Python raises an interrupt wherever the program happens to be. There it may be replaced, by an error in code that cleans up while
the interrupt passes through, or lost, in a callback. The command must still end as an interrupted one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvsim.errors import Terminated

_received: list[KeyboardInterrupt] = []
"""The interrupts of the command that runs."""


@contextmanager
def remembered() -> Iterator[None]:
    """Remember interrupts during the block; an error that leaves it after one is replaced by the interrupt.

    Only the main thread can handle signals. Ctrl-C stays ignored where it is, as in a job in a shell's background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _receive)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _receive)
    try:
        with interrupts_first():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


@contextmanager
def interrupts_first() -> Iterator[None]:
    """Replace an error that leaves the block by the interrupt, if there was one."""
    try:
        yield
    except Exception as error:
        stop_if_interrupted(error)
        raise


def stop_if_interrupted(error: BaseException | None = None) -> None:
    """Raise an interrupt that was received earlier, or that ``error`` has replaced."""
    if interrupt := _received[0] if _received else _behind(error):
        raise type(interrupt) from error


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore further interrupts, so that the finished part of a sweep is written even if the user keeps pressing Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _receive(number: int, frame: object) -> None:
    interrupt = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
    _received.append(interrupt)
    raise interrupt


def _behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt in the chain of an error; None if there is none."""
    pending, seen = [error], set()
    while pending:
        error = pending.pop()
        if isinstance(error, KeyboardInterrupt):
            return error
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            pending += [error.__cause__, error.__context__]
    return None
