"""Compares repeated simulations with repeated real runs: how far apart they are, in view of the spread within each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvsim.report.validation.recording import Recording
from kvsim.report.validation.spreads import Distance, deviation, distance_of_means, distance_of_pairs, mean
from kvsim.report.validation.validation import QUANTILES, check_same, tier_rate
from kvsim.results.fields import SCHEMA
from kvsim.results.result import RunRecord, plain
from kvsim.results.tolerances import Tolerances

IDENTICAL, BY_REQUEST = "identical hits", "ttft by request"
"""The two figures of pairs of runs."""
BY_CHANCE = 0.05
"""Share of the figures that a perfect simulation would have off."""


class Interval(NamedTuple):
    """How far simulations exceed real runs, with the ends of the 95 % interval: absolute for shares, else relative.

    None if the real runs have 0, and the simulations have not.
    """

    distance: float | None
    low: float | None
    high: float | None


def compare_repeated(
    simulated: Sequence[Recording],
    measured: Sequence[Recording],
    tolerances: Tolerances,
    command_line: str | None,
    *,
    same_hardware: bool = True,
) -> RunRecord:
    """Return the record of a validation with two real runs or more: the content of ``validate.json``.

    Raises UsageError for runs that cannot be compared; see ``check_same``.
    """
    first = simulated[0]
    for run in (*simulated[1:], *measured):
        check_same(first, run, same_hardware=same_hardware)
    figures = [*_of_runs(simulated, measured, tolerances), *_of_pairs(simulated, measured, tolerances)]
    found = [run.record["hardware"] for run in measured]
    record = {
        "schema": SCHEMA,
        "command": "validate",
        "command_line": command_line,
        "config": first.record["config"],
        "choices": first.record["choices"],
        "versions": first.record["versions"],
        "seed": first.record["seed"],
        "device": ", ".join(dict.fromkeys(one["device"] for one in found)),
        "requests": first.record["requests"],
        "measured": [run.name for run in measured],
        "simulations": len(simulated),
        "has_noise": has_noise(first.record["config"]),
        "figures": figures,
        "off": sum(figure["is_off"] for figure in figures),
        "hardware": found,
        "requests_ttft_s": [_typical([run.ttft_s[run.served] for run in runs]) for runs in (simulated, measured)],
        "requests_tpot_s": [_typical([run.tpot_s[run.served] for run in runs]) for runs in (simulated, measured)],
        "holds": all(figure["holds"] for figure in figures),
    }
    return {name: plain(value) for name, value in record.items()}


def has_noise(config: Mapping[str, Any]) -> bool:
    """Return whether the simulated machine has noise."""
    noise = config["hardware"].get("noise") if isinstance(config.get("hardware"), Mapping) else None
    return noise is not None


def _typical(times: Sequence[np.ndarray]) -> np.ndarray:
    """Return the median of each request's times over the runs."""
    typical: np.ndarray = np.median(np.stack(times), axis=0)
    return typical


def _of_runs(simulated: Sequence[Recording], measured: Sequence[Recording], tolerances: Tolerances) -> list[dict[str, Any]]:
    """Return the figures that each run has, without those that some run lacks."""
    tables = [[_values(run.record, _links(simulated, measured)) for run in runs] for runs in (simulated, measured)]
    figures = []
    for name, (unit, _) in tables[0][0].items():
        values = [[table[name][1] for table in tables_of] for tables_of in tables]
        known = [[value for value in some if value is not None] for some in values]
        if [len(some) for some in known] == [len(some) for some in values]:
            figures.append(_figure(name, unit, known, *interval_of(unit, known), _tolerance(name, tolerances)))
    return figures


def interval_of(unit: str, values: Sequence[Sequence[float]]) -> tuple[Interval, bool]:
    """Return the distance of two samples with its interval, and whether it is off.

    Shares are subtracted. Anything else is compared by the ratio of geometric means, less 1: durations vary by factors. Where
    some are 0, it is the difference relative to the mean of the real runs, if that is not 0.
    """
    if unit != "share" and min(map(min, values)) > 0:
        logs = distance_of_means(*([math.log(value) for value in some] for some in values))
        return Interval(*map(math.expm1, (logs.distance, logs.low, logs.high))), logs.is_off
    found, real = distance_of_means(*values), mean(values[1])
    scale = 1.0 if unit == "share" else real
    ends = (found.distance, found.low, found.high)
    if not scale:
        return Interval(*([None] * 3 if found.distance else [0.0] * 3)), found.is_off
    return Interval(*(end / scale for end in ends)), found.is_off


