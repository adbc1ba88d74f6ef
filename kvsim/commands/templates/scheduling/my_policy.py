"""MyPolicy: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.numbers import Real, check_settings
from kvsim.policies.scheduling.base import SchedulingPolicy


@dataclass(kw_only=True, eq=False)
class MyPolicy(SchedulingPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    rank = arrival + seconds_per_1024_tokens for each 1,024 tokens to compute; the smallest rank is tried first
    """

    seconds_per_1024_tokens: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "seconds_per_1024_tokens")

    def rank(self, waiting: Waiting) -> float:
        """Called when the request begins to wait; define order() instead for an order that changes while requests wait."""
        return waiting.arrival_s + self.seconds_per_1024_tokens * waiting.target_tokens / 1024
