"""Simulates independent engines in processes of their own: with the results, to the last bit, of one process."""

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from time import perf_counter
from traceback import format_exc
from typing import Any

import numpy as np

from kvsim.cluster.cluster import Cluster
from kvsim.cluster.planned import Planned, Rehearsal
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.engine.link_use import joined
from kvsim.engine.outcome import Disagreement, Outcome, TierUse, held_below, note_held, summed
from kvsim.errors import PolicyFailed, UsageError
from kvsim.plans.apart import ALONE, KEY, check_requests_apart, independent
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.run.assembly import build_cluster_of, build_graphs, build_served
from kvsim.run.unchanged import recount, requests_unchanged

BATCH = 1000
"""Requests whose end a worker process reports at a time."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process simulates."""

    engines: frozenset[int]
    own: frozenset[int]
    """Indices of the requests that its engines serve."""


def simulate_apart(plan: Plan, requests: Sequence[Request], advance: Callable[[int], None] | None) -> Outcome:
    """Simulate the engines of a plan in ``cluster.workers`` processes; ``advance`` as in ``Cluster.run``. Raises UsageError."""
    began = perf_counter()
    check_requests_apart(plan, requests)
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UsageError(f"{KEY}: this operating system cannot fork processes: {ALONE}")
    rehearsal = _assembled(Rehearsal, plan, requests)
    choices = rehearsal.choices(requests)
    shares = shares_of(plan, requests, choices)
    fixed = replace(plan, routing=Planned(choices))
    parts = in_processes([partial(_play, fixed, requests, share) for share in shares], advance)
    outcome = merged(requests, shares, parts, rehearsal.engines[0].substrate.wiring.lanes())
    outcome.wall_s = perf_counter() - began
    recount(plan, (), outcome)
    return outcome


def shares_of(plan: Plan, requests: Sequence[Request], choices: Sequence[int]) -> list[Share]:
    """Divide engines and their requests into shares with about as many tokens each; one without requests is left out.

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
    return [Share(engines=there, own=frozenset(some)) for there, some in zip(engines, own, strict=True) if some]


def _assembled(kind: type[Any], plan: Plan, requests: Sequence[Request]) -> Any:
    """Build a cluster of this class with all engines, which are empty."""
    choice = SUBSTRATES[plan.substrate]
    caches = [build_served(plan, graph, requests) for graph in build_graphs(plan, requests, choice.pool)]
    return build_cluster_of(kind, plan, requests, caches, choice.open(plan, requests, caches))


def _play(plan: Plan, requests: Sequence[Request], share: Share, report: Callable[[int], None]) -> dict[str, Any]:
    """Simulate a share. Returns the fields of its outcome, without the requests, and what tiers below the GPU hold."""
    caches: list[ServedCache] = []
    outcome = _run(plan, requests, share, report, caches)
    if rest := len(share.own) % BATCH:
        report(rest)
    found = {field.name: getattr(outcome, field.name) for field in fields(Outcome) if field.name != "requests"}
    return found | {"held": {name: held_below(caches, name) for name in outcome.tier_names[1:] if name in outcome.tiers}}


@policies_named
@requests_unchanged
def _run(
    plan: Plan, requests: Sequence[Request], share: Share, report: Callable[[int], None], caches: list[ServedCache]
) -> Outcome:
    """Simulate a share. Returns its outcome, in which other requests have not ended, and adds the ``caches``."""
    cluster = _assembled(Cluster, plan, requests)
    outcome: Outcome = cluster.run(requests, lambda ended: None if ended % BATCH else report(BATCH), share.own)
    recount(plan, cluster.caches, None)
    caches += cluster.caches
    return outcome


# --- processes -----------------------------------------------------------------------------------------------------------


def in_processes(
    jobs: Sequence[Callable[[Callable[[int], None]], dict[str, Any]]], advance: Callable[[int], None] | None
) -> list[dict[str, Any]]:
    """Return what each job returns, in forked processes, one for each. Jobs report how many more requests have ended.

    Raises UsageError as a job does, and if a process dies.
    """
    forking = multiprocessing.get_context("fork")
    found: dict[int, dict[str, Any]] = {}
    ended = 0
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        for number, job in enumerate(jobs):
            ours, theirs = forking.Pipe(duplex=False)
            process = forking.Process(target=_work, args=(job, theirs), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which a simulation does not use
                process.start()
            theirs.close()
            running[ours] = number, process
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                kind, content = _received(connection)
                if kind == "ended":
                    ended += content
                    if advance:
                        advance(ended)
                    continue
                number, process = running.pop(connection)
                process.join()
                if kind == "error":
                    raise content
                found[number] = content
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [found[number] for number in range(len(jobs))]


def _received(connection: Connection) -> tuple[str, Any]:
    try:
        kind, content = connection.recv()
    except EOFError:
        return "error", UsageError(f"{KEY}: a worker process died, perhaps for lack of memory: use fewer workers")
    return kind, content


def _work(job: Callable[[Callable[[int], None]], dict[str, Any]], parent: Connection) -> None:
    """Do a job in this process, which ends when the one that waits for it says so, or has gone. Ctrl-C is left to that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tell = partial(_tell, parent)
    try:
        tell("done", job(partial(tell, "ended")))
    except UsageError as error:
        kind = PolicyFailed if isinstance(error, PolicyFailed) else UsageError
        tell("error", kind(str(error)))
    except Exception:
        tell("error", RuntimeError(f"a worker process failed:\n{format_exc()}"))


