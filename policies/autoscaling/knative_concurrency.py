"""Knative's pod autoscaler, KPA (``pkg/autoscaler/scaling/autoscaler.go``), on the concurrency of requests."""

from collections import deque
from dataclasses import dataclass
from math import ceil, floor

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import MOST_SECONDS, SECONDS, Real, check_settings
from kvsim.policies.autoscaling.base import ClusterStatus, RegularAutoscaling, within


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class KnativeConcurrency(RegularAutoscaling):
    """Follows the number of requests under way over two windows: the long one smooths, the short one answers bursts.

    concurrency       mean number of requests that have arrived and not ended, over a window
    stable            ceil(concurrency of the last stable_window_s / target_requests)
    panic             the same over the last panic_window_s
    bounds of both    from the engines that are up / max_scale_down_rate, rounded down, to them * max_scale_up_rate, rounded up
    panic mode        begins when panic, without bounds, is at least panic_threshold * the engines that are up; ends when it has
                      not been for stable_window_s. In it, engines are only added: the most of stable, panic and those before
    otherwise         stable
    scale_down_delay_s   the most that was asked for in this time

    Defaults are Knative's: 70 requests are 70 % of 100. It begins in panic mode with more than one engine. Windows are means
    over time; newer versions of Knative can weigh late seconds more. With ``cluster.min_engines=0`` the last engine stops, too.
    """

    interval_s: float = 2.0
    target_requests: float = 70.0
    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    scale_down_delay_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        windows = Real(above=0, most=MOST_SECONDS)
        check_settings(self, windows, "stable_window_s", "panic_window_s")
        check_settings(self, Real(above=0), "target_requests", "panic_threshold")
        check_settings(self, Real(above=1), "max_scale_up_rate", "max_scale_down_rate")
        check_settings(self, SECONDS, "scale_down_delay_s")
        if self.panic_window_s > self.stable_window_s:
            windows_s = f"panic_window_s={self.panic_window_s:g} is above stable_window_s={self.stable_window_s:g}"
            raise ValueError(f"{windows_s}: the short window answers bursts, set it lower")
        self._seen: deque[tuple[float, float, float]] = deque()
        """(end, length, mean concurrency) of the last intervals."""
        self._asked: deque[tuple[float, int]] = deque()
        """(time, engines) of what was asked for within the delay."""
        self._panic_s = -1.0
        """When the panic threshold was last exceeded; below 0 in stable mode."""
        self._most = 0
        """Most engines asked for in panic mode."""
        self._has_begun = False

    def engines(self, status: ClusterStatus) -> int:
        now, ready = status.now, max(1, status.up)
        if not self._has_begun:
            self._has_begun = True
            if status.up > 1:
                self._panic_s, self._most = now - status.interval_s, status.up
        self._seen.append((now, status.interval_s, status.mean_requests))
        while len(self._seen) > 1 and self._seen[0][0] <= now - self.stable_window_s:
            self._seen.popleft()
        stable = ceil(self._concurrency(now, self.stable_window_s) / self.target_requests)
        panic = ceil(self._concurrency(now, self.panic_window_s) / self.target_requests)
        if panic / ready >= self.panic_threshold:
            self._panic_s = now
        elif self._panic_s >= 0.0 and self._panic_s + self.stable_window_s < now:
            self._panic_s, self._most = -1.0, 0
        engines = self._bounded(stable, ready)
        if self._panic_s >= 0.0:
            engines = self._most = max(self._most, engines, self._bounded(panic, ready))
        return within(status, self._delayed(now, engines))

    def _concurrency(self, now: float, window_s: float) -> float:
        """Return the mean concurrency of the intervals that ended in the window; the last one always does."""
        seen = [(length_s, mean) for end_s, length_s, mean in self._seen if end_s > now - window_s or end_s == now]
        return sum([length_s * mean for length_s, mean in seen], 0.0) / sum([length_s for length_s, _ in seen], 0.0)

    def _bounded(self, engines: int, ready: int) -> int:
        return min(max(engines, floor(ready / self.max_scale_down_rate)), ceil(ready * self.max_scale_up_rate))

    def _delayed(self, now: float, engines: int) -> int:
        """Return the most that was asked for within the delay."""
        self._asked.append((now, engines))
        while self._asked[0][0] < now - self.scale_down_delay_s:
            self._asked.popleft()
        return max([asked for _, asked in self._asked])
