"""Compares many runs: their differing settings, a table with bounds, CSV, and the text on a terminal."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvsim.report.curve import size
from kvsim.report.result import TIERS, RunRecord, hit_definition
from kvsim.report.runs import Run
from kvsim.report.summary import UNKNOWN, count, digits, percent

MOST_ROWS = 40
"""Most runs shown on a terminal."""
ON_TERMINAL = ("hit_rate", "hit_rate_gpu", "hit_rate_cpu", "hit_rate_disk", "ttft_s_mean", "ttft_s_p99", "rejected")
"""Measures shown on a terminal; the page shows all that have values, the CSV all."""
Value = float | int | None


@dataclass(frozen=True)
class Measure:
    """A number of a run: its title in tables, its format, and which values are better (1: high, -1: low, 0: neither)."""

    key: str
    title: str
    of: Callable[[RunRecord], Value]
    text: Callable[[Any], str]
    better: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the comparison: its name, its values of the differing settings, and a text for each measure."""

    name: str
    settings: list[str]
    cells: list[str]
    values: list[Value]
    is_bound: bool = False


def _at(*path: str) -> Callable[[RunRecord], Value]:
    def read(result: RunRecord) -> Value:
        value: Any = result
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        found: Value = value
        return found

    return read


def _tier_rate(tier: str) -> Callable[[RunRecord], Value]:
    def rate(result: RunRecord) -> Value:
        known = tier in result["tiers"] and result["prompt_tokens"]
        return result["hit_tokens"][tier] / result["prompt_tokens"] if known else None

    return rate


def memory_bytes(result: RunRecord) -> int | None:
    """Return the bytes of KV that all tiers hold together; None if one is unlimited or the page size was not recorded."""
    pages = [tier["capacity_pages"] for tier in result["tiers"].values()]
    return None if None in pages or "page_bytes" not in result else sum(pages) * int(result["page_bytes"])


def moved_bytes(result: RunRecord) -> int | None:
    """Return the bytes moved over all links; None for a run without links."""
    return sum(link["bytes"] for link in result["links"].values()) if result["links"] else None


def imbalance(result: RunRecord) -> float | None:
    """Return the time in steps of the busiest engine over the mean of its role, the largest of all roles; None for one engine."""
    found = [measures["busy"] for measures in result.get("imbalance", {}).values() if measures["busy"] is not None]
    return max(found, default=None)


def _gigabytes(n_bytes: float | None) -> str:
    return UNKNOWN if n_bytes is None else f"{n_bytes / 1e9:,.2f}"


def _bytes(n_bytes: int | None) -> str:
    return "unlimited" if n_bytes is None else size(n_bytes)


MEASURES = (
    Measure("capacity_bytes", "total capacity", memory_bytes, _bytes),
    Measure("hit_rate", "hit rate", _at("hit_rate"), percent, 1),
    *(Measure(f"hit_rate_{tier}", f"from {tier}", _tier_rate(tier), percent) for tier in TIERS),
    Measure("page_hit_rate", "page hit rate", _at("page_hit_rate"), percent, 1),
    Measure("ttft_s_mean", "TTFT mean (s)", _at("ttft_s", "mean"), digits, -1),
    Measure("ttft_s_p99", "TTFT p99 (s)", _at("ttft_s", "p99"), digits, -1),
    Measure("tpot_s_mean", "TPOT mean (s)", _at("tpot_s", "mean"), digits, -1),
    Measure("prompt_tokens_per_s", "prompt tokens/s", _at("throughput", "prompt_tokens_per_s"), digits, 1),
    Measure("moved_bytes", "moved (GB)", moved_bytes, _gigabytes, -1),
    Measure("imbalance", "busiest engine / mean", imbalance, digits, -1),
    Measure("rejected", "rejected", _at("rejected"), count, -1),
)
SIZES = ("cluster.engines", "cluster.engines_per_host", "cluster.prefill", "cluster.decode")
"""Settings that decide how many tiers there are."""
BOUND_MEASURES = ("hit_rate", "page_hit_rate", "rejected")


