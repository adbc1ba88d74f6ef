"""First come, first served: the default of vLLM and SGLang."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.scheduling.base import ARRIVAL, SchedulingPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class FCFS(SchedulingPolicy):
    """First come, first served.

    order             by arrival
    after retraction  by arrival, too: before all that arrived later, as in vLLM. SGLang puts it at the end of the queue
    """

    def goes_by(self) -> str:
        return ARRIVAL
