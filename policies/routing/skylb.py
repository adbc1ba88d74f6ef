"""SkyLB's selective pushing (Xia et al., SkyWalker: A Locality-Aware Cross-Region Load Balancer for LLM Inference, EuroSys 2026,
arXiv 2505.24095; SkyPilot, ``sky/serve/load_balancer.py``, ``load_balancing_policies.py``), in one region."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, Real, Whole, check_settings
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.sent_prompts import SentPrompts

PUSHES = ("pending", "outstanding")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SkyLB(RoutingPolicy):
    """Sends requests only to engines that can take them at once; others wait at the router, where any engine can have them.

    available         pending: the engine has reported that its last pass of admission left no request waiting
                      outstanding: fewer than max_outstanding requests that were sent there have not ended
    none available    the request waits, and all later ones behind it, until an engine is
    longest match     m of the prompt's tokens were sent to some of the available engines
    m > threshold     the engine with the longest match; threshold is cache_threshold of the prompt's tokens
    otherwise         the engine with the fewest requests that have not ended
    of equals         the engine with the fewest such requests, then the lowest number

    So no request waits on one engine while another one is known to be free. The original compares characters and probes engines
    every 0.1 to 0.2 s (``staleness_s``). Pushing to load balancers of other regions is left out. To look for available engines
    takes time in proportion to the engines.
    """

    push: str = "pending"
    max_outstanding: int = 10
    cache_threshold: float = 0.5
    max_tree_tokens: int = 16777216
    staleness_s: float = 0.0

    def __post_init__(self) -> None:
        if self.push not in PUSHES:
            raise ValueError(f"push must be one of {', '.join(PUSHES)}, not {self.push}")
        check_settings(self, Whole(1), "max_outstanding", "max_tree_tokens")
        check_settings(self, Real(least=0, most=1), "cache_threshold")
        check_settings(self, SECONDS, "staleness_s")

    def without_effect(self) -> Sequence[str]:
        return ("max_outstanding",) if self.push == "pending" else ("staleness_s",)

    @property
    def needs_reports(self) -> bool:
        return self.push == "pending"

    @property
    def may_keep(self) -> bool:
        return True

    def bind(self, context: RoutingContext) -> None:
        pages = self.max_tree_tokens // context.page_tokens
        if not pages:
            raise ValueError(f"max_tree_tokens={self.max_tree_tokens} is less than a page of {context.page_tokens} tokens")
        self._page_tokens = context.page_tokens
        self._sent = SentPrompts(context.engines, dict.fromkeys(context.engines, pages))

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int | None:
        available = [status for status in engines if self._takes_one(status)]
        if not available:
            return None
        found = self._sent.matches(request.runs, now)
        least, longest = available[0], available[0]
        for status in available:
            load, pages = status.outstanding_requests, found.get(status.engine, 0)
            if load < least.outstanding_requests:
                least = status
            most = found.get(longest.engine, 0)
            if pages > most or pages == most and load < longest.outstanding_requests:
                longest = status
        matched = found.get(longest.engine, 0) * self._page_tokens
        return (longest if matched > self.cache_threshold * request.prompt_tokens else least).engine

    def _takes_one(self, status: EngineStatus) -> bool:
        """Whether an engine can take a request at once."""
        if self.push == "pending":
            return not status.pending_requests
        return status.outstanding_requests < self.max_outstanding

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        self._sent.add(request.runs, engine, now)

    def on_down(self, engine: int, now: float) -> None:
        self._sent.forget(engine)
