"""Times what is done on a device, as the host sees it."""

import statistics
import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Medians of several repeats, after what is to be timed has gone on for ``heat_s`` seconds, and once at least.

    A GPU lowers its clock under load: what it does at first is faster than what it does all the time. Without a GPU what is
    called has ended when it returns.
    """

    def __init__(self, device: torch.device, repeats: int, heat_s: float = 0.0) -> None:
        self.device = device
        self.repeats = repeats
        self.heat_s = heat_s

    def seconds(self, action: Callable[[], object]) -> float:
        """From the call to the end of what it started."""
        until = time.perf_counter() + self.heat_s
        action()
        while time.perf_counter() < until:
            action()
            self.wait()
        times = []
        for _ in range(self.repeats):
            self.wait()
            start = time.perf_counter()
            action()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def course(self, action: Callable[[], object], *, rest_s: float, seconds: float) -> list[float]:
        """Times of calls one after another for so many seconds, once at least, that begin on a device that has rested."""
        self.wait()
        time.sleep(rest_s)
        begin = now = time.perf_counter()
        times: list[float] = []
        while not times or now < begin + seconds:
            action()
            self.wait()
            now, before = time.perf_counter(), now
            times.append(now - before)
        return times

    def wait(self) -> None:
        """Return when the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
