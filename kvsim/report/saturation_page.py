"""Presents the highest rates at which configurations meet their objectives: a table, a picture, and the files of the folder."""

import csv
import io
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvsim.files.writing import FileSet
from kvsim.report.about import about_run, common
from kvsim.report.axes import log_axis, seconds_text
from kvsim.report.comparison.differing import differing, heading, settings_of
from kvsim.report.figure import Figure, Picture, Styles, across, laid_out
from kvsim.report.headline import Head, Tile, subject
from kvsim.report.summary import Table, objective_of_share, objective_text
from kvsim.report.table import print_summary
from kvsim.report.template import SHARED_SCRIPT, foot, render_page
from kvsim.report.terminal import width_of
from kvsim.results.cells import as_text
from kvsim.results.rates import UNKNOWN, count, digits, percent
from kvsim.results.records import Damaged, read_saturation
from kvsim.results.result import RunRecord, to_json
from kvsim.results.runs import Run

RUN_COLUMNS = (
    "rate", "requests_per_s", "attainment", "goodput_requests_per_s", "ttft_s_p99", "tpot_s_p99", "hit_rate", "rejected",
    "shed", "folder",
)  # fmt: skip
NUMBERED = re.compile(r"-?\d")
"""Values that mean nothing without their setting."""
WANTED = "saturate.rate"
HOLDS = {True: "yes", False: "no", None: ""}
"""Whether a wanted rate is held; None without one."""
Named = tuple[str, RunRecord]
"""The name of a job and its ``saturate.json``."""


def write_saturation(
    folder: Path, records: Sequence[Named], *, command_line: str | None = None, notes: Sequence[str] = ()
) -> None:
    """Write ``saturate.csv``, ``saturate.html`` and ``saturate.json``, all or none.

    With the ``command_line`` of a sweep, ``saturate.json`` is left to the folder of each configuration.
    """
    with FileSet(folder) as files:
        files.write("saturate.csv", _csv(records))
        files.write("saturate.html", render_saturation(records, command_line, notes))
        if command_line is None:
            files.write("saturate.json", to_json(records[0][1]))


def read_saturations(folder: Path) -> tuple[list[Named], list[Run]]:
    """Read the jobs of a sweep that have finished, in order of their numbers, and name those whose files are damaged."""
    records: list[Named] = []
    damaged = []
    for path in sorted(folder.glob("*/saturate.json"), key=lambda path: (len(path.parent.name), path.parent.name)):
        job = path.parent
        try:
            records.append((job.name, read_saturation(job)))
        except Damaged as error:
            damaged.append(Run(name=job.name, folder=job, error=str(error)))
    return records, damaged


def print_saturation(records: Sequence[Named], console: Console) -> None:
    """Print what was asked, the table, and the notes of each configuration."""
    width = width_of(console)
    console.print(Text("kvsim saturate", "bold"))
    console.print(Text(question(records), "dim"), width=min(width, 100))
    for table in tables(records):
        console.print()
        print_summary(table, console, width)
        if table.note:
            console.print(Text(table.note, "dim"), width=min(width, 100))
    for name, record in records:
        for note in record["notes"]:
            console.print(Text(f"{f'{name}: ' if len(records) > 1 else ''}{note}", "dim"), width=min(width, 100))


def question(records: Sequence[Named]) -> str:
    """Say what was searched for."""
    shared = _objectives(records)
    asked = f"{shared[0]} of the requests have {shared[1]}" if shared else "requests meet the objectives of their configuration"
    return f"The highest rate at which {asked}. A rate divides the arrival times of the trace; requests/s are arrivals."


def _objectives(records: Sequence[Named]) -> tuple[str, str] | None:
    """Return the share of requests and the objectives that they must meet; None if configurations ask for different ones."""
    asked = {
        (percent(record["slo"]["attainment"]), objective_text(record["slo"]) or "those of their class") for _, record in records
    }
    return asked.pop() if len(asked) == 1 else None


def _limit(records: Sequence[Named], name: str) -> float | None:
    """Return an objective, or the share that must meet them; None if there is none, or configurations have different ones."""
    limits = {record["slo"][name] for _, record in records}
    return limits.pop() if len(limits) == 1 else None


def tables(records: Sequence[Named]) -> list[Table]:
    """Return the table of configurations, best first, and that of the runs if there is one configuration."""
    found = [_configurations(records)]
    if len(records) == 1:
        found.append(_runs(records[0][1]))
    return found


