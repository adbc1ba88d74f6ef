"""Presents a leaderboard: the order of the policies, every cell, a heat map, and the files of the folder."""

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from kvsim.files.writing import FileSet
from kvsim.report.figure import Figure, Picture, laid_out, rounded
from kvsim.report.headline import Head, Tile
from kvsim.report.shown_paths import shown_command
from kvsim.report.summary import Table
from kvsim.report.table import print_summary
from kvsim.report.template import SHARED_SCRIPT, Foot, path_note, render_page, versions
from kvsim.report.terminal import width_of
from kvsim.results.cells import as_text
from kvsim.results.rates import UNKNOWN, count, percent
from kvsim.results.result import RunRecord, to_json

CSV_COLUMNS = (
    "policy", "trace", "capacity", "value", "gain", "noise", "headroom", "us_per_request", "cost", "folder", "reason",
)  # fmt: skip


class Look(NamedTuple):
    """How a measure is shown."""

    name: str
    unit: str
    """Of gains."""
    scale: float
    """How many of that unit make one of the measure."""
    shown: Callable[[float], str]


LOOKS = {
    "hit_rate": Look("hit rate", "points", 100.0, percent),
    "ttft_s": Look("mean time to first token", "ms", 1000.0, lambda seconds: f"{seconds:.4g} s"),
}
ROW_PX, AROUND_PX = 24, 130
DIVERGING = [[0.0, "#b2593b"], [0.25, "#dd9d84"], [0.5, "#e9ecef"], [0.75, "#7fb0d6"], [1.0, "#2f6fa7"]]
"""Losses in red, gains in blue, both visible on white and black; 0 in the middle."""


def write_leaderboard(folder: Path, record: RunRecord) -> None:
    """Write ``leaderboard.csv``, ``leaderboard.html`` and ``leaderboard.json``, all or none."""
    with FileSet(folder) as files:
        files.write("leaderboard.csv", _csv(record))
        files.write("leaderboard.html", render_leaderboard(record))
        files.write("leaderboard.json", to_json(record))


def print_leaderboard(record: RunRecord, console: Console) -> None:
    """Print the verdict, the order and the notes."""
    width = width_of(console)
    console.print(Text("kvsim leaderboard", "bold"))
    for line in (_head(record).verdict, *_lines(record)):
        console.print(Text(line, "dim"), width=min(width, 100))
    console.print()
    print_summary(order(record), console, width)


def order(record: RunRecord) -> Table:
    """Return a row for each policy, best first."""
    _, unit, scale, _ = LOOKS[record["measure"]]
    columns = ["", "policy", f"gain ({unit})", "worst", "best"]
    columns += [f"of {record['bound']}'s gain"] if record["bound"] else []
    columns += ["time"]
    rows = []
    for number, one in enumerate(record["standings"], start=1):
        noise = "" if one["noise"] is None or one["policy"] == record["baseline"] else f" ± {scale * one['noise']:.2f}"
        gain = UNKNOWN if one["gain"] is None else f"{scale * one['gain']:+.2f}{noise}"
        cells = [str(number), one["policy"], gain, _signed(one["worst"], scale), _signed(one["best"], scale)]
        cells += [UNKNOWN if one["headroom"] is None else f"{one['headroom']:.0%}"] if record["bound"] else []
        rows.append((*cells, UNKNOWN if one["cost"] is None else f"{one['cost']:.2f}x"))
    return Table("Order", tuple(columns), rows)


def _signed(value: float | None, scale: float) -> str:
    return UNKNOWN if value is None else f"{scale * value:+.2f}"


def grid(record: RunRecord) -> Table:
    """Return the measure of every policy in every cell, in the order of the board, the bound last."""
    look, places = LOOKS[record["measure"]], _places(record)
    value = {(cell["policy"], cell["trace"], cell["capacity"]): cell["value"] for cell in record["cells"]}
    rows = [(policy, *(_shown(value.get((policy, *place)), look) for place in places)) for policy in _policies(record)]
    return Table(look.name.capitalize(), ("policy", *(_named(record, place) for place in places)), rows)


def _policies(record: RunRecord) -> list[str]:
    return [one["policy"] for one in record["standings"]] + ([record["bound"]] if record["bound"] else [])


def _places(record: RunRecord) -> list[tuple[str, str]]:
    return [(trace["name"], capacity) for trace in record["traces"] for capacity in trace["capacities"]]


def _named(record: RunRecord, place: tuple[str, str]) -> str:
    """Name a cell: its capacity, and the number of its trace if there are several."""
    pages = re.fullmatch(r"(\d+)pages", place[1])
    capacity = f"{count(int(pages[1]))} pages" if pages else place[1]
    names = [trace["name"] for trace in record["traces"]]
    return capacity if len(names) == 1 else f"trace {names.index(place[0]) + 1}, {capacity}"


def _shown(value: float | None, look: Look) -> str:
    return UNKNOWN if value is None else look.shown(value)


