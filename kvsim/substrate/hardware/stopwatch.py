"""Times what is done on a device, as the host sees it."""

import statistics
import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Medians of several repeats, a first one not counted. Without a GPU what is called has ended when it returns."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats

    def seconds(self, action: Callable[[], object]) -> float:
        """From the call to the end of what it started."""
        action()
        times = []
        for _ in range(self.repeats):
            self.wait()
            start = time.perf_counter()
            action()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def wait(self) -> None:
        """Return when the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
