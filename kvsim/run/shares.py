"""The shares of a cluster that processes simulate apart, and one outcome from those of all."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kvsim.cluster.cluster import Cluster
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.engine.link_use import joined
from kvsim.engine.outcome import Disagreement, Outcome, TierUse, held_below, note_held, summed
from kvsim.plans.plan import Plan
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.run.assembly import build_cluster_of, build_graphs, build_served


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process simulates."""

    engines: frozenset[int]
    own: frozenset[int]
    """Indices of the requests that its engines serve."""


def assembled(kind: type[Cluster], plan: Plan, requests: Sequence[Request]) -> Any:
    """Build a cluster of this class with all engines, which are empty."""
    choice = SUBSTRATES[plan.substrate]
    caches = [build_served(plan, graph, requests) for graph in build_graphs(plan, requests, choice.pool)]
    return build_cluster_of(kind, plan, requests, caches, choice.open(plan, requests, caches))


def findings(outcome: Outcome, caches: Sequence[ServedCache]) -> dict[str, Any]:
    """Return the fields of the outcome of a share, without the requests, and what tiers below the GPU hold."""
    found = {field.name: getattr(outcome, field.name) for field in fields(Outcome) if field.name != "requests"}
    return found | {"held": {name: held_below(caches, name) for name in outcome.tier_names[1:] if name in outcome.tiers}}


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
        has_admission=any(part["has_admission"] for part in parts),
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
