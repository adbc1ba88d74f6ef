"""Shows a validation with several real runs: tables of its figures and steps on the terminal, and a page with pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvsim.report.axes import number_text
from kvsim.report.figure import COLOURS, GREY, Figure, Picture, laid_out, rounded
from kvsim.report.headline import Head, Tile
from kvsim.report.summary import Table
from kvsim.report.table import print_summary
from kvsim.report.template import foot, render_page
from kvsim.report.validation.repeated import BY_CHANCE
from kvsim.report.validation.step_table import step_table
from kvsim.report.validation.validation import device_name
from kvsim.report.validation.validation import pictures_of as by_request
from kvsim.results.rates import count
from kvsim.results.result import RunRecord, hit_definition

SCALES = {"share": (100.0, " %"), "s": (1000.0, " ms"), "bytes": (1e-9, " GB")}
"""What values are multiplied by, and the unit they then have."""


def print_repeated(record: RunRecord, console: Console) -> None:
    """Print the tables."""
    width = min(console.width, 100)
    console.print(Text("kvsim validate", "bold"))
    for line in lines(record):
        console.print(Text(line, "dim"), width=width)
    for table in tables(record):
        console.print()
        console.print(Text(table.title, "bold"), width=width)
        print_summary(table, console, width)


def lines(record: RunRecord) -> list[str]:
    """Return what was run, and how the table is to be read."""
    verified = sum(found["verified_pages"] for found in record["hardware"])
    many = f"{record['simulations']} simulations" if record["has_noise"] else "1 simulation"
    figures = record["figures"]
    return [
        f"{count(record['requests'])} requests: {many} and {len(record['measured'])} runs on {device_name(record)}; "
        f"{count(verified)} reused pages verified.",
        "The simulations have the measured noise of the machine."
        if record["has_noise"]
        else "The machine has no measured noise, so all simulations are equal: repeat kvsim calibrate, which measures it.",
        f"{record['off']} of {len(figures)} figures are off; about {BY_CHANCE * len(figures):.0f} would be by chance.",
        hit_definition(record["config"]),
    ]


def tables(record: RunRecord) -> list[Table]:
    """Return the figures, and the steps of the real runs if they have been recorded."""
    return [table for table in (figure_table(record), step_table(record["hardware"])) if table.rows]


def figure_table(record: RunRecord) -> Table:
    """Return the figures with their spreads (mean ± standard deviation), distance, 95 % interval and verdict."""
    rows = [_row(figure) for figure in record["figures"]]
    return Table(
        "Figures (mean ± standard deviation)", ("", "simulated", "hardware", "distance", "95% interval", "verdict"), rows
    )


def _row(figure: Mapping[str, Any]) -> tuple[str, ...]:
    scale, unit = SCALES[figure["unit"]]
    sides = [figure["simulated"], figure["hardware"]]
    spreads = [f"{_number(side['mean'] * scale, 4)} ± {_number(side['deviation'] * scale, 2)}" for side in sides]
    distance, low, high = (shown(figure, figure[key]) for key in ("distance", "low", "high"))
    return (figure["name"] + unit, *spreads, distance, f"{low} to {high}", verdict(figure))


def _number(value: float, significant: int) -> str:
    return number_text(float(f"{value:.{significant}g}"))


def shown(figure: Mapping[str, Any], distance: float | None) -> str:
    """Return a distance in points for shares, relative to the real runs for anything else."""
    if distance is None:
        return "-"
    return f"{100 * distance:+.2f}" if figure["unit"] == "share" else f"{distance:+.1%}"


def verdict(figure: Mapping[str, Any]) -> str:
    """Return whether a figure is within the machine's spread and, if it is off, whether its tolerance allows that."""
    if not figure["is_off"]:
        return "within"
    return "off" if figure["tolerance"] is None else "off, allowed" if figure["holds"] else "off, FAILS"


def repeated_failures(record: RunRecord) -> str:
    """Describe the figures that fail; empty if all hold."""
    return ", ".join(
        f"{figure['name']} is off by {shown(figure, figure['distance'])} (tolerance {figure['tolerance']:.4g})"
        for figure in record["figures"]
        if not figure["holds"]
    )


def render_repeated(record: RunRecord) -> str:
    """Return the validation as a self-contained HTML page."""
    failed = [figure["name"] for figure in record["figures"] if not figure["holds"]]
    number = f"{len(failed)} figures fail" if len(failed) > 1 else "1 figure fails" if failed else "all figures hold"
    title = f"{count(record['requests'])} requests, {len(record['measured'])} times on {device_name(record)}: {number}"
    return render_page(
        "plain.html", title, pictures_of(record), head=_head(record, failed), about=[], lines=lines(record),
        tables=tables(record), pictures_first=False, foot=foot(record),
    )  # fmt: skip


def pictures_of(record: RunRecord) -> list[Picture]:
    """Return the spread of each figure, and the times of each request, simulated against real."""
    note = "Each request at the median of its times over all runs."
    spread = Picture("Runs relative to the mean of the real runs", strips(record["figures"]))
    return [spread, *(picture._replace(note=note) for picture in by_request(record))]


ASKED = {"hit_rate all": "hit rate", "identical hits": "identical hits", "ttft_p50": "TTFT p50", "ttft_p99": "TTFT p99"}
"""The figures asked for first, and what they are called."""


def _head(record: RunRecord, failed: Sequence[str]) -> Head:
    """Return what fails, and how far the figures asked for first are from the real runs."""
    tiles = []
    for figure in record["figures"]:
        if figure["name"] in ASKED:
            unit = " points" if figure["unit"] == "share" and figure["distance"] is not None else ""
            interval = f"{shown(figure, figure['low'])} to {shown(figure, figure['high'])}"
            note = f"{verdict(figure)}; 95 %: {interval}"
            tiles.append(Tile(ASKED[figure["name"]], f"{shown(figure, figure['distance'])}{unit}", note))
    said = f"Outside of the machine's spread and of their tolerance: {', '.join(failed)}." if failed else ""
    return Head(said or "No figure is outside of both the machine's spread and its tolerance.", tiles)


def strips(figures: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw every run's figures, relative to the mean of the real runs, a row for each figure."""
    drawn = [figure for figure in figures if figure["hardware"]["mean"]]
    names = [figure["name"] for figure in reversed(drawn)]
    traces = []
    for side, label, colour in (("simulated", "simulation", COLOURS[0]), ("hardware", "real run", COLOURS[1])):
        points = [(value / figure["hardware"]["mean"], figure["name"]) for figure in drawn for value in figure[side]["values"]]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": label, "x": rounded(x for x, _ in points),
                "y": [name for _, name in points], "marker": {"color": colour, "size": 8, "opacity": 0.7},
            }
        )  # fmt: skip
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": GREY, "dash": "dash"}}
    return laid_out(
        traces, "relative to the mean of the real runs", "", "", height=120 + 24 * len(names), hovermode="closest", shapes=[line],
        y_axis={"type": "category", "categoryorder": "array", "categoryarray": names, "rangemode": "normal"},
    )  # fmt: skip
