"""The contract of routing policies: which engine of a cluster gets a request."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.context import RoutingContext


class EngineStatus(Protocol):
    """What a router knows of one engine: what it sent there itself, and what the engine reports.

    Its own records are up to date, unless the policy ``hears_late``; reports are as old as its ``staleness_s``.
    """

    @property
    def engine(self) -> int:
        """The engine's number."""

    @property
    def capacity_pages(self) -> int | None:
        """Capacity of its GPU tier; None if unlimited."""

    @property
    def outstanding_requests(self) -> int:
        """Requests sent to it that have not ended, as far as the router has heard (``hears_late``)."""

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens of these requests. A router does not know how long their answers will be."""

    @property
    def waiting_requests(self) -> int:
        """Requests in its queue, as last reported. Only for policies with ``needs_reports``."""

    @property
    def running_requests(self) -> int:
        """Requests admitted and not ended, as last reported. Only for policies with ``needs_reports``."""

    @property
    def used_pages(self) -> int:
        """Slots of its GPU tier that are not free, cached pages included, as last reported. Only for policies with
        ``needs_reports``."""

    @property
    def pages_in_use(self) -> int:
        """Slots of its GPU tier that requests use: without free ones, cached pages that no request uses and those that leave. As
        last reported; vLLM calls its share of the capacity KV cache usage. Only for policies with ``needs_reports``."""

    @property
    def pending_requests(self) -> int:
        """Requests that its last pass of admission has left in its queue, as last reported: those that have come since then do
        not count. Only for policies with ``needs_reports``."""

    def cached_pages(self, request: Request) -> int:
        """Return how many leading pages of the prompt its GPU tier has, as it has reported. Only for policies with
        ``needs_cached_pages``."""

    def lower_pages(self, request: Request, after: int) -> "tuple[tuple[int, int], ...]":
        """Return what the tiers below its GPU have of the prompt after its first ``after`` pages: for each of these tiers, from
        the top down, its level (1: CPU memory) and how many pages in it continue those before. As reported, like
        ``cached_pages``; tiers that engines share count for each. Only for policies with ``needs_lower_pages``."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RoutingPolicy(metaclass=ABCMeta):
    """Chooses the engine that serves a request, when the request arrives. It sees what a real router could see.

    One instance serves one pool of engines that do the same work. Engines that only prefill and engines that only decode are two
    pools: a request is sent to one of each.
    """

    @property
    def needs_cached_pages(self) -> bool:
        """Whether the policy calls ``EngineStatus.cached_pages``: engines then report every page that they store or drop."""
        return False

    @property
    def needs_lower_pages(self) -> bool:
        """Whether the policy calls ``EngineStatus.lower_pages``: the tiers below GPUs then report every page, too. Needs
        ``needs_cached_pages`` as well."""
        return False

    @property
    def needs_reports(self) -> bool:
        """Whether the policy reads ``waiting_requests``, ``running_requests``, ``used_pages``, ``pages_in_use`` or
        ``pending_requests``: engines then report them after each step."""
        return False

    @property
    def may_keep(self) -> bool:
        """Whether ``choose`` may return None: the request then waits at the router, and all later ones behind it. It is offered
        again when a report of an engine has arrived, a request has ended, or an engine is back. Not for engines that only decode.
        """
        return False

    @property
    def staleness_s(self) -> float:
        """Age, in seconds, of what engines report when the policy sees it. Policies that need it have it as a setting."""
        return 0.0

    @property
    def hears_late(self) -> bool:
        """Whether first tokens and ends of requests, too, reach the router ``staleness_s`` seconds after they have happened:
        ``on_first_token``, ``on_ended`` and what is outstanding are then as late as reports. An engine that fails is known to
        have failed at once. Without effect if ``staleness_s`` is 0."""
        return False

    @property
    def chooses_by(self) -> str:
        """What a choice depends on besides which engines are up.

        request   the request alone
        order     the requests in the order in which they are sent
        reports   also on their times and on what has come from engines ``staleness_s`` late: reports and, if the policy
                  ``hears_late``, what it is told of answers and what is outstanding; on none of the latter otherwise
        state     anything else: load or cached pages as they are now
        """
        return "state"

    def bind(self, context: RoutingContext) -> None:
        """Called once, before the run."""

    def without_effect(self) -> Sequence[str]:
        """Return the names of settings that have no effect because of the others: an error if the user gives one."""
        return ()

    @abstractmethod
    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int | None:
        """Return the number of the engine that gets the request; None keeps it at the router, if ``may_keep``.

        ``engines`` are those that are up, ascending, at least one. A request that is lost with its engine is offered again.
        """

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        """Called when a request has been sent to an engine, right after the choice."""

    def on_first_token(self, request: Request, engine: int, now: float) -> None:
        """Called when the first token of the answer has passed: the prompt is computed."""

    def on_ended(self, request: Request, engine: int, now: float) -> None:
        """Called once for each ``on_sent``: the request has been answered or rejected, or was lost with the engine."""

    def on_down(self, engine: int, now: float) -> None:
        """Called when an engine has failed, or stopped after it has drained, and its requests have ended: its cache is lost."""

    def on_draining(self, engine: int, now: float) -> None:
        """Called when an engine is offered no more, because it will stop; those sent there go on, and end as usual."""

    def on_up(self, engine: int, now: float) -> None:
        """Called when an engine that was down is back or has started, with an empty cache."""