def heat_map(record: RunRecord) -> Figure:
    """Draw the gain of each policy in each cell, best policy on top."""
    _, unit, scale, _ = LOOKS[record["measure"]]
    places, policies = _places(record), _policies(record)
    gains = {(cell["policy"], cell["trace"], cell["capacity"]): cell["gain"] for cell in record["cells"]}
    rows = [[gains.get((policy, *place)) for place in places] for policy in policies]
    shown = [rounded([None if gain is None else scale * gain for gain in row]) for row in rows]
    own = [abs(gain) for policy, row in zip(policies, shown, strict=True) if policy != record["bound"] for gain in row if gain]
    most = max(own, default=1.0)
    trace = {
        "type": "heatmap", "x": [_named(record, place) for place in places], "y": policies, "z": shown,
        "colorscale": DIVERGING, "zmin": -most, "zmax": most, "xgap": 1, "ygap": 1,
        "texttemplate": "%{z:+.2f}", "textfont": {"color": "#1c1f22"},
        "colorbar": {"title": {"text": f"{unit} over {record['baseline']}", "side": "right"}, "thickness": 12},
        "hovertemplate": f"%{{y}}, %{{x}}: %{{z:+.3f}} {unit}<extra></extra>",
    }  # fmt: skip
    axis = {"rangemode": "normal", "showgrid": False, "autorange": "reversed", "type": "category"}
    return laid_out(
        [trace], "capacity of the GPU tier", "", "", x_axis={"showgrid": False, "type": "category"}, y_axis=axis,
        height=AROUND_PX + ROW_PX * len(policies), hovermode="closest",
    )  # fmt: skip


def picture(record: RunRecord) -> Picture:
    """Return the heat map with its title, and how to read it."""
    unit = LOOKS[record["measure"]].unit
    bound = f"; those of {record['bound']} are the most that is possible" if record["bound"] else ""
    return Picture("Gains by trace and capacity", heat_map(record), f"Gains over {record['baseline']} in {unit}{bound}.")


def render_leaderboard(record: RunRecord) -> str:
    """Return the page, which loads plotly.js from the folder of the first trace's runs, as their pages do."""
    return render_page(
        "plain.html", f"{record['family']} policies by {LOOKS[record['measure']].name}", [picture(record)], head=_head(record),
        about=_about(record), lines=_lines(record), tables=[order(record), grid(record), *_failures(record)], pictures_first=True,
        foot=_foot(record), shared_script=f"1/{SHARED_SCRIPT}",
    )  # fmt: skip


def _head(record: RunRecord) -> Head:
    """Return which policy to take, and how much it gains."""
    name, unit, scale, _ = LOOKS[record["measure"]]
    best = next(one for one in record["standings"] if one["policy"] == record["best"])
    tiles = [Tile("take", record["best"], f"of {len(record['standings'])} {record['family']} policies")]
    if best["missing"]:
        return Head(f"{record['verdict']}.", tiles[:0])
    if best["policy"] == record["baseline"]:
        return Head(f"{record['verdict']}: stay with it.", tiles)
    noise = "" if best["noise"] is None else f" ± {scale * best['noise']:.2f}"
    gain = f"{scale * best['gain']:.2f}{noise} {unit}"
    tiles.append(
        Tile(f"over {record['baseline']}", f"{scale * best['gain']:+.2f} {unit}", f"of {name}, on average{noise and f',{noise}'}")
    )
    tiles.append(Tile("least", f"{scale * best['worst']:+.2f} {unit}", "in the cell where it gains least"))
    if best["cost"]:
        tiles.append(Tile("time", f"{best['cost']:.2f}x", f"{record['baseline']}'s"))
    return Head(f"{record['verdict']}: {gain} of {name} on average.", tiles)


def _about(record: RunRecord) -> list[tuple[str, str]]:
    traces = [
        f"{one['name']}, {count(one['requests'])} requests, pages of {one['page_tokens']} tokens" for one in record["traces"]
    ]
    numbers = [""] if len(traces) == 1 else [f" {number}" for number in range(1, len(traces) + 1)]
    named = [(f"trace{number}", text) for number, text in zip(numbers, traces, strict=True)]
    return [("family", record["family"]), ("runs", record["runs"]), *named]


def _lines(record: RunRecord) -> list[str]:
    """Return how to read the numbers."""
    name, unit, _, _ = LOOKS[record["measure"]]
    lines = [
        f"Gains are of the {name} over {record['baseline']} on the same requests, in {unit}: the mean over all traces and "
        "capacities, the worst and the best. ± is a 95% interval: what another stretch of the same traffic would change. time is "
        f"the wall time of the runs as a multiple of {record['baseline']}'s."
    ]
    if record["bound"]:
        lines.append(f"{record['bound']} knows the future: a bound, which takes no place. Shares are of the sum of its gains.")
    if ahead := record["look_ahead"]:
        knows = "knows" if len(ahead) == 1 else "know"
        lines.append(f"{' and '.join(ahead)} {knows} what the trace will ask for: to compare with, not to take.")
    return [*lines, *record["notes"]]


def _failures(record: RunRecord) -> Sequence[Table]:
    """Return why policies have no place."""
    rows: list[tuple[str, ...]] = [
        (one["policy"], str(one["missing"]), one["reason"]) for one in record["standings"] if one["missing"]
    ]
    return [Table("Runs that failed", ("policy", "runs", "why"), rows)] if rows else []


def _foot(record: Mapping[str, Any]) -> Foot:
    command = record["command_line"] or ""
    return Foot(shown_command(command), [], f"{versions(record)}.", path_note(command))


def _csv(record: RunRecord) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for cell in record["cells"]:
        writer.writerow({key: as_text(value) for key, value in cell.items()})
    return text.getvalue()
