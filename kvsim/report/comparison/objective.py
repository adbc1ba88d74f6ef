"""The objectives of a sweep: numbers of a result that are to be minimized or maximized."""

from dataclasses import dataclass
from typing import Any

from kvsim.errors import UsageError
from kvsim.results.fields import FIELDS
from kvsim.results.measures import Path, memory_bytes
from kvsim.results.result import RunRecord

DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A number of ``result.json`` and the direction in which it is better."""

    name: str
    direction: str
    """``minimize`` or ``maximize``."""

    @property
    def sign(self) -> int:
        """1 if less is better, -1 if more is: values times this are to be minimized."""
        return 1 if self.direction == "minimize" else -1

    def __str__(self) -> str:
        return f"{self.name} ({self.direction}d)"


def usual_direction(name: str) -> str:
    """Return the direction in which nearly everyone wants an objective to go: by the table of fields and measures."""
    wanted = {measure.of.path: measure.better for row in FIELDS for measure in row.measures if isinstance(measure.of, Path)}
    fields = {row.name: row.better for row in FIELDS}
    return DIRECTIONS[(wanted.get(name) or fields.get(name.split(".")[0])) == 1]


def known_objectives() -> list[str]:
    """Return the fields of a result that are objectives, or whose parts are, and ``capacity_bytes``."""
    return [*(row.name for row in FIELDS if row.better is not None), "capacity_bytes"]


def objective(result: RunRecord, name: str) -> float:
    """Return one number of a result by its path, such as ``ttft_s.p99``; ``capacity_bytes`` is the size of all tiers together.

    Raises UsageError if the result has no such number.
    """
    if name == "capacity_bytes":
        if (n_bytes := memory_bytes(result)) is None:
            raise UsageError("sweep.objective: capacity_bytes is undefined for an unlimited tier: set its capacity")
        return float(n_bytes)
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
