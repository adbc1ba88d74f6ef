"""Sheddable requests: admission by priority in the Gateway API inference extension and llm-d (``admission.go``)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import LARGEST, Real, Whole, check_number, check_settings
from kvsim.policies.admission.base import CLUSTER, AdmissionPolicy, ClusterLoad, EngineLoad
from kvsim.policies.admission.context import AdmissionContext

SIGNED = Whole(-LARGEST - 1)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class PriorityShed(AdmissionPolicy):
    """Refuses the least important requests first, while the cluster is saturated; the others are always admitted.

    saturation   mean over the engines that are up of max(waiting requests / waiting_requests, share of KV in use / kv_use);
                 1 if none is up
    sheddable    priority below protected_from, 0: a negative priority
    refused      sheddable, and saturation >= 1 - step * (levels of priority between it and the highest sheddable one)
    priority     that of the request or, if priorities has its type, the one there

    The gateways have no steps (step=0): they refuse all sheddable requests at a saturation of 1. Their measurements are up to
    200 ms old; here they are those of now.
    """

    waiting_requests: int = 5
    kv_use: float = 0.8
    protected_from: int = 0
    step: float = 0.0
    priorities: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "waiting_requests")
        check_settings(self, Real(above=0, most=1), "kv_use")
        check_settings(self, Real(least=0, below=1), "step")
        check_settings(self, SIGNED, "protected_from")
        self._by_type: dict[str, int] = {}
        for at, own in enumerate(self.priorities):
            if set(own) != {"type", "priority"}:
                raise ValueError(f"priorities[{at}] must have type and priority, not {own}")
            check_number(f"priorities[{at}].priority", SIGNED, own["priority"])
            self._by_type[str(own["type"])] = int(own["priority"])
        if len(self._by_type) < len(self.priorities):
            raise ValueError("priorities has a type twice: leave one out")

    @property
    def goes_by(self) -> str:
        return CLUSTER

    def bind(self, context: AdmissionContext) -> None:
        requests: Sequence[Request] = context.requests
        there = set(values_of(requests, "kind")) if self._by_type else set()
        if requests and (missing := [name for name in self._by_type if name not in there]):
            raise ValueError(f"has priorities for the type {missing[0]}, which no request of this trace has")
        if requests and all(self.priority(request) >= self.protected_from for request in requests):
            raise ValueError(
                f"needs requests with a priority below {self.protected_from}, which this trace does not have: set "
                "admission.priorities, or choose another trace or policy"
            )

    def priority(self, request: Request) -> int:
        """Return how important a request is."""
        return self._by_type.get(request.kind, request.priority) if self._by_type else request.priority

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        below = self.protected_from - self.priority(request)
        return below <= 0 or self.saturation(load.engines) < 1.0 - self.step * (below - 1)

    def saturation(self, engines: Sequence[EngineLoad]) -> float:
        """Return how much the engines have to do: 1 is as much as they should."""
        if not engines:
            return 1.0
        shares = [max(engine.waiting_requests / self.waiting_requests, engine.kv_use / self.kv_use) for engine in engines]
        return sum(shares) / len(shares)
