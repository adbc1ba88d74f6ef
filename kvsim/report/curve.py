"""Presents hit rate against capacity: tables, a picture, and the files of a curve's folder."""

import csv
import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from kvsim.report.folder import prepare_folder, replacing
from kvsim.report.html import document, draw_table, foot, picture
from kvsim.report.pictures import LINK_COLOURS, laid_out
from kvsim.report.result import RunRecord, hit_definition, plain, to_json
from kvsim.report.summary import Table, count, percent
from kvsim.report.table import as_rich

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLUMNS_A_TABLE = 8
CSV_COLUMNS = (
    "policy", "sampled", "capacity_pages", "capacity_tokens", "capacity_bytes", "hit_rate", "page_hit_rate", "hit_tokens",
    "hit_pages", "prompt_tokens", "prompt_pages", "rejected",
)  # fmt: skip


def write_curve(folder: Path, record: RunRecord) -> None:
    """Write ``curve.csv``, ``curve.html`` and, last, ``curve.json``. Raises UsageError if the folder cannot be written."""
    prepare_folder(folder)
    (folder / "curve.json").unlink(missing_ok=True)
    for name, text in (("curve.csv", _csv(record)), ("curve.html", render_curve(record)), ("curve.json", to_json(record))):
        with replacing(folder / name) as file:
            file.write(text.encode())


def print_curve(record: RunRecord, console: Console) -> None:
    """Print the facts and the tables."""
    width = min(console.width, 100)
    console.print(Text("kvsim curve", "bold"))
    for line in (*facts(record), hit_definition(record["config"])):
        console.print(Text(line, "dim"), width=width)
    for table in tables(record):
        console.print()
        console.print(Text(table.title, "bold"), width=width)
        console.print(as_rich(table), width=width)


def facts(record: RunRecord) -> list[str]:
    """Return what was replayed, in sentences."""
    lines = [
        f"{count(record['requests'])} requests counted, {count(record['prompt_tokens'])} prompt tokens; largest prompt "
        f"{count(record['largest_prompt_pages'])} pages, {count(record['unique_pages'])} unique pages of "
        f"{record['page_tokens']} tokens ({size(record['page_bytes'])} each).",
        "One tier. Each request ends before the next begins; answers take no pages. LRU is exact, from one pass over the trace.",
    ]
    if record["warmup_requests"]:
        lines.append(f"{count(record['warmup_requests'])} earlier requests warm up the tier and are not counted.")
    if any(point["rejected"] for point in record["points"]):
        lines.append("A prompt larger than the tier is rejected; rates cover the requests served.")
    if sampling := record["sampling"]:
        lines.append(
            f"Sampled: {count(sampling['requests'])} requests with {sampling['share_of_unique_pages']:.2%} of the unique pages, "
            "at capacities scaled down by the same factor. The sampling error is measured: LRU of the sample minus LRU of the "
            "whole trace. A dash marks a capacity that, scaled down, is smaller than the largest prompt of the sample."
        )
    return lines


def tables(record: RunRecord) -> list[Table]:
    """Return hit rates by policy and capacity, in as many tables as the number of capacities requires."""
    capacities = record["capacities"]
    return [_table(record, capacities[start : start + COLUMNS_A_TABLE]) for start in range(0, len(capacities), COLUMNS_A_TABLE)]


def _table(record: RunRecord, capacities: list[int]) -> Table:
    rows: list[tuple[str, ...]] = [("no cache", *(percent(0.0) for _ in capacities))]
    rates = {(p["policy"], p["sampled"], p["capacity_pages"]): p["hit_rate"] for p in record["points"]}
    for policy, sampled in dict.fromkeys((p["policy"], p["sampled"]) for p in record["points"]):
        name = f"{policy}, sample" if sampled else policy
        rows.append((name, *(percent(rates.get((policy, sampled, capacity))) for capacity in capacities)))
    if record["sampling"]:
        errors = record["sampling"]["error"]
        rows.insert(3, ("sampling error", *(_points(errors.get(str(capacity))) for capacity in capacities)))
    rows.append(("unlimited", *(percent(record["unlimited"]["hit_rate"]) for _ in capacities)))
    rejected = {p["capacity_pages"]: p["rejected"] for p in record["points"] if p["policy"] == "lru" and not p["sampled"]}
    if any(rejected[capacity] for capacity in capacities):
        rows.append(("rejected requests", *(count(rejected[capacity]) for capacity in capacities)))
    rows.append(("in bytes", *(size(capacity * record["page_bytes"]) for capacity in capacities)))
    return Table("Hit rate by capacity in pages", ("", *(count(capacity) for capacity in capacities)), rows)


