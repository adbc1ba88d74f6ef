"""The upper bounds of recorded runs, which comparisons show."""

from contextlib import suppress
from pathlib import Path

from omegaconf import OmegaConf

from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run
from kvsim.run.execute import load_trace
from kvsim.run.fingerprint import bound_names
from kvsim.run.upper_bounds import Bound, bounds_of


def complete(folder: Path, plan: Plan) -> dict[str, Bound]:
    """Return the bounds of a plan by kind: read from ``folder``, or computed if missing there.

    If ``folder``, a sweep's, exists, computed bounds are stored in it.
    """
    requests = load_trace(plan)[0].requests
    return bounds_of(plan, bound_names(plan, requests), requests, folder if folder.is_dir() else None)


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
