"""The router before a cluster of engines: asks the routing policy, and keeps what it may know of each engine."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.core.answers import engine as engine_number
from kvsim.core.request import Request
from kvsim.core.tier import PolicyError

if TYPE_CHECKING:
    from kvsim.policies.routing.base import RoutingPolicy


class Report(NamedTuple):
    """What an engine says of itself after each step."""

    waiting_requests: int = 0
    running_requests: int = 0
    used_pages: int = 0


class KnownEngine:
    """What the router knows of one engine: the ``EngineStatus`` that policies see."""

    def __init__(self, engine: int, capacity_pages: int | None = None, staleness_s: float = 0.0) -> None:
        self.engine = engine
        self.capacity_pages = capacity_pages
        self.outstanding_requests = 0
        self.outstanding_tokens = 0
        self.staleness_s = staleness_s
        self._report = Report()
        self._under_way: deque[tuple[float, Report]] = deque()
        """Reports that have not reached the router, with the times at which they do."""
        self._reports = False

    @property
    def waiting_requests(self) -> int:
        return self._reported().waiting_requests

    @property
    def running_requests(self) -> int:
        return self._reported().running_requests

    @property
    def used_pages(self) -> int:
        return self._reported().used_pages

    def cached_pages(self, request: Request) -> int:
        raise PolicyError("the routing policy called cached_pages() without needs_cached_pages = True")

    def report(self, report: Report, now: float) -> None:
        """Take a report that the engine sends now."""
        self._reports = True
        self._under_way.append((now + self.staleness_s, report))

    def look(self, now: float) -> None:
        """Take in what has reached the router by now."""
        while self._under_way and self._under_way[0][0] <= now:
            self._report = self._under_way.popleft()[1]

    def _reported(self) -> Report:
        return self._report


class Router:
    """Sends each request to the engine that the policy chooses among those that are up."""

    def __init__(self, policy: "RoutingPolicy", engines: Sequence[KnownEngine]) -> None:
        self.policy = policy
        self.engines = {known.engine: known for known in engines}
        self._up = dict(self.engines)
        self._offered = list(engines)
        self._choose: Any = policy.choose
        """Typed so that its answers may be anything."""
        self._name = f"the routing policy {type(policy).__name__}"

    @property
    def has_engines(self) -> bool:
        """Whether any engine is up; otherwise requests must wait for one."""
        return bool(self._offered)

    def send(self, request: Request, now: float) -> int:
        """Return the number of the engine that gets the request. At least one must be up. Raises PolicyError."""
        for known in self._offered:
            known.look(now)
        chosen = engine_number(self._name, "choose()", self._choose(request, self._offered, now), self._up)
        known = self._up[chosen]
        known.outstanding_requests += 1
        known.outstanding_tokens += request.prompt_tokens
        self.policy.on_sent(request, chosen, now)
        return chosen

    def first_token(self, request: Request, engine: int, now: float) -> None:
        """The first token of an answer has passed."""
        self.policy.on_first_token(request, engine, now)

    def ended(self, request: Request, engine: int, now: float) -> None:
        """A request that was sent to an engine has been answered or rejected, or was lost with the engine."""
        known = self.engines[engine]
        known.outstanding_requests -= 1
        known.outstanding_tokens -= request.prompt_tokens
        self.policy.on_ended(request, engine, now)

    def down(self, engine: int, now: float) -> None:
        """An engine has failed; its requests have ended already."""
        del self._up[engine]
        self._offered = [known for number, known in self.engines.items() if number in self._up]
        self.policy.on_down(engine, now)

    def up(self, engine: int, now: float) -> None:
        """An engine that was down is back, with an empty cache."""
        self._up[engine] = self.engines[engine]
        self._offered = [known for number, known in self.engines.items() if number in self._up]
        self.policy.on_up(engine, now)
