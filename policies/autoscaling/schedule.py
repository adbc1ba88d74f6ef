"""Engines by the clock, as cron scalers do it (KEDA's cron, scheduled actions of clouds)."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import MOST_SECONDS, SECONDS, Real, Whole, check_number, check_settings
from kvsim.policies.autoscaling.base import ClusterStatus, RegularAutoscaling, within
from kvsim.policies.autoscaling.context import AutoscalingContext


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ScheduledEngines(RegularAutoscaling):
    """Serves with as many engines as a plan says for the time: for load that comes every day at the same hours.

    steps      [at_s, engines]: from that second of each period, so many engines, from cluster.min_engines to cluster.engines;
               before the first step, those of the last one
    period_s   the steps repeat after so many seconds
    offset_s   the second of the period at which the trace starts
    """

    interval_s: float = 15.0
    steps: list[Any] = field(default_factory=lambda: [[0, 2], [28800, 4], [72000, 2]])
    period_s: float = 86400.0
    offset_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Real(above=0, most=MOST_SECONDS), "period_s")
        check_settings(self, SECONDS, "offset_s")
        if not self.steps:
            raise ValueError("steps is empty: give [[at_s, engines], ...]")
        self._times_s: list[float] = []
        for step in self.steps:
            if not isinstance(step, (list, tuple)) or len(step) != 2:
                raise ValueError(f"steps has {step!r}: each is [at_s, engines]")
            check_number("steps: at_s", Real(least=0, below=self.period_s), step[0], hint="it is a second of period_s")
            check_number("steps: engines", Whole(), step[1])
            if self._times_s and step[0] <= self._times_s[-1]:
                raise ValueError(f"steps must be in order of time: {step[0]:g} comes after {self._times_s[-1]:g}")
            self._times_s.append(float(step[0]))

    def bind(self, context: AutoscalingContext) -> None:
        for at_s, engines in self.steps:
            if not context.least_engines <= engines <= context.engines:
                there = f"cluster.min_engines={context.least_engines} and cluster.engines={context.engines}"
                raise ValueError(f"has {engines} engines in steps, from {at_s:g} s on, which is not between {there}")

    def engines(self, status: ClusterStatus) -> int:
        at_s = (status.now + self.offset_s) % self.period_s
        engines: int = self.steps[bisect_right(self._times_s, at_s) - 1][1]
        return within(status, engines)
