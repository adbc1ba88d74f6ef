"""Simulates independent engines in processes of their own: with the results, to the last bit, of one process."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from mmap import mmap
from time import perf_counter
from typing import Any, Final

from kvsim.cluster.cluster import Cluster
from kvsim.cluster.planned import Planned, Rehearsal
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.plans.apart import ALONE, KEY, check_requests_apart, chooses_by, independent
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.run.processes import Line, Processes, finish
from kvsim.run.shares import Share, assembled, findings, merged
from kvsim.run.unchanged import recount, requests_unchanged
from kvsim.run.windows import in_windows

BATCH = 1000
"""Requests whose end a worker process reports at a time."""
NUMBERS: Final = "i"
"""The kind of the numbers of engines in memory that processes share, one for each request."""


def simulate_apart(plan: Plan, requests: Sequence[Request], advance: Callable[[int], None] | None) -> Outcome:
    """Simulate the engines of a plan in ``cluster.workers`` processes; ``advance`` as in ``Cluster.run``. Raises UsageError.

    Each process builds all engines, while this one lets the router choose. A router that goes by reports chooses window by
    window, and processes play the windows between.
    """
    began = perf_counter()
    check_requests_apart(plan, requests)
    choices = memoryview(mmap(-1, max(1, len(requests)) * array(NUMBERS).itemsize)).cast(NUMBERS)
    outcome = (in_windows if chooses_by(plan.routing) == "reports" else chosen_before)(plan, requests, choices, advance)
    outcome.wall_s = perf_counter() - began
    recount(plan, (), outcome)
    return outcome


# --- a router whose choices are known before -----------------------------------------------------------------------------


def chosen_before(
    plan: Plan, requests: Sequence[Request], choices: "memoryview[int]", advance: Callable[[int], None] | None
) -> Outcome:
    """Let the router choose for all requests, then each process play those of its engines."""
    number = min(plan.cluster.workers, len(independent(plan)))
    with Processes([partial(_play, plan, requests, choices, each) for each in range(number)]) as processes:
        rehearsal = assembled(Rehearsal, plan, requests)
        choices[: len(requests)] = array(NUMBERS, rehearsal.choices(requests))
        shares = shares_of(plan, requests, choices)
        processes.order([share.engines for share in shares])
        parts = finish(processes, advance)
    return merged(requests, shares, parts, rehearsal.engines[0].substrate.wiring.lanes())


def shares_of(plan: Plan, requests: Sequence[Request], choices: Sequence[int]) -> list[Share]:
    """Divide engines and their requests into shares with about as many tokens each.

    Raises UsageError if a request waits for one that another process would serve.
    """
    tokens = [0] * plan.layout.engines
    for request, engine in zip(requests, choices, strict=True):
        tokens[engine] += request.prompt_tokens + request.output_tokens * request.samples
    groups = sorted(independent(plan), key=lambda group: -sum([tokens[engine] for engine in group]))
    filled = [0] * min(plan.cluster.workers, len(groups))
    owner = [0] * plan.layout.engines
    for group in groups:
        worker = filled.index(min(filled))
        filled[worker] += sum([tokens[engine] for engine in group])
        for engine in group:
            owner[engine] = worker
    own: list[set[int]] = [set() for _ in filled]
    for request, engine in zip(requests, choices, strict=True):
        if far := [before for before in request.predecessors if owner[choices[before]] != owner[engine]]:
            raise UsageError(f"{KEY}: request {request.index} waits for request {far[0]}, which another engine serves: {ALONE}")
        own[owner[engine]].add(request.index)
    engines = [frozenset([engine for engine, worker in enumerate(owner) if worker == number]) for number in range(len(filled))]
    return [Share(engines=there, own=frozenset(some)) for there, some in zip(engines, own, strict=True)]


def _play(plan: Plan, requests: Sequence[Request], choices: "memoryview[int]", number: int, line: Line) -> dict[str, Any]:
    """Simulate the share with a number. Returns its ``findings``."""
    caches: list[ServedCache] = []
    return findings(_run(replace(plan, routing=Planned(choices)), requests, choices, number, line, caches), caches)


@policies_named
@requests_unchanged
def _run(
    plan: Plan, requests: Sequence[Request], choices: "memoryview[int]", number: int, line: Line, caches: list[ServedCache]
) -> Outcome:
    """Simulate a share. Returns its outcome, in which other requests have not ended, and adds the ``caches``."""
    cluster = assembled(Cluster, plan, requests)
    engines = line.order()[number]
    own = frozenset([request.index for request in requests if choices[request.index] in engines])
    outcome: Outcome = cluster.run(requests, lambda ended: None if ended % BATCH else line.tell("ended", BATCH), own)
    if rest := len(own) % BATCH:
        line.tell("ended", rest)
    recount(plan, cluster.caches, None)
    caches += cluster.caches
    return outcome
