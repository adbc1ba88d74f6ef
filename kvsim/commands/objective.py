"""The numbers of a run that an optimizing sweep minimizes or maximizes: ``sweep.objective``."""

from typing import Any

from kvsim.errors import UsageError
from kvsim.plan import SweepSettings
from kvsim.report.result import RunRecord
from kvsim.suggest import closest

Objective = float | list[float] | None
OBJECTIVES = (
    "hit_rate", "page_hit_rate", "hit_requests", "request_hit_rate", "hit_tokens", "hit_pages", "rejected", "ttft_s", "tpot_s",
    "e2e_s", "throughput", "links", "tiers", "prefetch", "placement", "checkpoints", "retractions", "simulated_s",
    "requests_per_s", "wall_s", "capacity_bytes",
)  # fmt: skip


def objectives(result: RunRecord, settings: SweepSettings) -> Objective:
    """The values of ``sweep.objective`` in a result; a list if there are several. Raises UsageError."""
    if settings.objective is None:
        return None
    numbers = [objective(result, name) for name in settings.objective]
    return numbers if len(numbers) > 1 else numbers[0]


def objective(result: RunRecord, name: str) -> float:
    """One number of a result by its path, such as ``ttft_s.p99``; ``capacity_bytes`` is the size of all tiers together."""
    if name == "capacity_bytes":
        capacities = [tier["capacity_pages"] for tier in result["tiers"].values()]
        if None in capacities:
            raise UsageError("sweep.objective: capacity_bytes is undefined for an unlimited tier: set its capacity")
        return float(sum(capacities) * result["page_bytes"])
    value: Any = result
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            known = ", ".join(value) if isinstance(value, dict) else "no parts"
            raise UsageError(f"sweep.objective: result.json has no {name}; {part!r} is not among {known}")
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = ", ".join(f"{name}.{key}" for key in value) if isinstance(value, dict) else f"{value!r} in this run"
        raise UsageError(f"sweep.objective: {name} is not a number: {what}")
    return float(value)


def check_objective(settings: SweepSettings) -> None:
    """Raise UsageError for an objective that no result contains."""
    for name in settings.objective or ():
        first = name.split(".")[0]
        if first not in OBJECTIVES:
            hint = closest(first, OBJECTIVES) or f"; choose from {', '.join(OBJECTIVES)}"
            raise UsageError(f"sweep.objective: result.json has no number {name}{hint}")
