"""Presents hit rate against capacity: tables, a picture, and the files of a curve's folder."""

import csv
import io
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvsim.files.writing import FileSet
from kvsim.report.about import about_run
from kvsim.report.figure import GREY, Figure, Picture, Styles, Trace, laid_out, level, rounded
from kvsim.report.headline import Head, Tile, subject
from kvsim.report.summary import Table
from kvsim.report.table import print_summary
from kvsim.report.template import foot, render_page
from kvsim.results.cells import as_text
from kvsim.results.rates import count, percent, size
from kvsim.results.result import RunRecord, hit_definition, plain, to_json

COLUMNS_A_TABLE = 8
SHARES, VERDICT = (0.5, 0.9, 0.99), 0.9
"""Shares of the hits of an unlimited cache for which the page says LRU's capacity, and the one that it begins with."""
CSV_COLUMNS = (
    "policy", "sampled", "capacity_pages", "capacity_tokens", "capacity_bytes", "hit_rate", "page_hit_rate", "hit_tokens",
    "hit_pages", "prompt_tokens", "prompt_pages", "rejected",
)  # fmt: skip


def write_curve(folder: Path, record: RunRecord, shared_script: str | None = None) -> None:
    """Write ``curve.csv``, ``curve.html`` and ``curve.json``, all or none. Raises UsageError if the folder cannot be written.

    ``shared_script`` is the address of plotly.js, relative to the folder; without it, the page is self-contained.
    """
    with FileSet(folder) as files:
        files.write("curve.csv", _csv(record))
        files.write("curve.html", render_curve(record, shared_script))
        files.write("curve.json", to_json(record))


def print_curve(record: RunRecord, console: Console) -> None:
    """Print the facts and the tables."""
    width = min(console.width, 100)
    console.print(Text("kvsim curve", "bold"))
    for line in (*facts(record), hit_definition(record["config"])):
        console.print(Text(line, "dim"), width=width)
    for table in tables(record):
        console.print()
        console.print(Text(table.title, "bold"), width=width)
        print_summary(table, console, width)


def facts(record: RunRecord) -> list[str]:
    """Return what was replayed, in sentences."""
    lines = [
        f"{count(record['requests'])} requests counted, {count(record['prompt_tokens'])} prompt tokens; largest prompt "
        f"{count(record['largest_prompt_pages'])} pages, {count(record['unique_pages'])} unique pages of "
        f"{record['page_tokens']} tokens ({size(record['page_bytes'])} each).",
        "One tier. Each request ends before the next begins; answers take no pages. LRU is exact, from one pass over the trace.",
    ]
    if "trace_note" in record:
        lines.append(f"In this trace, {record['trace_note']}.")
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


def render_curve(record: RunRecord, shared_script: str | None = None) -> str:
    """Return the curve as an HTML page, self-contained unless it is given the address of plotly.js."""
    picture = Picture("Hit rate by capacity", curve_figure(record))
    lines = [*facts(record), hit_definition(record["config"])]
    title = f"{', '.join(subject(record | {'command': 'replay'}))}: hit rate by capacity"
    return render_page(
        "plain.html", title, [picture], head=_head(record), about=about_curve(record), lines=lines, tables=tables(record),
        pictures_first=True, foot=foot(record), shared_script=shared_script,
    )  # fmt: skip


def _head(record: RunRecord) -> Head:
    """Return from which capacities on LRU has given shares of the hits of an unlimited cache."""
    most = record["unlimited"]["hit_rate"]
    if not most:
        return Head("", [])
    reached = {share: _needed(record, share * most) for share in SHARES}
    tiles = [Tile("unlimited cache", percent(most), f"of {count(record['prompt_tokens'])} prompt tokens")]
    for share, pages in reached.items():
        if pages is not None:
            tiles.append(Tile(f"LRU has {share:.0%} of that", size(pages * record["page_bytes"]), f"{count(pages)} pages"))
    pages = reached[VERDICT]
    if pages is None:
        return Head("", tiles)
    return Head(f"From {size(pages * record['page_bytes'])} on, LRU has {VERDICT:.0%} of the hits of an unlimited cache.", tiles)


def _needed(record: RunRecord, rate: float) -> int | None:
    """Return the smallest capacity of LRU's line, in pages, with at least this hit rate; None if even the largest has less."""
    line = record["line"]
    return next((pages for pages, hit in zip(line["capacity_pages"], line["hit_rate"], strict=True) if hit >= rate), None)


def curve_figure(record: RunRecord) -> Figure:
    """Draw LRU as a line over all capacities, other policies at the table's capacities, and an unlimited cache's hit rate."""
    line = record["line"]
    drawn = dict.fromkeys((p["policy"], p["sampled"]) for p in record["points"])
    names = {
        key: f"{key[0]}, sample" if key[1] else "lru, some requests rejected" if key[0] == "lru" else key[0] for key in drawn
    }
    styles = Styles(["lru", *(name for (policy, _), name in names.items() if policy != "belady")])
    first = {"type": "scatter", "mode": "lines", "x": line["capacity_pages"], "y": rounded(line["hit_rate"], 5), "name": "lru",
             "line": styles.line("lru", 2.5)}  # fmt: skip
    traces = [first]
    for (policy, sampled), name in names.items():
        points = [p for p in record["points"] if (p["policy"], p["sampled"]) == (policy, sampled)]
        if policy == "lru" and not sampled:
            points = [p for p in points if p["capacity_pages"] < line["capacity_pages"][0]]
        if points:
            is_bound = policy == "belady"
            style = {"line": {"color": GREY, "width": 1.5, "dash": "dash"}} if is_bound else {"line": styles.line(name)}
            trace = {"type": "scatter", "mode": "lines+markers", "name": name, **style}
            pages, rates = [p["capacity_pages"] for p in points], [p["hit_rate"] for p in points]
            traces.append(trace | {"x": pages, "y": rounded(rates, 5)} | ({} if is_bound else {"marker": styles.marker(name)}))
    return laid_out(
        traces, _capacity_title(record), "hit tokens / prompt tokens", ".1~%",
        x_axis=_capacity_axis(record), y_axis={"rangemode": "normal"}, height=480,
        margin={"l": 60, "r": 20, "t": 12, "b": 16}, **level(record["unlimited"]["hit_rate"], "unlimited"),
    )  # fmt: skip


def _capacity_axis(record: RunRecord) -> Trace:
    """Return a logarithmic axis with a tick at each power of ten and its double and fivefold, in pages and in bytes."""
    first, last = record["line"]["capacity_pages"][0], record["line"]["capacity_pages"][-1]
    lowest = min([first, *(p["capacity_pages"] for p in record["points"])])
    ticks = [digit * 10**power for power in range(13) for digit in (1, 2, 5) if lowest <= digit * 10**power <= last]
    page_bytes = record.get("page_bytes")  # a curve alone does not know it
    texts = [f"{count(pages)}<br>{size(pages * page_bytes)}" if page_bytes else count(pages) for pages in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": texts}


def _capacity_title(record: RunRecord) -> str:
    return f"capacity (pages of {record['page_tokens']} tokens{'; bytes of KV' if 'page_bytes' in record else ''})"


def about_curve(record: RunRecord) -> list[tuple[str, str]]:
    """Return what was replayed: model, trace and page size."""
    return [pair for pair in about_run(record | {"tiers": {}}) if pair[0] in ("model", "trace", "seed")]


def _csv(record: RunRecord) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in _rows(record):
        pages = row["capacity_pages"]
        tokens, n_bytes = pages * record["page_tokens"], pages * record["page_bytes"]
        row = {key: as_text(value) for key, value in row.items()}
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
