"""Kubernetes' Horizontal Pod Autoscaler (``pkg/controller/podautoscaler``, API autoscaling/v2), on a metric of each engine."""

from collections import deque
from dataclasses import dataclass
from math import ceil

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, SMALLEST, Real, Whole, check_settings
from kvsim.policies.autoscaling.base import ClusterStatus, RegularAutoscaling, current, within

METRICS = ("requests", "running_requests", "waiting_requests", "kv_use")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class TargetUtilization(RegularAutoscaling):
    """Keeps a metric of the engines near a target: as many more engines as the metric is above it, in proportion.

    ratio              mean of the metric over the engines that are up / target
    recommended        ceil(engines up * ratio); as many as there are if the ratio is within ``tolerance`` of 1
    engines start      if the ratio is above 1, they count with 0 in a second mean; if that is below the target, nothing changes
    fewer engines      the most that was recommended in the last scale_down_window_s seconds
    more engines       the fewest that was recommended in the last scale_up_window_s seconds, and in growth_period_s seconds at
                       most growth_engines more, or growth_share of those before, whichever is more
    metric             requests: waiting or running; running_requests; waiting_requests; kv_use: share of the KV capacity in use

    As many as there are: those that are up or starting, and those that were asked for and wait until draining ones leave room
    for them, as Kubernetes counts the replicas that it wants.

    Defaults are those of Kubernetes, but the metric and its target, which it has none for. From no engine at all, which
    Kubernetes leaves to others, the first one starts when a request waits.
    """

    metric: str = "requests"
    target: float = 32.0
    tolerance: float = 0.1
    scale_up_window_s: float = 0.0
    scale_down_window_s: float = 300.0
    growth_engines: int = 4
    growth_share: float = 1.0
    growth_period_s: float = 15.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {self.metric}")
        check_settings(self, Real(above=0), "target")
        check_settings(self, Real(least=0, below=1), "tolerance")
        check_settings(self, SECONDS, "scale_up_window_s", "scale_down_window_s", "growth_period_s")
        check_settings(self, Whole(), "growth_engines")
        check_settings(self, Real(least=0), "growth_share")
        if not self.growth_engines and self.growth_share < SMALLEST:
            raise ValueError("growth_engines=0 and growth_share=0 never add an engine: set one of them above 0")
        self._recommended: deque[tuple[float, int]] = deque()
        """(time, engines) of the last recommendations."""
        self._changes: deque[tuple[float, int]] = deque()
        """(time, engines more or less) of the last changes."""
        self._asked = 0
        """The last answer."""

    def engines(self, status: ClusterStatus) -> int:
        wanted = self._stabilized(status, self._recommend(status))
        engines = within(status, self._limited(status, wanted))
        if engines != self._there(status):
            self._changes.append((status.now, engines - self._there(status)))
        self._asked = engines
        return engines

    def _there(self, status: ClusterStatus) -> int:
        """Return how many engines there are, with those that only draining ones keep from starting."""
        return max(current(status), self._asked) if status.draining else current(status)

    def _recommend(self, status: ClusterStatus) -> int:
        """Return how many engines bring the metric to its target."""
        up, there, exist = status.up, self._there(status), current(status)
        if not there:
            return 1 if status.waiting_requests else 0
        if not up:
            return there
        ratio = self._sum(status) / up / self.target
        if not (status.starting and ratio > 1.0):
            return there if abs(1.0 - ratio) <= self.tolerance else ceil(ratio * up)
        diluted = self._sum(status) / exist / self.target
        if abs(1.0 - diluted) <= self.tolerance or diluted < 1.0:
            return there
        return max(there, ceil(diluted * exist))

    def _sum(self, status: ClusterStatus) -> float:
        """Return the sum of the metric over the engines that are up."""
        if self.metric == "kv_use":
            return status.kv_use * status.up
        waiting = 0 if self.metric == "running_requests" else status.waiting_requests
        running = 0 if self.metric == "waiting_requests" else status.running_requests
        return float(waiting + running)

    def _stabilized(self, status: ClusterStatus, recommended: int) -> int:
        """Return as many engines as all recommendations of the windows agree on."""
        now, fewest, most = status.now, recommended, recommended
        self._recommended.append((now, recommended))
        while self._recommended[0][0] < now - max(self.scale_up_window_s, self.scale_down_window_s):
            self._recommended.popleft()
        for time_s, engines in self._recommended:
            if time_s > now - self.scale_up_window_s:
                fewest = min(fewest, engines)
            if time_s > now - self.scale_down_window_s:
                most = max(most, engines)
        return min(max(self._there(status), fewest), most)

    def _limited(self, status: ClusterStatus, wanted: int) -> int:
        """Return at most as many engines as may be added in a period."""
        there = self._there(status)
        if wanted <= there:
            return wanted
        while self._changes and self._changes[0][0] <= status.now - self.growth_period_s:
            self._changes.popleft()
        before = there - sum([change for _, change in self._changes])
        return min(wanted, max(there, before + self.growth_engines, ceil(before * (1.0 + self.growth_share))))
