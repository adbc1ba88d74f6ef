"""The Pareto set of a sweep with objectives: the runs that no other run beats."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kvsim.errors import UsageError
from kvsim.report.comparison.compare import Comparison
from kvsim.report.comparison.differing import heading, setting_text
from kvsim.report.comparison.objective import Objective, objective
from kvsim.report.figure import Figure, Trace, laid_out
from kvsim.report.terminal import print_table, width_of
from kvsim.results.cells import as_text
from kvsim.results.rates import digits, percent, size
from kvsim.results.records import Damaged, read_sweep
from kvsim.results.runs import Run

MOST_ROWS = 20
"""Most rows on a terminal; ``pareto.csv`` and the page have all."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run with a value for each objective."""

    name: str
    """The job."""
    settings: list[str]
    """Its values of the settings in which the runs differ; see ``Front.keys``."""
    values: list[float]
    is_optimal: bool
    """Whether no other run is at least as good in all objectives and better in one."""
    rejected: int
    """Requests that no number covers, because they were rejected."""
    place: int
    """Its place among all runs."""


class Front:
    """The runs of a sweep that have all objectives, in order of the first objective, best first."""

    def __init__(self, runs: Sequence[Run], objectives: Sequence[Objective]) -> None:
        comparison = Comparison(runs, by_run=True)
        self.objectives = list(objectives)
        self.keys = comparison.keys
        """The settings in which the runs differ."""
        known = []
        for place, result in enumerate(comparison.results):
            try:
                known.append((place, [objective(result, one.name) for one in self.objectives]))
            except UsageError:  # the run has no such number
                continue
        signs = np.array([one.sign for one in self.objectives])
        values = np.array([row for _, row in known]).reshape(-1, len(self.objectives)) * signs
        points = [
            Point(name=comparison.runs[place].name, settings=comparison.differing_values(place), values=row, is_optimal=best,
                  rejected=int(comparison.results[place]["rejected"]), place=place)
            for (place, row), best in zip(known, optimal(values), strict=True)
        ]  # fmt: skip
        self.points = [points[place] for place in np.lexsort(values.T[::-1])]

    @property
    def title(self) -> str:
        """The heading of the table, with the directions."""
        kind = "Pareto set" if len(self.objectives) > 1 else "Best"
        return f"{kind}: {', '.join(map(str, self.objectives))}"

    @property
    def best(self) -> list[Point]:
        """The Pareto set; with one objective, the run with the best value, and others with the same."""
        return [point for point in self.points if point.is_optimal]

    def columns(self) -> list[str]:
        """Return the headings of the columns of ``rows``: job, settings, objectives, and ``rejected`` if any were."""
        return ["job", *map(heading, self.keys), *(one.name for one in self.objectives), *self._rejected("rejected")]

    def rows(self) -> list[list[str]]:
        """Return the Pareto set as texts, one row per run."""
        return [
            [point.name, *point.settings, *map(text_of, self.objectives, point.values), *self._rejected(f"{point.rejected:,}")]
            for point in self.best
        ]

    def _rejected(self, cell: str) -> list[str]:
        return [cell] if any(point.rejected for point in self.best) else []

    def csv(self) -> str:
        """Return the Pareto set as CSV in plain numbers: job, settings, objectives, rejected requests."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", *self.keys, *(one.name for one in self.objectives), "rejected"])
        for point in self.best:
            writer.writerow(map(as_text, [point.name, *point.settings, *point.values, point.rejected]))
        return text.getvalue()

    def label(self, point: Point) -> str:
        """Return what a picture says of a run."""
        settings = " ".join(setting_text(key, value) for key, value in zip(self.keys, point.settings, strict=True) if value)
        return f"{point.name}: {settings}" if settings else point.name

    def figure(self) -> Figure | None:
        """Draw all runs by their objectives, and the Pareto set; None for a single objective or a single run."""
        if len(self.objectives) < 2 or len(self.points) < 2:
            return None
        traces = []
        for name, colour, width, is_optimal in (("other runs", "#9aa3ab", 7, False), ("Pareto set", "#d1495b", 10, True)):
            points = [point for point in self.points if point.is_optimal is is_optimal]
            columns = [[_drawn(one, point.values[number]) for point in points] for number, one in enumerate(self.objectives)]
            marks = {"name": name, "text": [self.label(point) for point in points], "marker": {"color": colour, "size": width}}
            drawn = _plane(columns, is_optimal) if len(columns) == 2 else self._matrix(columns)
            traces.append(marks | drawn | {"meta": {"runs": [point.place for point in points]}})
        is_plane = len(self.objectives) == 2
        x_title, y_title = [axis_of(one) for one in self.objectives] if is_plane else ["", ""]
        return laid_out(
            traces, x_title, y_title, "", y_axis={"rangemode": "normal"}, height=420 if is_plane else 700,
            hovermode="closest", showlegend=True,
        )  # fmt: skip

    def _matrix(self, columns: list[list[Any]]) -> Trace:
        dimensions = [{"label": axis_of(one), "values": values} for one, values in zip(self.objectives, columns, strict=True)]
        return {"type": "splom", "dimensions": dimensions, "diagonal": {"visible": False}, "showupperhalf": False}


def _plane(columns: list[list[Any]], is_optimal: bool) -> Trace:
    line = {"mode": "lines+markers", "line": {"shape": "linear", "dash": "dot"}} if is_optimal else {"mode": "markers"}
    return {"type": "scatter", "x": columns[0], "y": columns[1], "textposition": "top center", **line}


def optimal(values: np.ndarray) -> list[bool]:
    """Return which rows no other row beats, where less is better: is nowhere above and somewhere below it."""
    return [not bool(np.any(np.all(values <= row, axis=1) & np.any(values < row, axis=1))) for row in values]


def front_of(runs: Sequence[Run]) -> Front | None:
    """Return the Pareto set of the runs of one sweep, whose objectives ``sweep.json`` names; None if there is none."""
    folders = {run.folder.parent for run in runs}
    if len(folders) != 1:
        return None
    try:
        record = read_sweep(folders.pop())
    except Damaged:  # or there is none
        return None
    objectives = [Objective(**one) for one in record.get("objectives", ())]
    if not objectives or not any(run.result for run in runs):
        return None
    front = Front(runs, objectives)
    return front if front.points else None


def print_front(front: Front, console: Console) -> None:
    """Print the Pareto set as a table."""
    rows, settings = front.rows(), len(front.keys)
    console.print(Text(f"\n{front.title}", "bold"))
    words = range(1, settings + 1)
    print_table(console, front.columns(), rows[:MOST_ROWS], width_of(console), words=words, left=(0, *words))
    if len(rows) > MOST_ROWS:
        console.print(f"{len(rows) - MOST_ROWS} more are in pareto.csv", style="dim", highlight=False)


def text_of(one: Objective, value: float) -> str:
    """Return a value as tables show it."""
    if _is_rate(one):
        return percent(value)
    return size(round(value)) if one.name.endswith("bytes") else digits(value)


def axis_of(one: Objective) -> str:
    """Return the title of an objective's axis."""
    return f"{one.name} (GiB)" if one.name.endswith("bytes") else str(one.name)


def _is_rate(one: Objective) -> bool:
    return one.name.endswith(("hit_rate", "attainment", "utilization"))


def _drawn(one: Objective, value: float) -> Any:
    return value / 2**30 if one.name.endswith("bytes") else value
