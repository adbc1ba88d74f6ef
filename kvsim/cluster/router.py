"""The router before a cluster of engines: asks the routing policy, and keeps what it may know of each engine."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.cluster.held_pages import HeldPages, Holders
from kvsim.core.answers import PolicyError
from kvsim.core.answers import engine as engine_number
from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.engine.engine import Engine

if TYPE_CHECKING:
    from kvsim.policies.routing.base import RoutingPolicy


class Report(NamedTuple):
    """What an engine reports of its load."""

    waiting_requests: int = 0
    running_requests: int = 0
    used_pages: int = 0
    pages_in_use: int = 0
    pending_requests: int = 0


def report_of(engine: Engine) -> Report:
    """Return what an engine reports of its load now."""
    gpu = engine.gpu
    used = gpu.pool.capacity - gpu.pool.free
    in_use = used - gpu.evictable_pages - gpu.leaving_pages
    return Report(len(engine.waiting.queue), len(engine.schedule), used, in_use, engine.pending_requests)


class Changes:
    """Which engines' outstanding requests have changed, for each who wants to know."""

    def __init__(self) -> None:
        self._sets: list[set[int]] = []

    def collect(self) -> set[int]:
        """Return a new set, to which the numbers of engines are added from now on. Whoever has it empties it."""
        changed: set[int] = set()
        self._sets.append(changed)
        return changed

    def add(self, engine: int) -> None:
        """An engine's requests have changed."""
        for changed in self._sets:
            changed.add(engine)


class KnownEngine:
    """What the router knows of one engine: the ``EngineStatus`` that policies see.

    Its own bookkeeping is as the router has heard; what the engine reports is ``staleness_s`` old.
    """

    def __init__(
        self,
        engine: int,
        capacity_pages: int | None = None,
        staleness_s: float = 0.0,
        clock: Callable[[], float] = lambda: 0.0,
        policy: str = "a routing policy",
        changes: "Changes | None" = None,
    ) -> None:
        """``clock`` returns the time in seconds; it is not read if ``staleness_s`` is 0. Errors name the ``policy``.

        ``changes`` are told of each request that is sent or has ended.
        """
        self._changes = changes
        self._policy = policy
        self._engine = engine
        self._capacity_pages = capacity_pages
        self._outstanding_requests = 0
        self._outstanding_tokens = 0
        self._staleness_s = staleness_s
        self._clock = clock
        self._held: HeldPages | None = None
        self._below: list[tuple[Tier, HeldPages]] | None = None
        self._report: Report | None = None
        self._under_way: deque[tuple[float, Report]] | None = None
        """Reports that have not arrived, with their times of arrival."""

    @property
    def engine(self) -> int:
        return self._engine

    @property
    def capacity_pages(self) -> int | None:
        return self._capacity_pages

    @property
    def outstanding_requests(self) -> int:
        return self._outstanding_requests

    @property
    def outstanding_tokens(self) -> int:
        return self._outstanding_tokens

    def sent(self, request: Request, count: int = 1) -> None:
        """Count a request that is sent to the engine; with a ``count`` of -1, one that has ended."""
        if self._changes is not None:
            self._changes.add(self._engine)
        self._outstanding_requests += count
        self._outstanding_tokens += count * request.prompt_tokens

    def watch(self, tier: Tier, holders: Holders | None = None) -> None:
        """Let the engine report every page that its GPU tier, still empty, stores or drops from now on, also to ``holders``."""
        self._held = HeldPages(self._staleness_s, self._clock, holders, self._engine)
        tier.watches.append(self._held)

    def watch_below(self, below: "list[tuple[Tier, HeldPages]]") -> None:
        """Let the tiers below the engine's GPU report, from the top down: these know what each has."""
        self._below = below

    def report(self, report: Report, now: float) -> None:
        """Take the report of an engine's load that it sends now."""
        if self._staleness_s:
            self.receive(now)
            if self._under_way is None:
                self._under_way = deque()
            self._under_way.append((now + self._staleness_s, report))
        else:
            self._report = report

    def expect_reports(self) -> None:
        """Say that the engine will report its load; until the first report arrives, it has none."""
        self._report = Report()

    def receive(self, now: float) -> None:
        """Take in the reports of load that have arrived by ``now``."""
        while self._under_way and self._under_way[0][0] <= now:
            self._report = self._under_way.popleft()[1]

    @property
    def waiting_requests(self) -> int:
        return self._load().waiting_requests

    @property
    def running_requests(self) -> int:
        return self._load().running_requests

    @property
    def used_pages(self) -> int:
        return self._load().used_pages

    @property
    def pages_in_use(self) -> int:
        return self._load().pages_in_use

    @property
    def pending_requests(self) -> int:
        return self._load().pending_requests

    def _load(self) -> Report:
        if self._report is None:
            raise PolicyError(f"{self._policy} reads the load that engines report: it needs needs_reports = True")
        if self._staleness_s:
            self.receive(self._clock())
        return self._report

    def cached_pages(self, request: Request) -> int:
        if self._held is None:
            raise PolicyError(f"{self._policy} calls cached_pages(): it needs needs_cached_pages = True")
        if self._staleness_s:
            self._held.receive(self._clock())
        return self._held.leading_pages(request.runs)

    def lower_pages(self, request: Request, after: int) -> tuple[tuple[int, int], ...]:
        if self._below is None:
            raise PolicyError(f"{self._policy} calls lower_pages(): it needs needs_lower_pages = True")
        found: list[tuple[int, int]] = []
        for tier, held in self._below:
            if self._staleness_s:
                held.receive(self._clock())
            pages = held.following_pages(request.runs, after, tier.told_unit)
            found.append((tier.level, pages))
            after += pages
        return tuple(found)


