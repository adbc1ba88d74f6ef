"""Routing whose choices are known before a run: for engines that are simulated apart."""

from collections.abc import Sequence

from kvsim.cluster.cluster import Cluster
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.engine.arrivals import due_in_order
from kvsim.engine.book import Book
from kvsim.engine.job import Job
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy


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
