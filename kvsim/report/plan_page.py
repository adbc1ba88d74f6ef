"""Presents which configuration to buy: a table by price, pictures of what a price brings, and how to start the winner."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kvsim.files.writing import FileSet
from kvsim.report.about import about_run, degrees
from kvsim.report.axes import log_axis, seconds_text
from kvsim.report.comparison.pareto import optimal
from kvsim.report.figure import GREY, Figure, Picture, across, laid_out
from kvsim.report.headline import Head, Tile
from kvsim.report.summary import Table, objective_of_share, objective_text
from kvsim.report.template import SHARED_SCRIPT, foot, render_page
from kvsim.report.terminal import print_table, width_of
from kvsim.results.cells import as_text
from kvsim.results.rates import digits, percent, size
from kvsim.results.result import RunRecord, to_json

HOLDS, UNTRIED, REFUSED = "holds", "dearer", "cannot run"
LOOKS = {True: ("holds", "#0a9e74", "circle"), False: ("does not hold", "#d55e00", "x")}
"""By whether a configuration holds: its name in the legend, colour and symbol."""
RING = {"color": "#0a9e74", "size": 18, "symbol": "circle-open", "line": {"width": 2}}


def write_plan(folder: Path, record: RunRecord) -> None:
    """Write ``plan.csv``, ``plan.html`` and ``plan.json``, all or none."""
    with FileSet(folder) as files:
        files.write("plan.csv", _csv(record))
        files.write("plan.html", render_plan(record))
        files.write("plan.json", to_json(record))


def print_plan(record: RunRecord, console: Console) -> None:
    """Print what was asked, the table, the answer, and how to start the winner."""
    width = width_of(console)
    console.print(Text("kvsim plan", "bold"))
    console.print(Text(question(record), "dim"), width=min(width, 100))
    console.print()
    table = candidate_table(record, is_short=True)
    last = len(table.columns) - 1
    print_table(console, table.columns, table.rows, min(width, 120), words=(last,), left=(*_words(table), last), drop=())
    console.print()
    console.print(Text(answer(record)), width=min(width, 100))
    for note in (*refused(record), *record["notes"]):
        console.print(Text(note, "dim"), width=min(width, 100))
    for title, text, note in start_texts(record):
        console.print(Text(f"\n{title}", "bold"))
        console.print(Text(text), soft_wrap=True)
        if note:
            console.print(Text(f"Note: {note}", "dim"), width=min(width, 100))


def question(record: RunRecord) -> str:
    """Say what was searched for."""
    slo = record["slo"]
    return (
        f"The cheapest configuration with which {percent(slo['attainment'])} of the requests have {objective_text(slo)}. "
        f"Prices are yours, {record['price_unit']}."
    )


def answer(record: RunRecord) -> str:
    """Say which configuration is the cheapest one that holds: at one price the one with the fewest GPUs, the least memory, then
    the best attainment."""
    if record["cheapest"] is None:
        return "No configuration holds."
    best = record["candidates"][record["cheapest"]]
    price = f"{best['price']:,.2f} {record['price_unit']}"
    return f"Number {record['cheapest']} is the cheapest that holds, at {price}: {hardware_text(best)}."


def candidate_table(record: RunRecord, *, is_short: bool = False) -> Table:
    """Return a row for each configuration that was looked at, by price.

    ``is_short``: without those that cannot run, and with reasons up to the first semicolon.
    """
    hidden = (UNTRIED, REFUSED) if is_short else (UNTRIED,)
    tried = [(at, one) for at, one in enumerate(record["candidates"]) if one["outcome"] not in hidden]
    own = [{"cpu_bytes": memory_text(one), "drive": one["drive"], "policy": one["policy"]} for _, one in tried]
    varied = [name for name in OPTIONAL if len({texts[name] for texts in own}) > 1]
    columns = ["number", "price", "GPUs", "engines", *(OPTIONAL[name] for name in varied)]
    times = {"TTFT p99 (s)": "ttft_s_p99"} | ({"TPOT p99 (s)": "tpot_s_p99"} if record["slo"]["tpot_s"] is not None else {})
    columns += ["attainment", *times, "outcome"]
    rows = []
    for (at, one), texts in zip(tried, own, strict=True):
        reason = one["reason"].split("; ")[0] if is_short else one["reason"]
        outcome = ": ".join(filter(None, (one["outcome"], reason)))
        cells = [str(at), f"{one['price']:,.2f}", f"{one['engines'] * one['gpus_per_engine']}x {one['gpu']}"]
        cells += [f"{one['engines']} x {degrees(one, one['gpus_per_engine'])}", *(texts[name] for name in varied)]
        rows.append((*cells, percent(one["attainment"]), *(digits(one[key]) for key in times.values()), outcome))
    return Table("Configurations by price", tuple(columns), rows)


OPTIONAL = {"cpu_bytes": "CPU memory", "drive": "drive", "policy": "policy"}
"""Columns that are shown where configurations differ in them."""


def refused(record: RunRecord) -> list[str]:
    """Say which configurations cannot run, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for at, one in enumerate(record["candidates"]):
        if one["outcome"] == REFUSED:
            reasons.setdefault(one["reason"], []).append(str(at))
    return [f"cannot run: {len(places)} ({', '.join(places)}): {reason}" for reason, places in reasons.items()]


