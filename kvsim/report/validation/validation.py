"""Compares a run in simulated time with the same run on real hardware, and checks the differences against tolerances."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kvsim.errors import UsageError
from kvsim.files.writing import FileSet
from kvsim.report.axes import log_axis, number_text, seconds_text
from kvsim.report.figure import COLOURS, GREY, Figure, Picture, laid_out, rounded
from kvsim.report.headline import Head, Tile
from kvsim.report.summary import Table
from kvsim.report.table import print_summary
from kvsim.report.template import foot, render_page
from kvsim.report.validation.recording import Recording
from kvsim.report.validation.step_table import step_table
from kvsim.results.fields import SCHEMA
from kvsim.results.rates import count, digits, percent
from kvsim.results.result import RunRecord, hit_definition, plain, to_json
from kvsim.results.tolerances import Tolerances
from kvsim.settings.earlier import with_later_settings

QUANTILES = ("p50", "p90", "p99")
MAY_DIFFER = ("substrate", "disk")
"""Settings in which two runs may differ, besides noise, which a real run has of its own, and the place of the trace's file."""
MOST_LISTED = 100


def compare(
    simulated: Recording, measured: Recording, tolerances: Tolerances, command_line: str | None, *, same_hardware: bool = True
) -> RunRecord:
    """Return the record of a validation with one real run: the content of ``validate.json``.

    Raises UsageError for runs that cannot be compared; see ``check_same``.
    """
    check_same(simulated, measured, same_hardware=same_hardware)
    both = simulated, measured
    one, other = simulated.record, measured.record
    differing = np.flatnonzero((simulated.hit_pages != measured.hit_pages).any(axis=1)) + simulated.skipped
    record = {
        "schema": SCHEMA,
        "command": "validate",
        "command_line": command_line,
        "config": one["config"],
        "choices": one["choices"],
        "versions": one["versions"],
        "seed": one["seed"],
        "device": other["hardware"]["device"],
        "requests": one["requests"],
        "hit_rate": {tier: _pair(*(tier_rate(run.record, tier) for run in both)) for tier in (*one["tiers"], "all")},
        "identical": 1.0 - len(differing) / max(1, one["requests"]),
        "different_requests": len(differing),
        "first_different_requests": differing[:MOST_LISTED],
        "ttft_s": {name: _pair(*(run.record["ttft_s"][name] for run in both)) for name in QUANTILES},
        "tpot_s": {name: _pair(*(run.record["tpot_s"][name] for run in both)) for name in QUANTILES},
        "links": {
            name: {key: _pair(*(run.record["links"].get(name, {}).get(key, 0) for run in both)) for key in ("bytes", "busy_s")}
            for name in sorted({*one["links"], *other["links"]})
        },
        "hardware": other["hardware"],
        "requests_ttft_s": [run.ttft_s[run.served] for run in both],
        "requests_tpot_s": [run.tpot_s[run.served] for run in both],
    }
    checks = _checks(record, tolerances)
    record |= {"checks": checks, "holds": all(check["holds"] for check in checks)}
    return {name: plain(value) for name, value in record.items()}


def write_validation(folder: Path, record: RunRecord, page: str) -> None:
    """Write ``validate.html`` and ``validate.json``, both or none. Raises UsageError if the folder cannot be written."""
    with FileSet(folder) as files:
        files.write("validate.html", page)
        files.write("validate.json", to_json(record))


def print_validation(record: RunRecord, console: Console) -> None:
    """Print the tables."""
    width = min(console.width, 100)
    console.print(Text("kvsim validate", "bold"))
    for line in (_scope(record), hit_definition(record["config"])):
        console.print(Text(line, "dim"), width=width)
    for table in tables(record):
        console.print()
        console.print(Text(table.title, "bold"), width=width)
        print_summary(table, console, width)


def failures(record: RunRecord) -> str:
    """Describe the checks that fail; empty if all hold."""
    return ", ".join(
        f"{check['name']} is {_number(check['measured'])} (must be {check['relation']} {_number(check['tolerance'])})"
        for check in record["checks"]
        if not check["holds"]
    )


