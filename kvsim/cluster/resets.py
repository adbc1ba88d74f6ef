"""Resets of the caches of a cluster: at once, or when no request runs any more."""

from collections.abc import Sequence
from math import isnan

from kvsim.cluster.hand_over import HandOver
from kvsim.core.request import Request, Reset
from kvsim.core.serving import ServedCache
from kvsim.engine.engine import Engine


class Resets:
    """Drops what all caches have."""

    def __init__(self, engines: Sequence[Engine], caches: Sequence[ServedCache], hand_over: HandOver | None) -> None:
        self._engines = engines
        self._caches = caches
        self._hand_over = hand_over

    def before(self, request: Request) -> None:
        """Reset if the trace does so just before a request."""
        for reset in request.resets:
            if isnan(reset.at_s):
                self.reset(reset)

    def reset(self, reset: Reset) -> None:
        """Reset now, or when all running requests have finished; those that wait run after that."""
        if reset.mode == "now":
            for cache in self._caches:
                cache.reset()
        else:
            for engine in self._engines:
                engine.drain(True)
            if self._hand_over is not None:
                self._hand_over.pause()
        self.wake_all()

    def drained(self) -> None:
        """Reset if the engine that has become idle was the last one."""
        if all(engine.is_idle for engine in self._engines):
            for engine in self._engines:
                engine.drain(False)
            for cache in self._caches:
                cache.reset()
            if len(self._engines) > 1:
                self.wake_all()
            if self._hand_over is not None:
                self._hand_over.go_on()

    def wake_all(self) -> None:
        """Let all engines plan again."""
        for engine in self._engines:
            engine.wake()
