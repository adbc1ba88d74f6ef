"""The table and the picture of the speed experiment."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

VERDICTS = {True: "holds", False: "FAILS", None: ""}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure and, if there is one, the claim about it."""

    what: str
    measured: str
    claim: str = ""
    holds: bool | None = None
    """None if nothing is claimed."""
    bar: tuple[str, int, float] | None = None
    """Name, page size in tokens and requests a second, for the picture."""


def print_rows(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "measured", "claim", ""):
        table.add_column(heading, overflow="fold")
    for row in rows:
        style = "red" if row.holds is False else None
        table.add_row(escape(row.what), escape(row.measured), escape(row.claim), VERDICTS[row.holds], style=style)
    console.print(table)


def write_table(path: Path, sections: Mapping[str, list[Row]]) -> None:
    """Write all rows as Markdown, with the machine they were measured on and the command that does it again."""
    lines = [
        "# Speed",
        "",
        f"Measured on {machine()}, by `python experiments/speed/run.py`.",
        "Requests a second leave out the reading of the trace and are the best of three runs of the command line, each in a",
        "process of its own, and so is the sweep; memory is the worst of the three. A hit is a prompt page whose predecessors",
        "hit too, counted once.",
    ]
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", "| | measured | claim | |", "|---|---|---|---|"]
        lines += [f"| {row.what} | {row.measured} | {row.claim} | {VERDICTS[row.holds]} |" for row in rows]
    path.write_text("\n".join(lines) + "\n")


def draw_bars(path: Path, sections: Mapping[str, list[Row]]) -> None:
    """Write one page with requests a second by page size, a group of bars for each simulator."""
    import plotly.graph_objects as go

    bars = [row.bar for rows in sections.values() for row in rows if row.bar]
    figure = go.Figure()
    for name in dict.fromkeys(name for name, _, _ in bars):
        speeds = {f"{size} tokens": speed for other, size, speed in bars if other == name}
        figure.add_bar(name=name, x=list(speeds), y=list(speeds.values()), text=[f"{y:,.0f}" for y in speeds.values()])
    figure.update_yaxes(type="log", title="requests a second (log scale)")
    figure.update_xaxes(title="tokens in a page")
    figure.update_layout(title="Replay of the Mooncake conversation trace, 5.12 million tokens of cache", barmode="group")
    figure.write_html(path, include_plotlyjs=True)


def machine() -> str:
    """Processor, cores, system, Python and kvsim, in words."""
    try:
        kvsim = f"kvsim {version('kvsim')}"
    except PackageNotFoundError:
        kvsim = "kvsim of unknown version"
    system = f"{platform.system()} {platform.machine()}"
    return f"{_processor()} ({os.cpu_count()} cores), {system}, Python {platform.python_version()}, {kvsim}"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")