class Comparison:
    """Runs, the settings in which they differ, and the measures worth showing."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = [run for run in runs if run.result is not None]
        self.failed = [run for run in runs if run.error is not None]
        self.results: list[RunRecord] = [run.result for run in self.runs if run.result is not None]
        self.settings = [labels(result["config"]) | {"command": result["command"]} for result in self.results]
        self.keys = differing(self.settings)
        self.measures = [measure for measure in MEASURES if self._is_worth_a_column(measure)]

    def _is_worth_a_column(self, measure: Measure) -> bool:
        if measure.key.startswith("hit_rate_") and all(len(result["tiers"]) == 1 for result in self.results):
            return False
        values = [measure.of(result) for result in self.results]
        return any(values) or measure.key == "hit_rate"

    def apart(self, place: int) -> list[str]:
        """Return a run's values of the differing settings."""
        return [self.settings[place].get(key, "") for key in self.keys]

    def series(self, place: int) -> str:
        """Return the name of a run's line in pictures over capacities: its differing settings except capacities."""
        keys = [key for key in self.keys if not key.endswith(".capacity")]
        values = [self.settings[place].get(key, "") for key in keys]
        return " ".join(said(key, value) for key, value in zip(keys, values, strict=True) if value) or self._policy(place)

    def _policy(self, place: int) -> str:
        return self.settings[place].get("eviction", "run")

    def label(self, place: int) -> str:
        """Return the name of a run in legends."""
        told = " ".join(said(key, value) for key, value in zip(self.keys, self.apart(place), strict=True) if value)
        return f"{self.runs[place].name}: {told}" if told else self.runs[place].name

    def rows(self) -> list[Row]:
        """Return the rows: no cache, the runs, then Belady's bounds and unlimited caches with the settings of their runs."""
        rows = [self._row(run.name, self.apart(place), result) for place, (run, result) in enumerate(self._pairs())]
        nothing: dict[str, Any] = {"hit_rate": 0.0, "page_hit_rate": 0.0}
        return [self._bound_row("no cache", [""] * len(self.keys), nothing), *rows, *self._bounds()]

    def _pairs(self) -> Iterable[tuple[Run, RunRecord]]:
        return zip(self.runs, self.results, strict=True)

    def _row(self, name: str, apart: list[str], result: RunRecord) -> Row:
        values = [measure.of(result) for measure in self.measures]
        cells = [measure.text(value) for measure, value in zip(self.measures, values, strict=True)]
        return Row(name=name, settings=apart, cells=cells, values=values)

    def _bound_row(self, name: str, apart: list[str], bound: Mapping[str, Any]) -> Row:
        cells = [
            measure.text(bound.get(measure.key)) if measure.key in BOUND_MEASURES and measure.key in bound else ""
            for measure in self.measures
        ]
        return Row(name=name, settings=apart, cells=cells, values=[None] * len(cells), is_bound=True)

    def _bounds(self) -> list[Row]:
        rows = []
        for kind in ("belady", "unlimited"):
            for places in self.framed(kind).values():
                shared = [self._shared(places, key) for key in range(len(self.keys))]
                rows.append(self._bound_row(kind, shared, self.runs[places[0]].bounds[kind]))
        return rows

    def framed(self, kind: str) -> dict[str, list[int]]:
        """Return the runs that share each bound of a kind, by the bound's name."""
        groups: dict[str, list[int]] = {}
        for place, (run, result) in enumerate(self._pairs()):
            if kind in run.bounds:
                groups.setdefault(result["bounds"][kind], []).append(place)
        return groups

    def _shared(self, places: list[int], key: int) -> str:
        values = {self.apart(place)[key] for place in places}
        name = self.keys[key]
        is_of_the_bound = (
            name.endswith((".capacity", ".scope")) or name.startswith(("trace", "page_tokens", "warmup")) or name in SIZES
        )
        return values.pop() if len(values) == 1 and is_of_the_bound else ""

    def best(self) -> set[tuple[int, int]]:
        """Return the cells (run, column) with the best value of each column; none where all values are equal.

        Only the runs with the fewest rejected requests compete: the rates of others exclude requests that are hard to serve.
        """
        found = set()
        fewest = min(result["rejected"] for result in self.results)
        for column, measure in enumerate(self.measures):
            values = [measure.of(result) if result["rejected"] == fewest else None for result in self.results]
            known = [value for value in values if value is not None]
            if measure.better and len(set(known)) > 1:
                best = max(known) if measure.better > 0 else min(known)
                found |= {(place, column) for place, value in enumerate(values) if value == best}
        return found

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        lines = list(dict.fromkeys(hit_definition(result["config"]) for result in self.results))
        if self.framed("belady"):
            lines.append(
                "belady: the most page hits that any policies can get on this trace with one tier as large as all tiers, free "
                "moves, no pages occupied by running requests, and requests in trace order. unlimited: nothing is ever "
                "evicted. Both reject requests larger than the GPU tier; rates cover the requests served."
            )
        lost = [run.name for run, result in self._pairs() if result.get("bounds") and not run.bounds]
        if lost:
            lines.append(f"No bounds for these runs, because their traces can no longer be read: {', '.join(lost[:8])}.")
        return lines