def _tell(parent: Connection, kind: str, content: Any) -> None:
    try:
        parent.send((kind, content))
    except BrokenPipeError:
        raise SystemExit(1) from None


# --- the outcome ---------------------------------------------------------------------------------------------------------


def merged(
    requests: Sequence[Request], shares: Sequence[Share], parts: Sequence[dict[str, Any]], order: Sequence[tuple[str, int]]
) -> Outcome:
    """Return the outcome of a run from those of its shares: of each request and engine, what its own process has found.

    ``order`` has the name and owner of each link, in the order in which an outcome lists them.
    """
    sums: dict[str, Any] = {name: summed([part[name] for part in parts]) for name in SUMMED}
    lists: dict[str, Any] = {name: _by_engine(shares, [part[name] for part in parts]) for name in BY_ENGINE}
    places = {lane: place for place, lane in enumerate(order)}
    lanes = [lane for part in parts for lane in part["link_lanes"]]
    lanes.sort(key=lambda lane: places[lane.name, lane.owner])
    outcome = Outcome(
        requests=requests,
        page_tokens=parts[0]["page_tokens"],
        columns=_own_rows(shares, [part["columns"] for part in parts]),
        tiers=_tiers([part["tiers"] for part in parts]),
        links=joined(lanes),
        link_lanes=lanes,
        simulated_s=max(part["simulated_s"] for part in parts),
        retractions=sum(part["retractions"] for part in parts),
        lost_to_disagreement=_disagreement([part["lost_to_disagreement"] for part in parts]),
        **sums,
        **lists,
    )
    if parts[0]["known_pages"] is not None:
        outcome.known_pages = _own_rows(shares, [{"": part["known_pages"]} for part in parts])[""]
    note_held(outcome.tiers, outcome.tier_names, outcome.hit_pages, lambda name: _held([part["held"][name] for part in parts]))
    return outcome


SUMMED = ("prefetch", "placement", "checkpoints", "drafts", "adapter_use")
"""Fields with counts by name."""
BY_ENGINE = ("engines", "engines_busy_s", "engines_claiming_s", "engines_exchange_s", "engines_stages_s")
"""Fields with an entry for each engine."""


def _own_rows(shares: Sequence[Share], columns: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return, of each request, the row of the process that has served it."""
    whole = columns[0]
    for share, part in zip(shares[1:], columns[1:], strict=True):
        rows = np.fromiter(sorted(share.own), np.int64, len(share.own))
        for name, values in part.items():
            whole[name][rows] = values[rows]
    return whole


def _by_engine(shares: Sequence[Share], lists: Sequence[list[Any]]) -> list[Any]:
    """Return the entry of each engine from the process that has it; those without requests are alike everywhere."""
    whole = list(lists[0])
    for share, part in zip(shares, lists, strict=True):
        for engine in share.engines:
            whole[engine] = part[engine]
    return whole


def _tiers(parts: Sequence[dict[str, TierUse]]) -> dict[str, TierUse]:
    """Return the use of all tiers: each is used in one process, and has its capacity in all."""
    whole = {name: replace(use) for name, use in parts[0].items()}
    for part in parts[1:]:
        for name, use in part.items():
            whole[name].peak_pages += use.peak_pages
            whole[name].evicted_pages += use.evicted_pages
            whole[name].inserted_pages += use.inserted_pages
    return whole


def _disagreement(parts: Sequence[Disagreement]) -> Disagreement:
    return Disagreement(pages=sum(part.pages for part in parts), transfers=sum(part.transfers for part in parts))


def _held(parts: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the sums of what tiers hold; None if a part does not know."""
    known = [part for part in parts if part is not None]
    return (sum(held for held, _ in known), sum(own for _, own in known)) if len(known) == len(parts) else None
