"""No autoscaling."""

from dataclasses import dataclass
from math import inf

from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.autoscaling.base import AutoscalingPolicy, ClusterStatus


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class NoAutoscaling(AutoscalingPolicy):
    """Lets all engines serve from the start to the end: what the others are compared with.

    at any time   cluster.engines engines
    """

    @property
    def asked_every_s(self) -> float:
        return inf

    def engines(self, status: ClusterStatus) -> int:
        return status.most_engines
