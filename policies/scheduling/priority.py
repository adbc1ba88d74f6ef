"""Priority scheduling, as in vLLM (vllm/v1/core/sched/request_queue.py) and SGLang (managers/schedule_policy.py)."""

from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.context import PolicyContext
from kvsim.policies.scheduling.base import OTHER, PRIORITY, BoundedScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Priority(BoundedScheduling):
    """Important requests first. Running ones are never stopped for them.

    order             highest priority first; of equals, by arrival
    after retraction  by the same order
    retracted         the lowest priority first; of equals, the one that arrived last, as in vLLM

    vLLM counts the other way: its lowest value is the most important. SGLang retracts those with the shortest answers so far,
    whatever their priority, and can stop running requests for waiting ones (a setting). Needs requests with a ``priority``.
    """

    def bind(self, context: PolicyContext) -> None:
        context.require("priority", "the priority of each request")

    def rank(self, waiting: Waiting) -> float:
        return -waiting.request.priority

    def retraction_rank(self, waiting: Waiting) -> float:
        return -waiting.request.priority

    def goes_by(self) -> str:
        return PRIORITY if self.max_wait_s is None else OTHER