def labels(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a configuration to short texts by key; a policy becomes the name of its file, next to its settings."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key == "_target_":
            module = str(value).split(".")[-2] if "." in str(value) else str(value)
            if module != prefix.rstrip("."):
                flat[prefix.rstrip(".")] = module
        elif isinstance(value, Mapping):
            flat |= labels(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            flat[f"{prefix}{key}"] = str(value).lower()
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ, and those of choices and tier settings that only some runs have."""
    keys = dict.fromkeys(key for each in settings for key in each)
    of_choices = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    found = []
    for key in keys:
        values = [each[key] for each in settings if key in each]
        is_partial = len(values) < len(settings)
        if len(set(values)) > 1 or is_partial and (key in of_choices or key.startswith("tiers.") and key.count(".") == 2):
            found.append(key)
    order = ("command", "preset", "trace", "model", "hardware", "page_tokens", "tiers", "cluster")
    return sorted(found, key=lambda key: next((place for place, name in enumerate(order) if key.startswith(name)), len(order)))


def said(key: str, value: str) -> str:
    """Format a setting for a legend: a choice by its name alone, other settings with the last part of the key."""
    if "." not in key and not key.startswith(("page", "seed", "warmup")):
        return value
    start, _, end = key.rpartition(".")
    return f"{start.rpartition('.')[2]} {value}" if end == "capacity" else f"{end}={value}"


def heading(key: str) -> str:
    """Return the column heading of a setting: ``gpu capacity`` for ``tiers.gpu.capacity``."""
    return key.removeprefix("tiers.").replace(".", " ").replace("_", " ")


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    """Print the table; of more than ``MOST_ROWS`` runs, those with the highest hit rates."""
    told = Comparison(runs)
    rows, best = told.rows(), told.best()
    order = sorted(range(len(told.runs)), key=lambda place: -(told.results[place]["hit_rate"] or 0.0))
    shown = set(order[:MOST_ROWS])
    width = console.width if console.is_terminal else 120
    is_narrow = width < 100
    columns = [
        column
        for column, measure in enumerate(told.measures)
        if measure.key in ON_TERMINAL and not (is_narrow and measure.key.startswith("hit_rate_"))
    ]
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, title in enumerate(("job", *map(heading, told.keys), *(told.measures[column].title for column in columns))):
        drawn.add_column(title, justify="left" if number <= len(told.keys) else "right", header_style="bold", overflow="fold")
    for number, row in enumerate(rows):
        place = number - 1
        if row.is_bound or place in shown:
            cells = [Text(row.cells[column], "bold" if (place, column) in best else "") for column in columns]
            drawn.add_row(Text(row.name, "dim" if row.is_bound else ""), *map(Text, row.settings), *cells)
    console.print(drawn, width=width, crop=False, soft_wrap=False)
    if len(order) > MOST_ROWS:
        console.print(f"{len(order) - MOST_ROWS} runs with lower hit rates are not shown", style="dim", highlight=False)
    for line in told.notes():
        console.print(Text(line, "dim"), width=min(width, 100))


def comparison_csv(runs: Sequence[Run]) -> str:
    """Return CSV with one row per run, in plain numbers: job, status, differing settings, all measures, bounds, error."""
    told = Comparison(runs)
    extra = ("requests", "prompt_tokens", "wall_s", "load_s")
    bounds = [f"{kind}_hit_rate" for kind in ("belady", "unlimited")]
    columns = ["job", "status", *told.keys, *(measure.key for measure in MEASURES), *extra, *bounds, "error"]
    places = {id(run): place for place, run in enumerate(told.runs)}
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for run in runs:
        if run.result is None:
            given = dict(override.split("=", 1) for override in run.overrides if "=" in override)
            chosen = {key: given.get(key, "") for key in told.keys}
            writer.writerow({"job": run.name, "status": "failed", **chosen, "error": run.error})
            continue
        result = run.result
        numbers = {measure.key: measure.of(result) for measure in MEASURES}
        known = {f"{kind}_hit_rate": bound["hit_rate"] for kind, bound in run.bounds.items()}
        apart = dict(zip(told.keys, told.apart(places[id(run)]), strict=True))
        writer.writerow({"job": run.name, "status": "finished", **apart, **numbers, **{k: result[k] for k in extra}, **known})
    return text.getvalue()
