"""Draws any number of runs on one HTML page."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from kvsim.report.about import about_run, common
from kvsim.report.comparison.compare import NEAR, TIE, Comparison, Row
from kvsim.report.comparison.differing import heading
from kvsim.report.comparison.findings import answers
from kvsim.report.comparison.head import tiles, title_of
from kvsim.report.comparison.pareto import Front, front_of
from kvsim.report.comparison.pictures import pictures_of
from kvsim.report.comparison.pivot import pivots, pivots_note
from kvsim.report.figure import Picture
from kvsim.report.refreshing import Refreshing
from kvsim.report.shown_paths import setting_without_folders, shown_command
from kvsim.report.summary import Table, settings
from kvsim.report.template import Foot, path_note, render_page, versions
from kvsim.results.rates import count, digits
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run

LATER = "Whether differences between single runs exceed chance is said when all jobs have ended."
LONG = 30
"""Characters from which a text is broken into lines."""


FILTERED_FROM = 6
"""Rows from which the main table has a filter."""


class Heading(NamedTuple):
    """The heading of a column of the main table."""

    text: str
    is_number: bool


class Cell(NamedTuple):
    """A cell of the main table: text, a value to sort by, how it stands in its column, and links to pages of runs."""

    text: str
    value: float | str | None = None
    classes: str = ""
    is_best: bool = False
    mark: str = ""
    links: list[tuple[str, str]] = []  # noqa: RUF012  (never changed)


class Line(NamedTuple):
    """A row of the main table."""

    cells: list[Cell]
    is_bound: bool
    case: int | None = None
    """The place of the configuration that it shows, which pictures name as well."""
    runs: Sequence[int] = ()
    """The places of its runs."""


def render_comparison(
    runs: Sequence[Run],
    command_line: str | None,
    *,
    folder: Path | None = None,
    shared_script: str | None = None,
    notes: Sequence[str] = (),
    refreshing: Refreshing | None = None,
) -> str:
    """Return the page as text. The same runs give the same page.

    ``folder`` is the page's, for links to the pages of the runs; without it, there are none. ``shared_script`` is the address of
    plotly.js relative to the page; without it, the page contains plotly.js. ``notes`` are those of the sweep, and
    ``refreshing`` says how far it is while it runs.
    """
    comparison = Comparison(runs, is_resampled=refreshing is None)
    front = front_of(runs)
    return render_page(
        "comparison.html",
        title_of(comparison),
        [*_front_picture(front), *pictures_of(comparison)],
        shared_script=shared_script,
        width="1500px",
        is_sortable=True,
        refreshing=refreshing,
        tiles=tiles(comparison),
        about=_about(comparison),
        warnings=[*comparison.mixture(), *_warnings(comparison)],
        answers=[*answers(comparison), *comparison.same_results()],
        pivots=pivots(comparison),
        pivots_note=pivots_note(comparison),
        has_seeds=comparison.has_seeds,
        headings=_headings(comparison),
        rows=_lines(comparison, folder),
        has_filter=len(comparison.cases) >= FILTERED_FROM,
        notes=[*notes, *comparison.notes(), *([LATER] if refreshing else [])],
        tables=[
            table
            for table in (_front_table(front), _failures(comparison), _measured(comparison), _outcomes(comparison))
            if table.rows
        ],
        foot=_foot(comparison, command_line),
    )


def _about(comparison: Comparison) -> list[tuple[str, str]]:
    """Return what all runs share."""
    requests = sorted({result["requests"] for result in comparison.results})
    counted = count(requests[0]) if len(requests) == 1 else f"{count(requests[0])} to {count(requests[-1])}"
    kinds = ", ".join(sorted({f"kvsim {result['command']}" for result in comparison.results}))
    shared = [about_run(result) for result in comparison.results]
    pairs = [(name, text) for name, text in common(shared) if name != "seed"]
    varied = ", ".join(heading(key) for key in comparison.keys)
    seeds = {len(case.runs) for case in comparison.cases}
    several = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return [
        ("command", f"{kinds}, {counted} requests counted"),
        *pairs,
        *([("differ in", varied)] if varied else []),
        *([("seeds", f"{several} per configuration")] if comparison.has_seeds else []),
        *([("failed", f"{len(comparison.failed)} jobs, listed below")] if comparison.failed else []),
    ]


def _warnings(comparison: Comparison) -> list[str]:
    """Return the warnings of runs: of those that are alike up to the first colon, the first one, with the names of all runs."""
    runs: dict[str, list[tuple[str, str]]] = {}
    for run, result in zip(comparison.runs, comparison.results, strict=True):
        for text in result.get("warnings") or []:
            runs.setdefault(text.partition(":")[0], []).append((run.name, text))
    return [_warning(found, len(comparison.runs)) for found in runs.values()]


def _warning(found: list[tuple[str, str]], all_runs: int) -> str:
    first, text = found[0]
    if len(found) == all_runs and len({text for _, text in found}) == 1:
        return text
    others = [name for name, _ in found[1:]]
    listed = f"{', '.join(others[:20])}{', …' if len(others) > 20 else ''}"
    return f"{first}: {text}{f'. Likewise: {listed}' if others else ''}"


def _headings(comparison: Comparison) -> list[Heading]:
    texts = [Heading(text, False) for text in ("job" if comparison.has_seeds else "run", *map(heading, comparison.keys))]
    return [*texts, *(Heading(measure.title, True) for measure in comparison.measures)]


def _lines(comparison: Comparison, folder: Path | None) -> list[Line]:
    places = {id(run): number for number, run in enumerate(comparison.runs)}
    stands = [comparison.standing(measure) for measure in comparison.measures]
    lines = []
    for place, row in enumerate(comparison.rows(), -1):
        is_case = 0 <= place < len(comparison.cases) and not row.is_bound
        cells = [
            Cell(row.name, links=_links(comparison.cases[place].runs, folder) if is_case else []),
            *(Cell(text, classes="long" if len(text) > LONG else "") for text in row.settings),
            *_numbers(row, [found.get(place, "") if is_case else "" for found in stands]),
        ]
        runs = [places[id(run)] for run in comparison.cases[place].runs] if is_case else []
        lines.append(Line(cells, row.is_bound, place if is_case else None, runs))
    return lines


def _numbers(row: Row, stands: list[str]) -> list[Cell]:
    return [
        Cell(
            text,
            "" if value is None else value,
            "number",
            how not in ("", NEAR),
            {TIE: "=", NEAR: "≈"}.get(how, ""),
        )
        for text, value, how in zip(row.cells, row.values, stands, strict=True)
    ]


def _links(runs: Sequence[Run], folder: Path | None) -> list[tuple[str, str]]:
    """Return the runs' names, each with the address of its page relative to ``folder``; empty if there is no page."""
    found = []
    for run in runs:
        page = run.folder / "report.html"
        is_there = folder is not None and page.is_file() and page.parent.resolve() != folder.resolve()
        found.append((run.name, quote(os.path.relpath(page, folder)) if is_there else ""))
    return found