def check_same(one: Recording, other: Recording, *, same_hardware: bool = True) -> None:
    """Raise UsageError unless two runs have the same configuration, the same requests, and the same rejected requests.

    The second may be recorded by an earlier version of kvsim: settings that it lacks count as their defaults.
    Without ``same_hardware``, the descriptions of the machine may differ, but not the number of GPUs and the sizes of tiers.
    """
    today = one.record["config"]
    earlier = with_later_settings(other.record["config"], other.record["choices"], today)
    configs = [_compared(run, config, same_hardware) for run, config in ((one, today), (other, earlier))]
    where = f" ({other.name})"
    if differing := sorted(name for name in {*configs[0], *configs[1]} if configs[0].get(name) != configs[1].get(name)):
        raise UsageError(f"the two runs differ in {', '.join(differing)}: only runs of one configuration can be compared{where}")
    if not np.array_equal(one.prompts, other.prompts):
        raise UsageError(f"the two runs have different requests ({len(one.prompts)} and {len(other.prompts)}){where}")
    if unmatched := np.flatnonzero(one.rejected != other.rejected).tolist():
        raise UsageError(f"rejected in only one of the two runs: request {unmatched[0]} and {len(unmatched) - 1} others{where}")


def _compared(run: Recording, config: Mapping[str, Any], same_hardware: bool) -> dict[str, Any]:
    """Return the settings that must be equal in two runs, and the sizes of the tiers."""
    left_out = {"hardware": ("noise",), "trace": ("path",)}
    compared: dict[str, Any] = {"tiers in pages": {name: tier["capacity_pages"] for name, tier in run.record["tiers"].items()}}
    for name, value in config.items():
        if name == "hardware" and not same_hardware:
            compared["hardware.gpus"] = value.get("gpus", 1)
        elif name not in MAY_DIFFER:
            is_group = isinstance(value, Mapping)
            compared[name] = {key: own for key, own in value.items() if key not in left_out.get(name, ())} if is_group else value
    return compared


def tier_rate(run: RunRecord, tier: str) -> float:
    """Return hit tokens per prompt token."""
    tokens = sum(run["hit_tokens"].values()) if tier == "all" else run["hit_tokens"][tier]
    return tokens / run["prompt_tokens"] if run["prompt_tokens"] else 0.0


def _pair(simulated: float | None, measured: float | None) -> dict[str, float | None]:
    """Return two values, their difference, and the difference relative to the measured value."""
    if simulated is None or measured is None:
        return {"simulated": simulated, "hardware": measured, "difference": None, "error": None}
    difference = simulated - measured
    error = difference / measured if measured else 0.0 if not difference else None
    return {"simulated": simulated, "hardware": measured, "difference": difference, "error": error}


def _checks(record: Mapping[str, Any], tolerances: Tolerances) -> list[dict[str, Any]]:
    """Return the checks, each with its name, value, tolerance, relation ("at most" or "at least"), and whether it holds.

    A value that only one run has fails its check; a time that neither run has is not checked.
    """
    checks = [_at_most(f"hit_rate {tier}", pair["difference"], tolerances.hit_rate) for tier, pair in record["hit_rate"].items()]
    identical = record["identical"]
    checks.append(
        {
            "name": "identical",
            "measured": identical,
            "relation": "at least",
            "tolerance": tolerances.identical,
            "holds": identical >= tolerances.identical,
        }
    )
    for name, link in record["links"].items():
        checks.append(_at_most(f"link_bytes {name}", link["bytes"]["error"], tolerances.link_bytes))
    for name in ("p50", "p99"):
        pair = record["ttft_s"][name]
        if pair["simulated"] is not None or pair["hardware"] is not None:
            checks.append(_at_most(f"ttft_{name}", pair["error"], getattr(tolerances, f"ttft_{name}")))
    return checks


def _at_most(name: str, error: float | None, tolerance: float) -> dict[str, Any]:
    holds = error is not None and abs(error) <= tolerance
    return {"name": name, "measured": error, "relation": "at most", "tolerance": tolerance, "holds": holds}


def _scope(record: RunRecord) -> str:
    pages, states = record["hardware"]["verified_pages"], record["hardware"].get("verified_states")
    verified = f"{count(pages)} reused pages{f' and {count(states)} states' if states else ''}"
    return f"{count(record['requests'])} requests, simulated and on {device_name(record)}; {verified} verified."


def device_name(record: RunRecord) -> str:
    """Return what the real runs ran on, with an article."""
    return "a CPU, whose kernels are interpreted" if record["device"] == "cpu" else f"an {record['device']}"