def _of_pairs(simulated: Sequence[Recording], measured: Sequence[Recording], tolerances: Tolerances) -> list[dict[str, Any]]:
    """Return the figures of pairs of runs. Simulations that are closer to real runs than these to one another are not off."""
    runs = [*simulated, *measured]
    same = lambda one, other: _identical(runs[one], runs[other])  # noqa: E731
    ttft_distance = lambda one, other: _ttft_distance(runs[one], runs[other])  # noqa: E731
    distance, values = distance_of_pairs(same, len(simulated), len(measured))
    found = [_figure(IDENTICAL, "share", values, _ends(distance), distance.high < 0, tolerances.identical)]
    found[0]["holds"] = not found[0]["is_off"] or mean(values[0]) >= tolerances.identical
    if runs[0].served.any() and not np.isnan(runs[0].ttft_s[runs[0].served]).all():
        distance, values = distance_of_pairs(ttft_distance, len(simulated), len(measured))
        found.append(_figure(BY_REQUEST, "share", values, _ends(distance), distance.low > 0, None))
    return found


def _ends(distance: Distance) -> Interval:
    return Interval(distance.distance, distance.low, distance.high)


def _identical(one: Recording, other: Recording) -> float:
    """Return the share of requests with the same number of hit pages in every tier."""
    same = (one.hit_pages == other.hit_pages).all(axis=1)
    return float(same.mean()) if same.size else 1.0


def _ttft_distance(one: Recording, other: Recording) -> float:
    """Return the median by which the natural logarithms of the times to first token of a request differ."""
    times = [run.ttft_s[run.served] for run in (one, other)]
    is_known = (times[0] > 0) & (times[1] > 0)
    return float(np.median(np.abs(np.log(times[0][is_known] / times[1][is_known])))) if is_known.any() else 0.0


def _links(*runs: Sequence[Recording]) -> list[str]:
    return sorted({link for some in runs for run in some for link in run.record["links"]})


def _values(record: RunRecord, links: Sequence[str]) -> dict[str, tuple[str, float | None]]:
    """Return unit and value of each figure of a run, by name; a link that carried nothing has 0."""
    values: dict[str, tuple[str, float | None]] = {}
    for tier in (*record["tiers"], "all"):
        values[f"hit_rate {tier}"] = "share", tier_rate(record, tier)
    for key in ("ttft", "tpot"):
        for quantile in QUANTILES:
            values[f"{key}_{quantile}"] = "s", record[f"{key}_s"][quantile]
    for link in links:
        use = record["links"].get(link, {})
        values[f"link_bytes {link}"] = "bytes", float(use.get("bytes", 0))
        values[f"link_busy {link}"] = "s", float(use.get("busy_s", 0.0))
    return values


def _tolerance(name: str, tolerances: Tolerances) -> float | None:
    """Return the tolerance of a figure; None if it has none."""
    tolerance: float | None = getattr(tolerances, name.split()[0], None)
    return tolerance


def _figure(
    name: str, unit: str, values: Sequence[Sequence[float]], interval: Interval, is_off: bool, tolerance: float | None
) -> dict[str, Any]:
    """Return a figure: the spread of both samples, their distance, and the verdict. Only what is off can fail."""
    spreads = [
        {"values": list(some), "mean": mean(some), "deviation": deviation(some), "least": min(some), "most": max(some)}
        for some in values
    ]
    is_small = tolerance is None or (interval.distance is not None and abs(interval.distance) <= tolerance)
    return {
        "name": name,
        "unit": unit,
        "simulated": spreads[0],
        "hardware": spreads[1],
        **interval._asdict(),
        "is_off": is_off,
        "tolerance": tolerance,
        "holds": not is_off or is_small,
    }
