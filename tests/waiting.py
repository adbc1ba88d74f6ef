"""Waiting for other threads and processes, long enough for a machine that is slow and busy."""

import time
from collections.abc import Callable
from threading import Thread

LONG_S = 60.0
"""As long as nothing takes that ever comes."""


def wait_until(has_come: Callable[[], object]) -> None:
    """Wait until a condition holds, which another thread or process brings about."""
    until = time.monotonic() + LONG_S
    while not has_come():
        assert time.monotonic() < until, "what is waited for has not come"
        time.sleep(0.01)


def join(*threads: Thread) -> None:
    """Wait until threads have ended: what they did is there after that."""
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
