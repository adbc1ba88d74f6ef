"""Measures the time of actions on a device, as seen by the host."""

import statistics
import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Takes the median of several repeats, after running the action for ``heat_s`` seconds, at least once.

    A GPU lowers its clock under load, so its first actions are faster than sustained work. Without a GPU, actions are complete
    when they return.
    """

    def __init__(self, device: torch.device, repeats: int, heat_s: float = 0.0) -> None:
        self.device = device
        self.repeats = repeats
        self.heat_s = heat_s

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the median time from the call of ``action`` to the end of the work it starts."""
        return statistics.median(self.times(action, self.repeats))

    def times(self, action: Callable[[], object], count: int) -> list[float]:
        """Return the times of ``count`` calls of ``action``, each to the end of the work it starts."""
        until = time.perf_counter() + self.heat_s
        action()
        while time.perf_counter() < until:
            action()
            self.wait()
        times = []
        for _ in range(count):
            self.wait()
            start = time.perf_counter()
            action()
            self.wait()
            times.append(time.perf_counter() - start)
        return times

    def wait(self) -> None:
        """Wait until the device has completed all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