def _configurations(records: Sequence[Named]) -> Table:
    """Return a row for each configuration: for each wanted rate, those that hold it first, then by price; otherwise by rate.

    Without a wanted rate, prices are left out where each GPU costs 1 and nothing else does, as by default.
    """
    keys, settings = _settings(records)
    is_wanted = any(record["wanted_rate"] is not None for _, record in records)
    order = sorted(range(len(records)), key=lambda place: _merit(records[place][1]))
    columns = ["job", *map(heading, keys), "rate", "fails at", "requests/s", "TTFT p99 (s)", "GPUs"]
    has_prices = is_wanted or any(record["price_per_hour"] != record["gpus"] for _, record in records)
    columns += ["price/h"] if has_prices else []
    columns += ["holds"] if is_wanted else []
    rows = []
    for place in order:
        name, record = records[place]
        best = record["highest"] or {}
        cells = [_rate(record["rate"]), _rate(record["fails_at"]), digits(best.get("requests_per_s"))]
        cells += [digits(best.get("ttft_s_p99")), count(record["gpus"])]
        cells += [digits(record["price_per_hour"])] if has_prices else []
        cells += [HOLDS[record["holds_wanted_rate"]]] if is_wanted else []
        rows.append((name, *(settings[place].get(key, "") for key in keys), *cells))
    return Table("Highest rates", tuple(columns), rows, _cheapest(records, order))


def _merit(record: RunRecord) -> tuple[float, ...]:
    """Return a key by which the best configuration comes first."""
    price = float("inf") if record["price_per_hour"] is None else record["price_per_hour"]
    n_bytes = sum(float("inf") if size is None else size for size in record["capacity_bytes"].values())
    rate, wanted = -(record["rate"] or 0.0), record["wanted_rate"]
    return (inf, rate, price, n_bytes) if wanted is None else (wanted, not record["holds_wanted_rate"], price, n_bytes, rate)


def _cheapest(records: Sequence[Named], order: Sequence[int]) -> str:
    """Say which configuration holds each wanted rate at the lowest price, and with the least memory at that price; of each of
    several objectives, if configurations have different ones."""
    first: dict[tuple[float, float, str], Named] = {}
    is_shared = _objectives(records) is not None
    for place in order if len(records) > 1 else ():
        record = records[place][1]
        share, wanted = record["slo"]["attainment"], record["wanted_rate"]
        if wanted is not None:
            first.setdefault((wanted, share, "" if is_shared else _demand(record)), records[place])
    found = [_holding(f"{wanted:g}{demand}", *one) for (wanted, _, demand), one in first.items()]
    if not any(record["holds_wanted_rate"] for _, record in first.values()):
        return " ".join(f"{line}." for line in found)
    if len(found) == 1:
        return f"{found[0]}; of those with the same price, it has the least memory."
    return f"{'. '.join(found)}. Of those with the same price, the one with the least memory is named."


def _holding(wanted: str, name: str, record: RunRecord) -> str:
    if not record["holds_wanted_rate"]:
        return f"No configuration holds a rate of {wanted}"
    price = digits(record["price_per_hour"])
    return f"The cheapest configuration that holds a rate of {wanted} is job {name}, at {price} per hour"


def _demand(record: RunRecord) -> str:
    """Return whose objectives a configuration must meet, and which."""
    slo = record["slo"]
    return f" with {objective_text(slo) or 'the objectives of their class'} for {percent(slo['attainment'])} of the requests"