def tables(record: RunRecord) -> list[Table]:
    """Return the tables: hit rates, times, links, steps, and the checks."""
    rates: list[tuple[str, ...]] = [
        (tier, percent(pair["simulated"]), percent(pair["hardware"]), f"{100 * pair['difference']:+.2f}")
        for tier, pair in record["hit_rate"].items()
    ]
    times = [
        _row(f"{label}, {name}", pair)
        for label, key in (("time to first token", "ttft_s"), ("time per output token", "tpot_s"))
        for name, pair in record[key].items()
    ]
    moved = [
        _row(f"{name} {label}", link[key], scale)
        for name, link in record["links"].items()
        for label, scale, key in (("moved (GB)", 1e9, "bytes"), ("busy (s)", 1.0, "busy_s"))
    ]
    both = ("simulated", "hardware")
    drawn = [
        Table(f"Hit rate ({count(record['different_requests'])} requests differ)", ("tier", *both, "points"), rates),
        Table("Times in seconds", ("", *both, "error"), times),
        Table("Links", ("", *both, "error"), moved),
        step_table([record["hardware"]]),
        tolerance_table(record["checks"]),
    ]
    return [table for table in drawn if table.rows]


def _row(name: str, pair: Mapping[str, Any], scale: float = 1.0) -> tuple[str, ...]:
    values = (None if pair[key] is None else pair[key] / scale for key in ("simulated", "hardware"))
    return (name, *map(_number, values), _signed(pair["error"]))


def tolerance_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    """Return the checks with their verdicts."""
    return Table("Tolerances", ("", "measured", "required", ""), [_verdict(check) for check in checks])


def _verdict(check: Mapping[str, Any]) -> tuple[str, ...]:
    wanted = f"{check['relation']} {_number(check['tolerance'])}"
    return (check["name"], _number(check["measured"]), wanted, "holds" if check["holds"] else "FAILS")


def _number(value: float | None) -> str:
    return "-" if value is None else number_text(float(f"{value:.4g}"))


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def render_validation(record: RunRecord) -> str:
    """Return the validation as a self-contained HTML page."""
    lines = [_scope(record), hit_definition(record["config"])]
    title = f"{count(record['requests'])} requests on {device_name(record)} and simulated: {outcome(record['checks'])}"
    return render_page(
        "plain.html", title, pictures_of(record), head=_head(record), about=[], lines=lines, tables=tables(record),
        pictures_first=False,
        foot=foot(record),
    )  # fmt: skip


def pictures_of(record: RunRecord) -> list[Picture]:
    """Return the times of each request, simulated against real."""
    titles = {"requests_ttft_s": "Time to first token by request", "requests_tpot_s": "Time per output token by request"}
    return [Picture(title, scatter(*record[key])) for key, title in titles.items()]


def outcome(checks: Sequence[Mapping[str, Any]]) -> str:
    """Say whether all tolerances hold, or how many do not."""
    failed = sum(not check["holds"] for check in checks)
    return f"{failed} of {len(checks)} tolerances fail{'s' * (failed == 1)}" if failed else f"all {len(checks)} tolerances hold"


def _head(record: RunRecord) -> Head:
    """Return what fails, and how far the numbers asked for first are apart."""
    rate = record["hit_rate"]["all"]
    tiles = [
        Tile(
            "hit rate",
            f"{100 * rate['difference']:+.2f} points",
            f"{percent(rate['simulated'])} simulated, {percent(rate['hardware'])} real",
        ),
        Tile("requests with identical hits", percent(record["identical"]), f"{count(record['different_requests'])} differ"),
    ]
    for name in ("p50", "p99"):
        pair = record["ttft_s"][name]
        if pair["error"] is not None:
            both = f"{digits(pair['simulated'])} s simulated, {digits(pair['hardware'])} s real"
            tiles.append(Tile(f"TTFT {name}", _signed(pair["error"]), both))
    failed = failures(record)
    return Head(f"Outside of its tolerance: {failed}." if failed else "Everything is within its tolerance.", tiles)


def scatter(simulated: list[float | None], measured: list[float | None], where: str = "on hardware") -> Figure:
    """Draw each request's time in reality (x), ``where``, and simulated (y), in seconds, and the line where both are equal."""
    pairs = [(real, expected) for real, expected in zip(measured, simulated, strict=True) if real and expected]
    times = [time for pair in pairs for time in pair]
    ends = [min(times), max(times)] if times else [1e-3, 1.0]
    equal = {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "name": "equal", "line": {"color": GREY, "dash": "dash"}}
    requests = {
        "type": "scatter", "mode": "markers", "name": "request", "x": rounded(real for real, _ in pairs),
        "y": rounded(expected for _, expected in pairs), "marker": {"color": COLOURS[0], "size": 5, "opacity": 0.6},
    }  # fmt: skip
    axis = log_axis(ends, seconds_text)
    return laid_out([equal, requests], where, "simulated", "", x_axis=axis, y_axis=axis, height=460, hovermode="closest")