def start_texts(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield a title, a text to copy and a note: the command that simulates the winner, and for each server how to start it."""
    if record["cheapest"] is None:
        return
    if record["simulate"] is not None:
        yield "Simulate it", record["simulate"], ""
    engines = record["candidates"][record["cheapest"]]["engines"]
    times = (
        f", {engines} times, each with GPUs and a port of its own, behind a router (the simulation had {record['routing']})"
        if engines > 1
        else ""
    )
    for one in record["start"]:
        files = [f"# {name}\n{text}" for name, text in one["files"].items()]
        yield f"Start it on {one['server']}{times}", "\n\n".join([one["command"], *files]), ". ".join(one["notes"])


def _words(table: Table) -> Sequence[int]:
    texts = ("number", "GPUs", "engines", "drive", "policy")
    return [at for at, name in enumerate(table.columns) if name in texts]


def hardware_text(one: Mapping[str, Any]) -> str:
    """Return a configuration in a few words."""
    gpus = one["gpus_per_engine"]
    parts = [f"{one['engines'] * gpus}x {one['gpu']} ({one['engines']} x {degrees(one, gpus)})"]
    parts += [f"{memory_text(one)} of CPU memory"] if one["cpu_bytes"] else []
    parts += [f"drive {one['drive']}"] if one["drive"] != "none" else []
    return ", ".join([*parts, *([one["policy"]] if one["policy"] else [])])


def memory_text(one: Mapping[str, Any]) -> str:
    """Return the CPU memory for KV of a host, and of how many copies that is, such as ``8 x 128 GiB``."""
    if not one["cpu_bytes"]:
        return "0"
    copies = one.get("cpu_copies", 1)
    return size(one["cpu_bytes"]) if copies == 1 else f"{copies} x {size(one['cpu_bytes'])}"


def render_plan(record: RunRecord) -> str:
    """Return the page, which loads plotly.js from its folder, as the pages of the runs do from there."""
    return render_page(
        "plan.html", _title(record), pictures_of(record), head=_head(record), about=_about(record), lines=record["notes"],
        tables=[candidate_table(record)], starts=list(start_texts(record)), foot=foot(record), shared_script=SHARED_SCRIPT,
    )  # fmt: skip


def pictures_of(record: RunRecord) -> list[Picture]:
    """Return what a price brings: attainment, and times to first token."""
    target, limit_s = record["slo"]["attainment"], record["slo"]["ttft_s"]
    return [
        Picture(
            "Price and attainment", _figure(record, "attainment", "requests that meet the objectives", target, -1, "objective")
        ),
        Picture(
            "Price and time to first token",
            _figure(record, "ttft_s_p99", "99th percentile", limit_s, 1, objective_of_share(target, 0.99)),
        ),
    ]


def _title(record: RunRecord) -> str:
    asked = f"{percent(record['slo']['attainment'])} with {objective_text(record['slo'])}"
    if record["cheapest"] is None:
        return f"{asked}: no configuration holds"
    best = record["candidates"][record["cheapest"]]
    return f"{asked}: {hardware_text(best)} at {best['price']:,.2f} {record['price_unit']}"


def _head(record: RunRecord) -> Head:
    """Return the answer, and the numbers of the winner or, if there is none, of the best that was tried."""
    tried = [one for one in record["candidates"] if one["attainment"] is not None]
    if record["cheapest"] is not None:
        best = record["candidates"][record["cheapest"]]
    elif tried:
        best = max(tried, key=lambda one: one["attainment"])
    else:
        return Head(answer(record), [])
    holds = "the cheapest that holds" if record["cheapest"] is not None else "the best attainment that was tried"
    asked = f"asked for {percent(record['slo']['attainment'])}"
    currency, _, period = f" {record['price_unit']}".rpartition(" per ")
    slowest = f"TPOT p99 {digits(best['tpot_s_p99'])} s" if best["tpot_s_p99"] is not None else ""
    return Head(
        answer(record),
        [
            Tile("price", f"{best['price']:,.2f}{currency}", f"per {period}, {holds}"),
            Tile("meet the objectives", percent(best["attainment"]), asked),
            Tile("TTFT p99", f"{digits(best['ttft_s_p99'])} s", slowest),
            Tile("GPUs", f"{best['engines'] * best['gpus_per_engine']}x {best['gpu']}", f"{len(tried)} configurations simulated"),
        ],
    )


def _about(record: RunRecord) -> list[tuple[str, str]]:
    """Return what was asked, and of which trace and model."""
    shared = [(name, text) for name, text in about_run(record | {"tiers": {}}) if name in ("model", "trace", "seed")]
    return [("question", question(record)), *shared]


def _figure(record: RunRecord, key: str, title: str, limit: float | None, sign: int, objective: str) -> Figure | None:
    """Draw a number against the price, and a line through the configurations that none beats; None without any.

    ``sign`` is 1 if less is better, and -1 if more is. ``objective`` names the line at the limit.
    """
    points = [(at, one) for at, one in enumerate(record["candidates"]) if one[key] is not None]
    if not points:
        return None
    best = optimal(np.array([(one["price"], sign * one[key]) for _, one in points]))
    front = sorted((one["price"], one[key]) for (_, one), is_best in zip(points, best, strict=True) if is_best)
    line = {
        "type": "scatter", "mode": "lines", "name": "Pareto set", "x": [price for price, _ in front], "y": [y for _, y in front],
        "line": {"color": GREY, "dash": "dot", "shape": "hv"}, "hoverinfo": "skip",
    }  # fmt: skip
    winner = [(at, one) for at, one in points if at == record["cheapest"]]
    ring = _marks(winner, key, True) | {"name": "the cheapest that holds", "marker": RING}
    traces = [line, *(_marks(points, key, holds) for holds in LOOKS), ring]
    times = [*(one[key] for _, one in points), *([limit] if limit else [])] if sign > 0 else []
    y_axis = log_axis(times, seconds_text) if times and min(times) > 0 else {}
    return laid_out(
        [trace for trace in traces if trace["x"]], f"price ({record['price_unit']})", title, ".0%" if sign < 0 else "",
        x_axis={"rangemode": "tozero"}, y_axis=y_axis, hovermode="closest", showlegend=True,
        **across(limit, objective, is_log=bool(y_axis), is_below=sign < 0),
    )  # fmt: skip


def _marks(points: Sequence[tuple[int, Mapping[str, Any]]], key: str, holds: bool) -> dict[str, Any]:
    name, colour, symbol = LOOKS[holds]
    shown = [(at, one) for at, one in points if (one["outcome"] == HOLDS) is holds]
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [one["price"] for _, one in shown],
        "y": [one[key] for _, one in shown], "text": [f"{at}: {hardware_text(one)}" for at, one in shown],
        "marker": {"color": colour, "size": 10, "symbol": symbol},
    }  # fmt: skip


def _csv(record: RunRecord) -> str:
    """Return a row for each configuration."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = list(record["candidates"][0])
    writer.writerow(["number", *columns])
    for at, one in enumerate(record["candidates"]):
        writer.writerow(map(as_text, [at, *(one[column] for column in columns)]))
    return text.getvalue()
