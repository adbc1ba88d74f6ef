"""MyPolicy: name the source of the rule."""

from dataclasses import dataclass
from math import ceil

from kvsim.numbers import Real, check_settings
from kvsim.policies.autoscaling.base import ClusterStatus, RegularAutoscaling


@dataclass(kw_only=True, eq=False)
class MyPolicy(RegularAutoscaling):
    """State the purpose of the policy in one sentence, then the rule.

    requests wait   one engine more
    otherwise       an engine for each requests_per_engine requests that run; one less at a time
    """

    requests_per_engine: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Real(above=0), "requests_per_engine")

    def engines(self, status: ClusterStatus) -> int:
        there = status.up + status.starting
        if status.waiting_requests and not status.starting:
            return there + 1
        return max(there - 1, ceil(status.running_requests / self.requests_per_engine))
