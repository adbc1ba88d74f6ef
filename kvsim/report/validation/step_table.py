"""Shows how well the machine's description expects the durations of the steps that were really taken."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.report.summary import Table
from kvsim.results.rates import count

KINDS = {"prefill": "prefill", "both": "prefill beside decoding", "decode": "decoding"}


def step_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the mean durations of steps of each kind and size, from the findings of real runs; no rows if none has any.

    Expected is what the description of the machine yields with which the runs were started, without noise.
    """
    sums: dict[tuple[str, int], list[float]] = {}
    for row in (row for run in found for row in run.get("steps", ())):
        total = sums.setdefault((row["kind"], row["least"]), [0.0, 0.0, 0.0])
        for place, name in enumerate(("leaps", "measured_s", "expected_s")):
            total[place] += row[name]
    rows = []
    for kind, name in KINDS.items():
        sizes = sorted(least for known, least in sums if known == kind)
        for place, size in enumerate(sizes):
            number, measured_s, expected_s = sums[kind, size]
            sized = _range(size, sizes[place + 1] - 1 if size < sizes[-1] else None, "step" if kind == "decode" else "token")
            means = [f"{1e3 * seconds / number:.4g}" for seconds in (expected_s, measured_s)]
            rows.append((f"{name}, {sized}", count(int(number)), *means, f"{expected_s / measured_s - 1:+.1%}"))
    return Table("Steps that did not wait for loads (mean ms)", ("", "number", "expected", "hardware", "error"), rows)


def _range(least: int, most: int | None, unit: str) -> str:
    if most is None:
        return f"{count(least)} or more {unit}s"
    return f"{count(least)} {unit}{'s' * (least > 1)}" if most == least else f"{count(least)} to {count(most)} {unit}s"
