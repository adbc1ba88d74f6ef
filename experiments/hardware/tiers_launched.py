"""The configurations of tiers.py, simulated once more with a host that is as slow as it was in the real runs.

A step of few prompt tokens takes as long as the host needs to launch it, and in the real runs that was longer than calibrated.
With the mean excess of each configuration's own steps added, what is still apart has another cause. This explains distances; it
does not reduce them, for it takes from the real runs what the calibration should have known.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from validation_tables import cell, figures

from kvsim.report.study import markdown

Record = dict[str, Any]
LAUNCHED = 512
"""Most prompt tokens of a step that counts as one that the GPU spends waiting for its launch."""
SHOWN = ("hit_rate gpu", "hit_rate cpu", "hit_rate disk", "ttft_p50", "ttft_p99", "tpot_p50")


def excess_s(record: Record) -> tuple[float, float]:
    """Return by how much longer than expected short steps with prefill beside decoding took in the mean, and single decode steps.

    Only steps that did not wait for loads count.
    """
    rows = [row for run in record["hardware"] for row in run["steps"]]
    prefill = [row for row in rows if row["kind"] == "both" and row["least"] <= LAUNCHED // 2 + 1]
    decodes = [row for row in rows if row["kind"] not in ("both", "prefill") and row["leaps"] == row["steps"]]
    return mean_excess_s(prefill), mean_excess_s(decodes)


def mean_excess_s(rows: Iterable[Record]) -> float:
    rows = list(rows)
    steps = sum(row["leaps"] for row in rows)
    return sum(row["measured_s"] - row["expected_s"] for row in rows) / steps if steps else 0.0


def words_of(record: Record) -> list[str]:
    """Return the settings that add the excess to what was calibrated."""
    launch_s, decode_s = excess_s(record)
    known = record["config"]["hardware"]
    return [
        f"hardware.prefill_launch_s={max(0.0, known['prefill_launch_s'] + launch_s):.6g}",
        f"hardware.leap_overhead_s={max(0.0, known['leap_overhead_s'] + decode_s):.6g}",
    ]


def section(records: Mapping[str, Record], launched: Mapping[str, Record]) -> Iterator[str]:
    """Yield the lines about the second simulations."""
    heads = ["", "launch (ms)", "one decode step (ms)", *SHOWN]
    rows = list[Sequence[str]]()
    for name, record in launched.items():
        known = figures(record)
        longer = [f"{1e3 * seconds:+.1f}" for seconds in excess_s(records[name])]
        rows.append((name, *longer, *(cell(known[key]).split(", ", 1)[1] if key in known else "-" for key in SHOWN)))
    yield from (
        "", "## With the launches of the real runs", "",
        "How far simulations are from the same real runs if the host is as slow as it was there: the launch of a step of at most "
        f"{LAUNCHED} prompt tokens beside decoding requests, and a single decode step, take longer than calibrated by what the "
        "configuration's own steps did in the mean. Marks are as above.", "",
    )  # fmt: skip
    yield from markdown(heads, rows)
