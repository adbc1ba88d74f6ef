"""The upper bounds shown with every comparison: Belady's bound for a run's tiers, and the hits of an unlimited cache."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvsim.core.request import Request
from kvsim.engine.collector import without_garbage_collector
from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.belady import Belady
from kvsim.report.folder import prepare_folder
from kvsim.results.records import read_bound
from kvsim.results.result import RunRecord, summarize
from kvsim.results.runs import Run
from kvsim.run import play
from kvsim.run.execute import load_trace
from kvsim.run.fingerprint import bound_names

RECORDED = ("hit_rate", "page_hit_rate", "hit_tokens", "prompt_tokens", "rejected")
Bound = dict[str, Any]


def compute_bound(plan: Plan, kind: str, requests: list[Request]) -> Bound:
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


def compute_once(folder: Path, plan: Plan, names: Mapping[str, str], requests: list[Request] | None = None) -> None:
    """Compute the bounds of a plan that no process has started yet, into ``folder``. ``names`` come from ``bound_names``.

    ``requests`` are those of the plan's trace, which is loaded if they are not given.
    """
    requests = load_trace(plan)[0].requests if requests is None else requests
    for kind, name in names.items():
        if read_bound(folder, name) is None and _claim(folder / f"{name}.begun"):
            write_bound(folder, name, compute_bound(plan, kind, requests))


def complete(folder: Path, plan: Plan) -> dict[str, Bound]:
    """Return the bounds of a plan by kind: read from ``folder``, or computed if missing there.

    If ``folder``, a sweep's, exists, computed bounds are stored in it.
    """
    bounds = {}
    requests = load_trace(plan)[0].requests
    for kind, name in bound_names(plan, requests).items():
        bound = read_bound(folder, name)
        if bound is None:
            with without_garbage_collector():
                bound = compute_bound(plan, kind, requests)
            if folder.is_dir():
                write_bound(folder, name, bound)
        bounds[kind] = bound
    return bounds


def add_bounds(runs: list[Run]) -> None:
    """Give each run its bounds, computing those that no job has computed. Bounds that cannot be computed are left out."""
    for one in runs:
        names = (one.result or {}).get("bounds") or {}
        if one.result is not None and any(kind not in one.bounds for kind in names):
            with suppress(UsageError):
                for kind, bound in complete(one.bounds_folder, plan_of(one.result)).items():
                    for other in runs:
                        if ((other.result or {}).get("bounds") or {}).get(kind) == names.get(kind, ""):
                            other.bounds[kind] = bound


def plan_of(result: RunRecord) -> Plan:
    """The plan of a recorded run. Raises UsageError if its configuration is no longer valid."""
    config = result["config"] | {"output": ".", "sweep": {}, "validate": {}, "logger": {}}
    return build_run(OmegaConf.create(config), command=result["command"], choices=result["choices"])


def write_bound(folder: Path, name: str, bound: Bound) -> None:
    """Store a bound if that is possible; one that is not stored is computed again where it is shown."""
    with suppress(UsageError):
        prepare_folder(folder)
        with replacing(folder / f"{name}.json") as file:
            file.write(json.dumps(bound).encode())
    (folder / f"{name}.begun").unlink(missing_ok=True)


def _claim(path: Path) -> bool:
    """Claim a bound for this process; False if another process has claimed it before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
