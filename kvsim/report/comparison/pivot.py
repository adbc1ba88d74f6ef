"""Pivot tables: policies in rows, capacities in columns, with the share of Belady's bound and the best of each column."""

from dataclasses import dataclass
from typing import NamedTuple

from kvsim.report.comparison.axis import column_key, in_order
from kvsim.report.comparison.compare import BEST, NEAR, TIE, Comparison, shown
from kvsim.report.comparison.differing import heading
from kvsim.results.fields import BY_KEY
from kvsim.results.measures import Measure
from kvsim.results.statistics import mean_of

MOST_NAMED = 3
"""Most settings in the title of a table."""
SHOWN = ("hit_rate", "goodput_requests_per_s", "ttft_s_p99")
"""Measures that have a pivot table, as far as runs have them."""


class Cell(NamedTuple):
    """A cell: its text, a second line, and the classes of its element."""

    text: str = ""
    more: str = ""
    classes: str = "number"
    share: str = ""
    """Length of the bar below the text, as a percentage; empty without one."""


@dataclass(frozen=True)
class PivotRow:
    """A row: its name and its cells; ``is_bound`` for Belady's bound and an unlimited cache."""

    name: str
    cells: list[Cell]
    is_bound: bool = False


@dataclass(frozen=True)
class Pivot:
    """A table of one measure."""

    title: str
    corner: str
    columns: list[str]
    rows: list[PivotRow]


def pivots(comparison: Comparison) -> list[Pivot]:
    """Return the tables, if at least two settings differ and some row and some column have several values; holes stay empty."""
    keys = [key for key in comparison.keys if key != "seed"]
    if len(keys) < 2:
        return []
    across = column_key(comparison)
    places = _places(comparison, across)
    columns = in_order(comparison, across)
    if len(columns) < 2 or len(places) < 2 or max(len(row) for row in places.values()) < 2:
        return []
    measures = [BY_KEY[key] for key in SHOWN if any(measure.key == key for measure in comparison.measures)]
    return [_pivot(comparison, measure, across, columns, places) for measure in measures]


def _places(comparison: Comparison, across: str) -> dict[str, dict[str, int]]:
    """Return the case of each row and column; of several with equal settings, the first."""
    rows: dict[str, dict[str, int]] = {}
    for place, case in enumerate(comparison.cases):
        rows.setdefault(comparison.name_without(place, (across,)), {}).setdefault(case.settings.get(across, ""), place)
    return rows


def _pivot(comparison: Comparison, measure: Measure, across: str, columns: list[str], places: dict[str, dict[str, int]]) -> Pivot:
    of_column: dict[int, str] = {}
    for column in columns:
        of_column |= comparison.standing(measure, [row[column] for row in places.values() if column in row])
    rows = [
        PivotRow(
            name,
            [_cell(comparison, measure, row[column], of_column) if column in row else Cell() for column in columns],
        )
        for name, row in places.items()
    ]
    if measure.key == "hit_rate":
        rows += _bounds(comparison, columns, places)
    varied = [heading(key) for key in comparison.keys if key not in (across, "seed")]
    others = ", ".join(varied[:MOST_NAMED]) + (" and more" if len(varied) > MOST_NAMED else "")
    title = f"{measure.title[0].upper()}{measure.title[1:]} by {others} and {heading(across)}"
    return Pivot(title, f"{others} \\ {heading(across)}", columns, rows)


def _cell(comparison: Comparison, measure: Measure, place: int, of_column: dict[int, str]) -> Cell:
    mark = {TIE: " =", NEAR: " ≈"}.get(of_column.get(place, ""), "")
    classes = ["number"]
    classes += ["best-of-column"] if of_column.get(place) in (BEST, TIE) else []
    text = shown(measure, comparison.cases[place].mean(measure)) + mark
    share = share_of_belady(comparison, place) if measure.key == "hit_rate" else None
    if share is None:
        return Cell(text, "", " ".join(classes))
    return Cell(text, f"{share:.0%} of the bound", " ".join(classes), f"{min(max(share, 0.0), 1.0):.0%}")


def gap_to_belady(comparison: Comparison, place: int) -> float | None:
    """Return how far a case's hit rate lies above Belady's bound, normally below 0, by the seeds that have one; else None."""
    case = comparison.cases[place]
    rates, bound = case.by_seed(BY_KEY["hit_rate"].of), case.bound("belady")
    gap = mean_of([rates[seed] - bound[seed] for seed in rates if seed in bound])
    return None if gap is None else gap.mean


def share_of_belady(comparison: Comparison, place: int) -> float | None:
    """Return a case's hit rate as a share of Belady's bound, by the seeds that have one; None without, or if that is 0."""
    case = comparison.cases[place]
    rates, bound = case.by_seed(BY_KEY["hit_rate"].of), case.bound("belady")
    known = [seed for seed in rates if seed in bound]
    whole = sum(bound[seed] for seed in known)
    return sum(rates[seed] for seed in known) / whole if whole else None


def _bounds(comparison: Comparison, columns: list[str], places: dict[str, dict[str, int]]) -> list[PivotRow]:
    """Return rows for the bounds that all cases of a column share; none where some column has several."""
    rows = []
    for kind in ("belady", "unlimited"):
        cells = []
        for column in columns:
            cases = [comparison.cases[row[column]] for row in places.values() if column in row]
            names = {case.bound_name(kind) for case in cases}
            rate = mean_of(list(cases[0].bound(kind).values())) if len(names) == 1 else None
            if len(names) > 1:
                break
            cells.append(Cell("" if rate is None else shown(BY_KEY["hit_rate"], rate)))
        if len(cells) == len(columns) and any(cell.text for cell in cells):
            rows.append(PivotRow(kind, cells, is_bound=True))
    return rows


def pivots_note(comparison: Comparison) -> str:
    """Say what the marks in the tables mean."""
    parts = ["Tinted: the best of its column; =: one of several that are equal as shown."]
    how = "by the differences seed by seed" if comparison.has_seeds else "by resampling the trace's sessions or stretches of it"
    parts.append(f"≈: not distinguishable from the best of its column (95 %, {how}).")
    if comparison.framed("belady"):
        parts.append("Bars: the share of Belady's bound for tiers of that size.")
    return " ".join(parts)