def _settings(records: Sequence[Named]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the keys in which configurations differ, what they must hold among them, and all settings of each."""
    settings = [settings_of(record) | _asked(record) for _, record in records]
    wanted = {record["wanted_rate"] for _, record in records}
    return differing(settings, {WANTED} if len(wanted) > 1 else set()), settings


def _asked(record: RunRecord) -> dict[str, str]:
    """Return the rate that a configuration must hold, if one is asked for, and for which share of the requests, as settings."""
    wanted = record["wanted_rate"]
    asked = {} if wanted is None else {WANTED: f"{wanted:g}"}
    return asked | {"saturate.attainment": str(record["slo"]["attainment"])}


def _rate(rate: float | None) -> str:
    return UNKNOWN if rate is None else f"{rate:.4g}"


def _runs(record: RunRecord) -> Table:
    unserved = [name for name in ("rejected", "shed") if any(run.get(name) for run in record["runs"])]
    columns = ("rate", "requests/s", "attainment", "goodput (requests/s)", "TTFT p99 (s)", "TPOT p99 (s)", "hit rate", *unserved)
    rows: list[tuple[str, ...]] = [
        (
            _rate(run["rate"]),
            digits(run["requests_per_s"]),
            percent(run["attainment"]),
            digits(run["goodput_requests_per_s"]),
            digits(run["ttft_s_p99"]),
            digits(run["tpot_s_p99"]),
            percent(run["hit_rate"]),
            *[count(run.get(name, 0)) for name in unserved],
        )
        for run in record["runs"]
    ]
    return Table("Runs", columns, rows)


def render_saturation(records: Sequence[Named], command_line: str | None = None, more: Sequence[str] = ()) -> str:
    """Return the page, which loads plotly.js from its folder, as the pages of the runs do from there."""
    reproduced = records[0][1] | ({} if command_line is None else {"command_line": command_line})
    return render_page(
        "plain.html", _title(records), pictures_of(records), head=_head(records), about=_about(records),
        lines=[*_notes(records), *more], tables=tables(records), pictures_first=True, foot=foot(reproduced),
        shared_script=SHARED_SCRIPT,
    )  # fmt: skip


def pictures_of(records: Sequence[Named]) -> list[Picture]:
    """Return attainment and times to first token against the rate."""
    share = _limit(records, "attainment")
    attained = _figure(records, "attainment", "requests that meet the objectives", ".0%", share, "objective")
    of_share = objective_of_share(share, 0.99)
    times = _figure(records, "ttft_s_p99", "99th percentile", "~g", _limit(records, "ttft_s"), of_share)
    return [Picture("Attainment by rate", attained), Picture("Time to first token by rate", times)]


def _title(records: Sequence[Named]) -> str:
    subjects = [subject(record) for _, record in records]
    shared = ", ".join(part for part in subjects[0] if all(part in other for other in subjects))
    objectives = _objectives(records)
    asked = f"{objectives[0]} have {objectives[1]}" if objectives else "objectives hold, which differ"
    return f"{shared or 'kvsim saturate'}: the highest rate at which {asked}"


def _head(records: Sequence[Named]) -> Head:
    """Return what the search found: the best configuration, or that none holds."""
    order = sorted(range(len(records)), key=lambda place: _merit(records[place][1]))
    verdict = _cheapest(records, order)
    name, record = records[order[0]]
    best, rate = record["highest"], _rate(record["rate"])
    if best is None:
        attained = max(run["attainment"] for _, each in records for run in each["runs"])
        limit = _limit(records, "attainment")
        asked = "of the requests" if limit is None else f"of the requests; asked for {percent(limit)}"
        return Head(
            verdict or "No rate that was tried meets the objectives.", [Tile("best attainment", percent(attained), asked)]
        )
    if not verdict:
        verdict = f"The objectives hold up to a rate of {rate}, which is {digits(best['requests_per_s'])} requests/s."
    fails = f"{f'job {name}, ' if len(records) > 1 else ''}fails at {_rate(record['fails_at'])}"
    return Head(
        verdict,
        [
            Tile("highest rate", rate, fails),
            Tile("hit rate there", percent(best["hit_rate"])),
            Tile("TTFT p99 there", f"{digits(best['ttft_s_p99'])} s", f"TPOT p99 {digits(best['tpot_s_p99'])} s"),
            Tile(
                "goodput there",
                f"{digits(best['goodput_requests_per_s'])} requests/s",
                f"{count(record['gpus'])} GPU{'s' * (record['gpus'] != 1)}",
            ),
        ],
    )


def _about(records: Sequence[Named]) -> list[tuple[str, str]]:
    """Return what was asked, and what all configurations share."""
    keys, _ = _settings(records)
    shared = common([about_run(record) for _, record in records])
    varied = [("differ in", ", ".join(map(heading, keys)))] if keys else []
    return [("question", question(records)), *shared, *varied]


def _notes(records: Sequence[Named]) -> list[str]:
    """Return the notes, each once, with the names of the configurations that have it."""
    names: dict[str, list[str]] = {}
    for name, record in records:
        for note in record["notes"]:
            names.setdefault(note, []).append(name)
    return [note if len(records) == 1 else f"{', '.join(named)}: {note}" for note, named in names.items()]


def _figure(records: Sequence[Named], key: str, title: str, y_format: str, limit: float | None, objective: str) -> Figure:
    """Draw a number of the runs against the load, a line for each configuration, and its limit, named ``objective``."""
    keys, settings = _settings(records)
    names = [
        " ".join(_named(key, settings[place].get(key, "")) for key in keys) or name for place, (name, _) in enumerate(records)
    ]
    styles = Styles(names)
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [run["rate"] for run in record["runs"]],
            "y": [run[key] for run in record["runs"]],
            "text": [f"{digits(run['requests_per_s'])} requests/s" for run in record["runs"]],
            "line": styles.line(name),
            "marker": styles.marker(name),
        }
        for name, (_, record) in zip(names, records, strict=True)
    ]
    rates, heights = ([run[name] for _, record in records for run in record["runs"]] for name in ("rate", key))
    times = [height for height in (*heights, limit) if height] if key.endswith("_p99") else []
    y_axis = log_axis(times, seconds_text) if times else {}
    return laid_out(
        traces, "rate", title, y_format, x_axis=log_axis(rates), y_axis=y_axis, **across(limit, objective, is_log=bool(y_axis))
    )


def _named(key: str, value: str) -> str:
    """Return a setting for a legend: ``cluster engines 4``; a choice by its name alone."""
    return f"{heading(key)} {value}" if NUMBERED.match(value) else value


def _csv(records: Sequence[Named]) -> str:
    """Return a row for each run."""
    keys, settings = _settings(records)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *keys, *RUN_COLUMNS, "is_highest", "gpus", "price_per_hour"])
    for place, (name, record) in enumerate(records):
        chosen = [settings[place].get(key, "") for key in keys]
        for run in record["runs"]:
            is_highest = str(run["rate"] == record["rate"]).lower()
            numbers = [run.get(column, "") for column in RUN_COLUMNS]  # earlier versions did not record what was shed
            writer.writerow([*map(as_text, [name, *chosen]), *numbers, is_highest, record["gpus"], record["price_per_hour"]])
    return text.getvalue()
