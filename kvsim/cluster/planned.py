"""Routing that is known before requests arrive: for engines that are simulated apart from their router."""

from collections.abc import Callable, Collection, Sequence
from math import inf
from operator import itemgetter
from typing import Any, Final

from kvsim.cluster.cluster import Cluster
from kvsim.cluster.held_pages import HeldPages
from kvsim.cluster.router import Report, report_of
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.core.watch import Watch
from kvsim.engine.arrivals import due_in_order
from kvsim.engine.book import Book
from kvsim.engine.job import Job
from kvsim.pages.extents import Extent
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy

STORED: Final = 0
DROPPED: Final = 1
LOAD: Final = 2
FIRST_TOKEN: Final = 3
ENDED: Final = 4
"""What a router may hear of engines."""
Word = tuple[float, int, int, Any]
"""When something was sent to the router and what it is; then its tier or engine, and pages, load or the request's index."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Planned(RoutingPolicy):
    """Sends each request to the engine that was chosen for it before."""

    def __init__(self, choices: Sequence[int]) -> None:
        """``choices`` are the engines by the index of the request."""
        self._choices = choices

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        return self._choices[request.index]


@mypyc_attr(allow_interpreted_subclasses=True)
class Rehearsal(Cluster):
    """Lets requests arrive and its router choose, but no engine serve anything."""

    def choices(self, requests: Sequence[Request]) -> list[int]:
        """Return the engine of each request. Those that wait for others are routed last: their order must not matter."""
        self.book = Book(requests)
        self.env.process(self._arrivals(due_in_order(requests, self.engines[0].settings.reset_at_s)))
        self.env.run()
        for request in requests:
            if request.after >= 0:
                self.engine_of(Job(request, self.env.now))
        return [self._sent[request.index] for request in requests]

    def _deliver(self, job: Job) -> None:
        self.engine_of(job)


class Teller(Watch):
    """Notes every page that a tier stores or drops, to tell the router."""

    def __init__(self, place: int, words: list[Word], env: Any) -> None:
        """``place`` is the tier's among all; ``words`` is what is noted."""
        self._place = place
        self._words = words
        self._env = env

    def stored(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self._words.append((self._env.now, STORED, self._place, extents))

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self._words.append((self._env.now, DROPPED, self._place, extents))


@mypyc_attr(allow_interpreted_subclasses=True)
class Windowed(Cluster):
    """Serves the requests of some engines, window by window, and notes what a router that is elsewhere will hear of it.

    Every request arrives, but those of other engines are let go.
    """

    def follow(
        self,
        policy: RoutingPolicy,
        choices: Sequence[int],
        own: Collection[int],
        order: Callable[[], float],
        tell: Callable[[list[Word], int], None],
    ) -> None:
        """Serve the requests that ``choices`` send to engines of one's ``own``. ``policy`` says what its router hears of.

        ``order`` returns up to which time, not including it, all choices are known: infinite once all are. Before the next one,
        ``tell`` is called with what the router will hear of the time before, and how many requests have ended so far.
        """
        self._choices, self._own_engines, self._order, self._tell = choices, own, order, tell
        self.ended_s = 0.0
        """When the last request ended or was let go."""
        self._let_go = 0
        self.words: list[Word] = []
        self._hears_answers = policy.hears_late
        for engine in self.engines:
            engine.reports = policy.needs_reports
        for place, tier in enumerate([tier for cache in self.caches for tier in cache.tiers]):
            if policy.needs_lower_pages if tier.above else policy.needs_cached_pages:
                tier.watches.append(Teller(place, self.words, self.env))

    def _run_until_all_end(self) -> None:
        while (until_s := self._order()) < inf:
            self.env.run(until_s)
            self._tell(self.words, self._count - self._unfinished - self._let_go)
            self.words.clear()
        super()._run_until_all_end()

    def _arrive(self, request: Request) -> None:
        is_heard_later = self.engines[0].substrate.request_s(request.prompt_tokens) > 0  # and the choice is made then
        if is_heard_later or self._choices[request.index] in self._own_engines:
            super()._arrive(request)
        else:
            self._let_go += 1
            self._one_less()

    def _deliver(self, job: Job) -> None:
        if self._choices[job.request.index] in self._own_engines:
            super()._deliver(job)
        elif not job.request.sample:
            self._apart.pop(job.request.index, None)
            self._samples_left.pop(job.request.index, None)
            self._let_go += 1
            self._one_less()

    def _one_less(self) -> None:
        self.ended_s = self.env.now
        super()._one_less()

    def first_token(self, job: Job, engine: int) -> None:
        super().first_token(job, engine)
        if self._hears_answers:
            self.words.append((self.env.now, FIRST_TOKEN, engine, job.request.index))

    def _forget(self, request: Request, now: float) -> None:
        if self._hears_answers and request.index in self._sent:
            self.words.append((now, ENDED, self._sent[request.index], request.index))
        super()._forget(request, now)

    def stepped(self, engine: int) -> None:
        if self.engines[engine].reports:
            self.words.append((self.env.now, LOAD, engine, tuple(report_of(self.engines[engine]))))


@mypyc_attr(allow_interpreted_subclasses=True)
class Dispatcher(Cluster):
    """Lets requests arrive and its router choose, window by window; the engines that serve them, and report, are elsewhere."""

    def begin(self, requests: Sequence[Request], choices: Any) -> None:
        """Begin a run. The engine of each request is written to ``choices``, by its index."""
        self.book, self._choices = Book(requests), choices
        self._tiers = [tier for cache in self.caches for tier in cache.tiers]
        self.env.process(self._arrivals(due_in_order(requests, ())))

    def choose_until(self, until_s: float) -> float:
        """Choose for all requests that reach the router before a time. Returns when the next may do so; infinite: never."""
        if until_s > self.env.now:
            self.env.run(until_s if until_s < inf else None)
        return float(self.env.peek())

    def _deliver(self, job: Job) -> None:
        engine = self.engine_of(job)
        assert engine is not None, "engines do not fail, and requests are not kept"
        self._choices[job.request.index] = engine.number

    def hear(self, words: list[Word]) -> None:
        """Take in what engines have sent to the router, all of it before what will be taken in later."""
        assert self.router is not None
        for at_s, what, where, content in sorted(words, key=itemgetter(0)):
            if what <= DROPPED:
                for watch in self._tiers[where].watches:
                    if isinstance(watch, HeldPages):
                        watch.sent(at_s, what == STORED, content)
            elif what == LOAD:
                self.router.report(where, Report(*content), at_s)
            elif what == FIRST_TOKEN:
                self.router.first_token(self.book.requests[content], where, at_s)
            else:
                self._sent.pop(content, None)
                self.router.ended(self.book.requests[content], where, at_s)