def _points(difference: float | None) -> str:
    return "-" if difference is None else f"{100 * difference:+.2f}"


def size(n_bytes: int) -> str:
    """Format bytes with three digits in the largest binary unit that they reach."""
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def render_curve(record: RunRecord) -> str:
    """Return the curve as a self-contained HTML page."""
    parts = [f'<p class="soft">{escape(line)}</p>' for line in (*facts(record), hit_definition(record["config"]))]
    parts.append(picture(curve_figure(record), 0, with_script=True, height="460px"))
    parts += [draw_table(table) for table in tables(record)]
    return document("kvsim curve", [*parts, foot(record)])


def curve_figure(record: RunRecord) -> "go.Figure":
    """Draw LRU as a line over all capacities, other policies at the table's capacities, and an unlimited cache's hit rate."""
    import plotly.graph_objects as go

    figure = go.Figure()
    line = record["line"]
    figure.add_scatter(
        x=line["capacity_pages"], y=line["hit_rate"], name="lru", mode="lines", line={"color": "#3d8fd1", "width": 2.5}
    )
    colours = iter(LINK_COLOURS * len(record["points"]))
    drawn = dict.fromkeys((p["policy"], p["sampled"]) for p in record["points"])
    for policy, sampled in drawn:
        points = [p for p in record["points"] if (p["policy"], p["sampled"]) == (policy, sampled)]
        if policy == "lru" and not sampled:
            points = [p for p in points if p["capacity_pages"] < line["capacity_pages"][0]]
        if not points:
            continue
        bound = policy == "belady"
        figure.add_scatter(
            x=[p["capacity_pages"] for p in points],
            y=[p["hit_rate"] for p in points],
            name=f"{policy}, sample" if sampled else "lru, some requests rejected" if policy == "lru" else policy,
            mode="lines+markers",
            line={"color": "#888" if bound else next(colours), "width": 1.5, "dash": "dash" if bound else "solid"},
        )
    unlimited = record["unlimited"]["hit_rate"]
    figure.add_hline(unlimited, line={"color": "#888", "dash": "dot"}, annotation_text=f"unlimited {percent(unlimited)}",
                     annotation_position="top left")  # fmt: skip
    figure.update_xaxes(type="log", dtick="D2")
    return laid_out(figure, f"capacity (pages of {record['page_tokens']} tokens)", "hit tokens / prompt tokens")


def _csv(record: RunRecord) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in _rows(record):
        pages = row["capacity_pages"]
        tokens, n_bytes = pages * record["page_tokens"], pages * record["page_bytes"]
        writer.writerow(row | {"capacity_tokens": tokens, "capacity_bytes": n_bytes, "sampled": str(row["sampled"]).lower()})
    return text.getvalue()


def _rows(record: RunRecord) -> list[dict[str, Any]]:
    """Return the points of the table and of LRU's line, by policy and capacity; no cache first, an unlimited cache last."""
    line = [dict(zip(record["line"], values, strict=True)) for values in zip(*record["line"].values(), strict=True)]
    whole = {"policy": "lru", "sampled": False, "rejected": 0} | {
        name: record[name] for name in ("prompt_tokens", "prompt_pages")
    }
    tabled = {p["capacity_pages"] for p in record["points"] if p["policy"] == "lru" and not p["sampled"]}
    points = [*record["points"], *(whole | point for point in line if point["capacity_pages"] not in tabled)]
    order = list(dict.fromkeys((p["policy"], p["sampled"]) for p in points))
    points.sort(key=lambda point: (order.index((point["policy"], point["sampled"])), point["capacity_pages"]))
    nothing = {"capacity_pages": 0, "hit_tokens": 0, "hit_pages": 0, "hit_rate": 0.0, "page_hit_rate": 0.0}
    unlimited = whole | record["unlimited"] | {"policy": "unlimited"}
    return [whole | nothing | {"policy": "no cache"}, *points, plain(unlimited)]
