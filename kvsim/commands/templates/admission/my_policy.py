"""MyPolicy: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.numbers import Real, Whole, check_settings
from kvsim.policies.admission.base import AdmissionPolicy, ClusterLoad


@dataclass(kw_only=True, eq=False)
class MyPolicy(AdmissionPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    long prompt       more than long_tokens tokens: admitted if requests use at most kv_use of the chosen engine's KV
    any other prompt  admitted
    """

    long_tokens: int = 8192
    kv_use: float = 0.9

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "long_tokens")
        check_settings(self, Real(least=0, most=1), "kv_use")

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        return request.prompt_tokens <= self.long_tokens or load.engines[0].kv_use <= self.kv_use
