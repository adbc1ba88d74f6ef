"""MyPolicy: name the source of the rule."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext


@dataclass(kw_only=True, eq=False)
class MyPolicy(RoutingPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    the session's last engine has at most max_extra_requests more than the idlest   that engine
    otherwise                                                                       the idlest
    """

    max_extra_requests: int = 8

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "max_extra_requests")

    def bind(self, context: RoutingContext) -> None:
        self._last: dict[int, int] = {}

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        idlest = min(engines, key=lambda status: status.outstanding_requests)
        most = idlest.outstanding_requests + self.max_extra_requests
        for status in engines:
            if status.engine == self._last.get(request.session) and status.outstanding_requests <= most:
                return status.engine
        return idlest.engine

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        if request.session >= 0:
            self._last[request.session] = engine