def name_of(policy: object) -> str:
    """Return the policy's name for an error message."""
    return f"the routing policy {type(policy).__name__}"


def known_engines(
    policy: "RoutingPolicy",
    gpus: Mapping[int, Tier],
    clock: Callable[[], float],
    holders: Holders | None = None,
    changes: Changes | None = None,
) -> list[KnownEngine]:
    """Return what is known of each engine before a run, by number, with the reports that the policy needs.

    ``gpus`` are their GPU tiers, still empty; ``clock`` returns the time in seconds. Pages are also reported to ``holders``, and
    requests sent or ended to ``changes``.
    """
    below = lower_watches(policy, gpus, clock, holders) if policy.needs_lower_pages else {}
    engines = []
    for number, gpu in sorted(gpus.items()):
        capacity = gpu.pool.capacity
        pages = None if capacity == UNLIMITED else capacity
        known = KnownEngine(number, pages, policy.staleness_s, clock, name_of(policy), changes)
        if policy.needs_cached_pages:
            known.watch(gpu, holders)
        if policy.needs_lower_pages:
            known.watch_below([(tier, below[tier]) for tier in gpu.all_below()])
        if policy.needs_reports:
            known.expect_reports()
        engines.append(known)
    return engines


def lower_watches(
    policy: "RoutingPolicy", gpus: Mapping[int, Tier], clock: Callable[[], float], holders: Holders | None
) -> dict[Tier, HeldPages]:
    """Let every tier below some of these GPUs report what it stores and drops. Returns who knows it of each."""
    engines: dict[Tier, list[int]] = {}
    for number, gpu in sorted(gpus.items()):
        for tier in gpu.all_below():
            engines.setdefault(tier, []).append(number)
    below = None if holders is None else holders.share([(above, tier.told_unit == 1) for tier, above in engines.items()])
    watches: dict[Tier, HeldPages] = {}
    for number, tier in enumerate(engines):
        watches[tier] = HeldPages(policy.staleness_s, clock, below, number)
        tier.watches.append(watches[tier])
    return watches