def _front_table(front: Front | None) -> Table:
    if front is None:
        return Table("", (), [])
    return Table(front.title, tuple(front.columns()), [tuple(row) for row in front.rows()])


def _front_picture(front: Front | None) -> list[Picture]:
    figure = None if front is None else front.figure()
    return [] if front is None or figure is None else [Picture(front.title, figure)]


def _failures(comparison: Comparison) -> Table:
    rows: list[tuple[str, ...]] = [(run.name, " ".join(run.overrides), run.error or "") for run in comparison.failed]
    return Table("Failed jobs", ("job", "overrides", "error"), rows)


def _outcomes(comparison: Comparison) -> Table:
    """Return the table of what happened to prefetched pages and saved states."""
    columns: dict[tuple[str, str], str] = {}
    for result in comparison.results:
        for kind, title in (("prefetch", "prefetch"), ("checkpoints", "checkpoints")):
            columns |= {(kind, name): f"{title}: {name.replace('_', ' ')}" for name, value in result[kind].items() if value}
    rows = [
        (run.name, *(count(result[kind].get(name)) for kind, name in columns))
        for run, result in zip(comparison.runs, comparison.results, strict=True)
        if columns
    ]
    return Table("Prefetch and checkpoint outcomes", ("run", *columns.values()), rows)


def _measured(comparison: Comparison) -> Table:
    """Return the table that compares simulated and hardware runs of the same configuration."""
    pairs: dict[str, dict[str, int]] = {}
    for place, result in enumerate(comparison.results):
        rest = [line for line in settings(result["config"]) if not line.startswith(("substrate=", "logger.", "timeline="))]
        pairs.setdefault("\n".join(rest), {})[str(result["config"].get("substrate"))] = place
    names: dict[str, Callable[[RunRecord], Any]] = {
        "hit rate": lambda result: result["hit_rate"],
        "TTFT mean (s)": lambda result: result["ttft_s"]["mean"],
        "TTFT p99 (s)": lambda result: result["ttft_s"]["p99"],
        "TPOT mean (s)": lambda result: result["tpot_s"]["mean"],
        "prompt tokens/s": lambda result: result["throughput"]["prompt_tokens_per_s"],
    }
    rows: list[tuple[str, ...]] = []
    for pair in pairs.values():
        if not {"simulated", "hardware"} <= pair.keys():
            continue
        simulated, measured = (comparison.results[pair[name]] for name in ("simulated", "hardware"))
        for name, read in names.items():
            one, other = read(simulated), read(measured)
            error = "-" if not other or one is None else f"{(one - other) / other:+.1%}"
            both = f"{comparison.runs[pair['simulated']].name}, {comparison.runs[pair['hardware']].name}"
            rows.append((f"{both}: {name}", digits(one), digits(other), error))
    return Table("Simulated and measured", ("runs", "simulated", "measured", "simulation error"), rows)


def _foot(comparison: Comparison, command_line: str | None) -> Foot:
    """Return how to reproduce the runs: this command, each run's command, and the shared settings."""
    flat = [settings(result["config"]) for result in comparison.results]
    others = [set(lines) for lines in flat[1:]]
    shared = [setting_without_folders(line) for line in flat[0] if all(line in lines for lines in others)]
    each = [
        f"{run.name}: {shown_command(result.get('command_line') or '')}"
        for run, result in zip(comparison.runs, comparison.results, strict=True)
    ]
    details = [("Command of each run", "\n".join(each)), ("Settings shared by all runs", "\n".join(shared))]
    command = command_line or ""
    return Foot(shown_command(command), details, f"{versions(comparison.results[0])}.", path_note(command))
