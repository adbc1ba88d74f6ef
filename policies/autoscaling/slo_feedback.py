"""Feedback from the objective: engines are added when late first tokens miss it, and taken away when all are far below it."""

from collections import deque
from dataclasses import dataclass
from math import ceil

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import MOST_SECONDS, SECONDS, Real, check_settings
from kvsim.policies.autoscaling.base import ClusterStatus, RegularAutoscaling, current, percentile, within


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SloFeedback(RegularAutoscaling):
    """Adds engines by a factor when the objective is missed, and takes one away when it is met with room to spare.

    observed                     the ``quantile`` of the times to first token of the last window_s seconds; without any, a miss
                                 if requests wait, else 0
    observed > ttft_s            engines * growth, rounded up, unless some are starting
    observed < spare * ttft_s    one engine less, if that has been so for hold_s seconds, since the last change, too
    otherwise                    as many as there are

    Multiplicative increase and additive decrease, as in target tracking on a latency: it needs no model of an engine, but sees a
    burst only when its first tokens are late.
    """

    interval_s: float = 10.0
    ttft_s: float = 2.0
    quantile: float = 0.9
    window_s: float = 60.0
    growth: float = 1.5
    spare: float = 0.5
    hold_s: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Real(above=0), "ttft_s")
        check_settings(self, Real(above=0, most=1), "quantile")
        check_settings(self, Real(above=0, most=MOST_SECONDS), "window_s")
        check_settings(self, Real(above=1), "growth")
        check_settings(self, Real(least=0, most=1), "spare")
        check_settings(self, SECONDS, "hold_s")
        self._seen: deque[tuple[float, tuple[float, ...]]] = deque()
        """(time, times to first token) of the last intervals."""
        self._spare_since_s = 0.0
        """Since when the objective has been met with room to spare, and nothing has changed."""

    def engines(self, status: ClusterStatus) -> int:
        now, there = status.now, current(status)
        self._seen.append((now, tuple(status.ttft_s)))
        while len(self._seen) > 1 and self._seen[0][0] <= now - self.window_s:
            self._seen.popleft()
        observed_s = self._observed_s(status)
        if not observed_s < self.spare * self.ttft_s:
            self._spare_since_s = now
        engines = there
        if observed_s > self.ttft_s:
            engines = there if status.starting else max(1, ceil(there * self.growth))
        elif now - self._spare_since_s >= self.hold_s and observed_s < self.spare * self.ttft_s:
            engines = there - 1
        engines = within(status, engines)
        if engines != there:
            self._spare_since_s = now
        return engines

    def _observed_s(self, status: ClusterStatus) -> float:
        """Return what is compared with the objective, in seconds."""
        times_s = [time_s for _, some in self._seen for time_s in some]
        if times_s:
            return percentile(times_s, self.quantile)
        return 2.0 * self.ttft_s if status.waiting_requests else 0.0