@mypyc_attr(allow_interpreted_subclasses=True)
class Router:
    """Sends each request to the engine that the policy chooses among those that are up."""

    def __init__(self, policy: "RoutingPolicy", engines: Sequence[KnownEngine]) -> None:
        self.policy = policy
        self.engines = {known.engine: known for known in engines}
        self._up = dict(self.engines)
        self._offered = tuple(engines)
        self._choose: Any = policy.choose
        """Typed so that its answers may be anything."""
        self._name = name_of(policy)
        self._may_keep = policy.may_keep
        self._reports_due: deque[float] = deque()
        """When the reports arrive that are on their way, for a policy that may keep requests."""
        self.late_s = policy.staleness_s if policy.hears_late else 0.0
        """How long first tokens and ends of requests are on their way to the router."""
        self._unheard: list[tuple[float, int, int, Request, bool]] = []
        """Those on their way: a heap by arrival, then by engine, then in their order, with whether the request has ended."""
        self._count = 0

    @property
    def has_engines(self) -> bool:
        """Whether any engine is up; otherwise requests must wait for one."""
        return bool(self._offered)

    def send(self, request: Request, now: float) -> int | None:
        """Return the engine that gets the request; None: it waits before the router. One must be up. Raises PolicyError."""
        self.hear(now)
        answer = self._choose(request, self._offered, now)
        if answer is None and self._may_keep:
            return None
        chosen = engine_number(self._name, "choose()", answer, self._up)
        self._up[chosen].sent(request)
        self.policy.on_sent(request, chosen, now)
        return chosen

    def report(self, engine: int, report: Report, now: float) -> None:
        """An engine reports its load."""
        self.engines[engine].report(report, now)
        self._expect(now)

    def _expect(self, now: float) -> None:
        """Note that something has been sent to the router that a request it keeps may wait for."""
        if self._may_keep and self.policy.staleness_s:
            self._drop_arrived(now)
            self._reports_due.append(now + self.policy.staleness_s)

    def next_report_s(self, now: float) -> float:
        """Return when the next report arrives, or is heard of a request, of those on their way; infinite if there is none."""
        self._drop_arrived(now)
        return self._reports_due[0] if self._reports_due else inf

    def _drop_arrived(self, now: float) -> None:
        while self._reports_due and self._reports_due[0] <= now:
            self._reports_due.popleft()

    def first_token(self, request: Request, engine: int, now: float) -> None:
        """The first token of an answer has passed."""
        self._tell(request, engine, now, has_ended=False)

    def ended(self, request: Request, engine: int, now: float) -> None:
        """A request that was sent to an engine has been answered or rejected, or was lost with the engine."""
        self._tell(request, engine, now, has_ended=True)

    def _tell(self, request: Request, engine: int, now: float, *, has_ended: bool) -> None:
        """Let the policy know of a request now, or send word of it."""
        if not self.late_s:
            self._heard(request, engine, now, has_ended)
            return
        self.hear(now)
        self._count += 1
        heappush(self._unheard, (now + self.late_s, engine, self._count, request, has_ended))
        self._expect(now)

    def hear(self, now: float) -> None:
        """Let the policy know of what has arrived by now."""
        while self._unheard and self._unheard[0][0] <= now:
            arrived_s, engine, _, request, has_ended = heappop(self._unheard)
            self._heard(request, engine, arrived_s, has_ended)

    def _heard(self, request: Request, engine: int, now: float, has_ended: bool) -> None:
        if has_ended:
            self.engines[engine].sent(request, -1)
            self.policy.on_ended(request, engine, now)
        else:
            self.policy.on_first_token(request, engine, now)

    def _hear_all_of(self, engine: int, now: float) -> None:
        """Let the policy know of everything that an engine which has failed had to say."""
        self.hear(now)
        last = sorted([one for one in self._unheard if one[1] == engine])
        self._unheard = [one for one in self._unheard if one[1] != engine]
        heapify(self._unheard)
        for _, _, _, request, has_ended in last:
            self._heard(request, engine, now, has_ended)

    def down(self, engine: int, now: float) -> None:
        """An engine has failed or stopped; its requests have ended already."""
        self._hear_all_of(engine, now)
        if engine in self._up:
            self._take_out(engine)
        self.policy.on_down(engine, now)

    def drain(self, engine: int, now: float) -> None:
        """An engine gets no more requests; it stops when those that it has been sent have ended."""
        self._take_out(engine)
        self.policy.on_draining(engine, now)

    def _take_out(self, engine: int) -> None:
        del self._up[engine]
        self._offered = tuple([known for number, known in self.engines.items() if number in self._up])

    def under_way(self, engine: int) -> int:
        """Requests sent to an engine that have not ended, whether or not the router has heard of it."""
        unheard = sum([1 for _, number, _, _, has_ended in self._unheard if number == engine and has_ended])
        return self.engines[engine].outstanding_requests - unheard

    def is_offered(self, engine: int) -> bool:
        """Whether requests may be sent to an engine."""
        return engine in self._up

    def up(self, engine: int, now: float) -> None:
        """An engine that was down is back, with an empty cache."""
        self._up[engine] = self.engines[engine]
        self._offered = tuple([known for number, known in self.engines.items() if number in self._up])
        self.policy.on_up(engine, now)
