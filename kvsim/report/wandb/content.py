"""What Weights & Biases gets of a run: a name, a configuration to group by, series over time, and a table of requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.engine.columns import COLUMNS
from kvsim.report.comparison.differing import labels
from kvsim.results.chosen_names import package
from kvsim.results.fields import FIELDS
from kvsim.results.records import Damaged, read_sweep
from kvsim.results.result import RunRecord
from kvsim.results.timeline import middles


def run_name(record: RunRecord, swept: Sequence[str]) -> str:
    """Name a run by its values of the settings that its sweep varies, or a single run by its trace and eviction policy."""
    if not swept:
        return " ".join(record["choices"][group] for group in ("trace", "eviction") if group in record["choices"])
    values = labels(record["config"], record["choices"])
    return " ".join(f"{_short(key)}={values.get(package(key), 'none')}" for key in swept)


def swept_keys(folder: Path) -> list[str]:
    """Return the settings that the sweep in a folder varies; none if that cannot be known."""
    try:
        return list(read_sweep(folder)["swept"])
    except Damaged:
        return []


def configuration(record: RunRecord) -> dict[str, Any]:
    """Return the configuration to group and filter by: the names chosen, capacities in bytes, and ``settings``, which has all."""
    names = {package(group).removeprefix("tiers.").replace(".", "_"): name for group, name in record["choices"].items()}
    pages = {tier: use["capacity_pages"] for tier, use in record.get("tiers", {}).items()}
    sizes = {tier: number * record["page_bytes"] for tier, number in pages.items() if number is not None}
    known = {"command": record["command"], "seed": record["seed"], "capacity_bytes": sizes}
    return names | {name: value for name, value in known.items() if value != {}} | {"settings": record["config"]}


def summary(record: RunRecord) -> dict[str, Any]:
    """Return the totals of a run."""
    return {row.name: record[row.name] for row in FIELDS if row.is_logged and row.name in record}


def axis(record: RunRecord) -> str:
    """Return the metric that the series of a run are drawn over: simulated time, or the request's number without a clock."""
    return "timeline/request" if record["timeline"]["hits"]["axis"] == "request" else "timeline/time_s"


def series(record: RunRecord, requests: dict[str, np.ndarray]) -> list[dict[str, float]]:
    """Return the points of the run over time, one per bin of the hit rate's picture.

    Each has hit rates by tier and, if the run has a clock, the mean time to first token of the requests that arrive in the bin,
    and the number of requests that wait for their first token in the middle of it.
    """
    hits = record["timeline"]["hits"]
    edges, places = np.array(hits["edges"]), middles(hits["edges"])
    columns = {f"hit_rate_{tier}": hits["hit_rate"][tier] for tier in record["tiers"]} if places else {}
    if axis(record) == "timeline/time_s" and places:
        columns |= _times(edges, np.array(places), requests)
    points = []
    for place, values in zip(places, zip(*columns.values(), strict=True), strict=True):
        known = {f"timeline/{name}": value for name, value in zip(columns, values, strict=True) if value == value}
        points.append({axis(record): place} | known)
    return points


def _times(edges: np.ndarray, places: np.ndarray, requests: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Return the mean time to first token by bin, nan where no request arrives, and the number of waiting requests."""
    served = ~np.isnan(requests["ttft_s"])
    arrivals, ttft_s = requests["arrival_s"][served], requests["ttft_s"][served]
    bins = np.clip(np.searchsorted(edges, arrivals, side="right") - 1, 0, len(places) - 1)
    numbers = np.bincount(bins, minlength=len(places))
    sums = np.bincount(bins, weights=ttft_s, minlength=len(places))
    mean = np.divide(sums, numbers, out=np.full(len(places), np.nan), where=numbers > 0)
    begun, first = np.sort(arrivals), np.sort(arrivals + ttft_s)
    waiting = np.searchsorted(begun, places, side="right") - np.searchsorted(first, places, side="right")
    return {"ttft_s": mean.tolist(), "waiting_requests": waiting.tolist()}


def request_rows(requests: dict[str, np.ndarray], tiers: Sequence[str], most: int) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of at most ``most`` requests of a run, evenly spaced; times in microseconds' precision."""
    logged = [heading for column in COLUMNS if column.is_logged for heading in column.headings(tiers)]
    names = [name for name in logged if name in requests]
    number = len(requests["request"])
    chosen = np.unique(np.linspace(0, number - 1, min(most, number)).round().astype(int))
    cells = [_cells(requests[name][chosen]) for name in names]
    return names, [list(row) for row in zip(*cells, strict=True)]


def _cells(column: np.ndarray) -> list[Any]:
    if column.dtype.kind != "f":
        return list(column.tolist())
    return [None if value != value else value for value in column.round(6).tolist()]


def _short(key: str) -> str:
    """``gpu`` for ``tiers.gpu.capacity``, ``cpu eviction`` for ``eviction@tiers.cpu.eviction``, else the key's last part."""
    place = package(key)
    if place.startswith("tiers."):
        return place.removeprefix("tiers.").removesuffix(".capacity").replace(".", " ")
    return place.rpartition(".")[2]
