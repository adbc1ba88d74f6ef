"""The table and the chart of the speed study."""

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

T = TypeVar("T")
ABOUT = (
    "# Speed",
    "",
    "Measured by `python experiments/speed/run.py`, once with kvsim in pure Python and once compiled. A rate is a multiple",
    "of the yardstick's, with requests per second in brackets: the best of five runs of each (fewer where the counts below",
    "say so), taken in turn, each in a process of its own and without reading the trace. For the sweep too the best run",
    "counts, for memory the worst. A hit is a prompt page whose predecessors hit as well, counted once.",
)
VERDICTS = {True: "holds", False: "FAILS", None: ""}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number and, if there is one, the claim about it."""

    what: str
    measured: str
    claim: str = ""
    holds: bool | None = None
    """None without a claim."""
    bar: tuple[str, int, float] | None = None
    """Name, page size in tokens and multiple of the yardstick, for the chart."""


def print_rows(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "measured", "claim", ""):
        table.add_column(heading, overflow="fold")
    for row in rows:
        style = "red" if row.holds is False else None
        table.add_row(escape(row.what), escape(row.measured), escape(row.claim), VERDICTS[row.holds], style=style)
    console.print(table)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of claims, measured with one build of kvsim on one occasion."""

    when: str
    machine: str
    yardstick: list[float]
    """Requests per second of the yardstick's runs; empty if nothing is compared with it."""
    rows: list[Row]

    @property
    def noise(self) -> str:
        """The spread of the yardstick's runs in words; empty if it did not run."""
        if not self.yardstick:
            return ""
        low, high = min(self.yardstick), max(self.yardstick)
        return f"yardstick {low:,.0f} to {high:,.0f} requests/s in {len(self.yardstick)} runs"


Results = dict[str, dict[str, Section]]
"""By build and title."""


def read_results(path: Path) -> Results:
    """Return the measurements of earlier runs."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {
        build: {
            title: Section(**section | {"rows": [_row(row) for row in section["rows"]]}) for title, section in sections.items()
        }
        for build, sections in kept.items()
    }


def _row(kept: dict[str, Any]) -> Row:
    name, size, times = kept["bar"] or (None, None, None)
    return Row(**kept | {"bar": (name, size, times) if name else None})


def write_results(path: Path, results: Results) -> None:
    plain = {build: {title: asdict(section) for title, section in sections.items()} for build, sections in results.items()}
    path.write_text(json.dumps(plain, indent=1) + "\n")


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """Return the rows of earlier runs; none without a file."""
    return [kind(**one) for one in json.loads(path.read_text())] if path.exists() else []


def write_rows(path: Path, rows: Sequence[Any], lines: Sequence[str]) -> None:
    """Write rows, which are dataclasses, as JSON, and the lines of their table as Markdown beside that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def write_table(path: Path, results: Results, titles: Iterable[str], about: Sequence[str] = ABOUT) -> None:
    """Write all rows as Markdown, the builds side by side, with date and machine of each section, below lines about them."""
    lines = list(about)
    for title in titles:
        measured = {build: sections[title] for build, sections in results.items() if title in sections}
        if measured:
            lines += ["", f"## {title}", "", *_side_by_side(measured), ""]
            lines += [
                "; ".join(filter(None, (f"- {build}: {one.when}, {one.machine}", one.noise))) for build, one in measured.items()
            ]
    path.write_text("\n".join(lines) + "\n")


def _side_by_side(measured: Mapping[str, Section]) -> Iterator[str]:
    yield "| | " + " | ".join(f"{build} | claim | " for build in measured) + "|"
    yield "|---" * (1 + 3 * len(measured)) + "|"
    rows = {build: {row.what: row for row in section.rows} for build, section in measured.items()}
    for what in dict.fromkeys(what for named in rows.values() for what in named):
        found = [named.get(what, Row(what=what, measured="")) for named in rows.values()]
        yield f"| {what} | " + " | ".join(f"{row.measured} | {row.claim} | {VERDICTS[row.holds]}" for row in found) + " |"


def draw_bars(path: Path, results: Results) -> None:
    """Write a page with a bar chart of rates by page size and simulator."""
    import plotly.graph_objects as go

    bars = [row.bar for sections in results.values() for section in sections.values() for row in section.rows if row.bar]
    figure = go.Figure()
    for name in dict.fromkeys(name for name, _, _ in bars):
        rates = {f"{size} tokens": times for other, size, times in bars if other == name}
        figure.add_bar(name=name, x=list(rates), y=list(rates.values()), text=[f"{y:.2f}" for y in rates.values()])
    figure.update_yaxes(type="log", title="multiples of the yardstick (log scale)")
    figure.update_xaxes(title="tokens per page")
    figure.update_layout(title="Replay of the Mooncake conversation trace, 5.12 million tokens of cache", barmode="group")
    figure.write_html(path, include_plotlyjs=True)


def machine() -> str:
    """Processor, cores, their load, system, Python and kvsim, in words."""
    try:
        kvsim = f"kvsim {version('kvsim')}"
    except PackageNotFoundError:
        kvsim = "kvsim of unknown version"
    system = f"{platform.system()} {platform.machine()}"
    cores = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
    return f"{_processor()} ({cores}), {system}, Python {platform.python_version()}, {kvsim}"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")
