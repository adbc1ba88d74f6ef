"""Upper bounds on the hits of a run: Belady's bound for its tiers, and the hits of an unlimited cache."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvsim.core.request import Request
from kvsim.engine.collector import without_garbage_collector
from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.belady import Belady
from kvsim.report.folder import prepare_folder
from kvsim.results.records import read_bound
from kvsim.results.result import summarize
from kvsim.run import play

RECORDED = ("hit_rate", "page_hit_rate", "hit_tokens", "prompt_tokens", "rejected")
Bound = dict[str, Any]


def bounds_of(plan: Plan, names: Mapping[str, str], requests: Sequence[Request], folder: Path | None = None) -> dict[str, Bound]:
    """Return the bounds of a plan by kind. ``names`` come from ``bound_names``, ``requests`` are those of the plan's trace.

    With ``folder``, the one that a sweep keeps for bounds, those that are there are read, and the others are stored there.
    """
    plan = play.with_known_answers(plan, requests)
    return {kind: _bound(plan, kind, name, requests, folder) for kind, name in names.items()}


def _bound(plan: Plan, kind: str, name: str, requests: Sequence[Request], folder: Path | None) -> Bound:
    bound = None if folder is None else read_bound(folder, name)
    if bound is None:
        with without_garbage_collector():
            bound = compute_bound(plan, kind, requests)
        if folder is not None:
            _write_bound(folder, name, bound)
    return bound


def compute_bound(plan: Plan, kind: str, requests: Sequence[Request]) -> Bound:
    """Return hit rates of ``belady`` (MIN on one tier as large as all of all engines) or ``unlimited`` (nothing is evicted)."""
    if kind == "unlimited":
        plan = replace(plan, tiers=[plan.tiers[0], replace(plan.tiers[0], capacity_pages=None)])
    outcome = play.upper_bound(plan, requests, _belady())
    record = summarize(outcome, command="replay", config=plan.config, seed=plan.seed, warmup=plan.warmup, load_s=0.0, versions={})
    return {name: record[name] for name in RECORDED}


@cache
def _belady() -> Belady:
    """Return the policy shared by all bounds of this process; most bounds cover the same requests."""
    return Belady()


def _write_bound(folder: Path, name: str, bound: Bound) -> None:
    """Store a bound if that is possible; one that is not stored is computed again where it is shown."""
    with suppress(UsageError):
        prepare_folder(folder)
        with replacing(folder / f"{name}.json") as file:
            file.write(json.dumps(bound).encode())
