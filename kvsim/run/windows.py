"""Simulates engines in processes of their own whose router sees them only through what reaches it late.

What an engine does at a time T reaches the router at T + ``staleness_s``, rounded as numbers are. So once all engines have been
played up to a time B, all choices before B + ``staleness_s`` can be made, and the engines can be played up to there: engines
have nothing to do with each other but by the router. While they play one half of that, the router chooses for the other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from kvsim.cluster.planned import Dispatcher, Planned, Windowed, Word
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.engine.collector import without_garbage_collector
from kvsim.engine.outcome import Outcome
from kvsim.plans.apart import independent
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.run.processes import Line, Processes
from kvsim.run.shares import Share, assembled, findings, merged
from kvsim.run.unchanged import recount, requests_unchanged


def in_windows(
    plan: Plan, requests: Sequence[Request], choices: "memoryview[int]", advance: Callable[[int], None] | None
) -> Outcome:
    """Let the router choose window by window, and each process play its engines up to where the choices are known."""
    groups = independent(plan)
    number = min(plan.cluster.workers, len(groups))
    engines = [frozenset([engine for group in groups[each::number] for engine in group]) for each in range(number)]
    with Processes([partial(_play, plan, requests, choices, own) for own in engines]) as processes:
        dispatcher = assembled(Dispatcher, plan, requests)
        dispatcher.begin(requests, choices)
        with without_garbage_collector():
            _dispatch(dispatcher, processes, plan.routing.staleness_s, advance)
        parts = [processes.listen(each)[1] for each in range(number)]
    if advance:
        advance(len(requests))
    shares = [_share(own, choices[: len(requests)]) for own in engines]
    return merged(requests, shares, parts, dispatcher.engines[0].substrate.wiring.lanes())


def _share(engines: frozenset[int], choices: "memoryview[int]") -> Share:
    return Share(engines=engines, own=frozenset([index for index, engine in enumerate(choices) if engine in engines]))


def _dispatch(dispatcher: Dispatcher, processes: Processes, late_s: float, advance: Callable[[int], None] | None) -> None:
    """Make all choices, and let the processes play up to where each is known."""
    played_s = posted_s = 0.0
    under_way: deque[float] = deque()
    while posted_s < inf:
        known_s = min(played_s + late_s, posted_s + late_s / 2)
        next_s = dispatcher.choose_until(known_s)
        if next_s > posted_s:
            posted_s = next_s
            processes.order(posted_s)
            under_way.append(posted_s)
        if posted_s < inf and (len(under_way) > 1 or known_s >= played_s + late_s):
            played_s = under_way.popleft()
            _listen(dispatcher, processes, advance)
    while under_way.popleft() < inf:
        _listen(dispatcher, processes, None)


def _listen(dispatcher: Dispatcher, processes: Processes, advance: Callable[[int], None] | None) -> None:
    """Take in what all processes have played of a window."""
    words: list[Word] = []
    passed = 0
    for number in range(len(processes)):
        _, (some, count) = processes.listen(number)
        words += some
        passed += count
    dispatcher.hear(words)
    if advance:
        advance(passed)


def _play(
    plan: Plan, requests: Sequence[Request], choices: "memoryview[int]", engines: frozenset[int], line: Line
) -> dict[str, Any]:
    """Simulate the requests of some engines. Returns its ``findings``."""
    caches: list[ServedCache] = []
    fixed = replace(plan, routing=Planned(choices))
    return findings(_run(fixed, requests, plan.routing, choices, engines, line, caches), caches)


@policies_named
@requests_unchanged
def _run(
    plan: Plan,
    requests: Sequence[Request],
    routing: RoutingPolicy,
    choices: "memoryview[int]",
    engines: frozenset[int],
    line: Line,
    caches: list[ServedCache],
) -> Outcome:
    """Simulate the requests of some engines. Returns its outcome, in which others have not ended, and adds the ``caches``."""
    cluster = assembled(Windowed, plan, requests)
    cluster.follow(routing, choices, engines, line.order, lambda words, ended: line.tell("words", (words, ended)))
    outcome: Outcome = cluster.run(requests)
    outcome.simulated_s = cluster.ended_s
    recount(plan, cluster.caches, None)
    caches += cluster.caches
    return outcome
