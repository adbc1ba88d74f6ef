"""Shows a validation against a server: tables on the terminal, and a page with tables and pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvsim.report.figure import COLOURS, GREY, Figure, Picture, laid_out
from kvsim.report.headline import Head, Tile
from kvsim.report.pictures import line, places
from kvsim.report.summary import Table
from kvsim.report.table import print_summary
from kvsim.report.template import foot, render_page
from kvsim.report.validation.validation import failures, outcome, scatter, tolerance_table
from kvsim.results.rates import UNKNOWN, count, digits, percent
from kvsim.results.result import RunRecord, hit_definition

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "openai": "a server with OpenAI's interface"}
LABELS = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end latency"}
RATES = {"requests_per_s": "requests per second", "output_tokens_per_s": "output tokens per second"}
REAL, SIMULATED, GIVEN = "server", "simulated", "server's order"


def print_server(record: RunRecord, console: Console) -> None:
    """Print the tables."""
    width = min(console.width, 100)
    console.print(Text("kvsim validate", "bold"))
    for text in lines(record):
        console.print(Text(text, "dim"), width=width)
    for table in tables(record):
        console.print()
        console.print(Text(table.title, "bold"), width=width)
        print_summary(table, console, width)


def lines(record: RunRecord) -> list[str]:
    """Return what was run, and what must be known of it."""
    runs, simulations = record["runs"], record["simulations"]
    failed = sum(run["failed"] for run in runs)
    rejected = record["rejected"]
    many = "1 simulation" if simulations == 1 else f"{simulations} simulations"
    real = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    first = f"{count(record['requests'])} requests: {real} on {server_name(record)}, {many}."
    left_out = [
        f"Failed on the server: {count(failed)}." if failed else "",
        f"Rejected by the simulation: {count(rejected)}." if rejected else "",
        f"Compared: {count(record['compared'])}." if record["compared"] < record["requests"] else "",
    ]
    notes = dict.fromkeys(note for run in runs for note in run["notes"])
    preemptions = [run["preemptions"] for run in runs]
    if any(preemptions):
        many = ", ".join(map(count, preemptions))
        notes[f"Preemptions: {many}. In the server's order, they are played as answers show them (not SGLang's with a host)."] = (
            None
        )
    return [" ".join(filter(None, (first, *left_out))), *record["notes"], *notes, hit_definition(record["config"])]


def server_name(record: RunRecord) -> str:
    """Return what the real runs ran on."""
    facts = record["server"]
    if facts is None:
        return "a server (" + ", ".join(dict.fromkeys(run["client"] for run in record["runs"])) + ")"
    version = f" {facts['version']}" if facts["version"] else ""
    return f"{ENGINES.get(facts['engine'], facts['engine'])}{version}"


# --- tables --------------------------------------------------------------------------------------------------------------


def tables(record: RunRecord) -> list[Table]:
    """Return the tables: hits, cached tokens by medium, times, and the checks."""
    drawn = [hit_table(record), medium_table(record), time_table(record), check_table(record["checks"])]
    return [table for table in drawn if table.rows]


def hit_table(record: RunRecord) -> Table:
    """Return how hits differ, given the server's order and by simulation."""
    rows: list[tuple[str, ...]] = []
    if (given := record["given_order"]) is not None:
        differ = f"{', '.join(map(count, given['differing']))} of {count(max(given['compared']))}"
        rows.append((GIVEN, differ, *_rates(given["hit_rate"]), _real_hits(given)))
    if (simulated := record["simulated_order"]) is not None:
        rows.append((SIMULATED, _requests(simulated["differing"]), *_rates(simulated["hit_rate"]), _real_hits(simulated)))
    return Table("Hit rate", ("", "differ", "kvsim", REAL, "points", "real to real"), rows)


def _rates(pair: Mapping[str, Any]) -> tuple[str, str, str]:
    simulated, real = pair["means"]
    return percent(simulated), percent(real), _signed(100 * pair["difference"], 2)


def _signed(value: float, decimals: int, unit: str = "") -> str:
    """Format a difference; one that rounds to 0 has no sign of its own."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}{unit}"


def _requests(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:,.1f}".removesuffix(".0")


def _real_hits(score: Mapping[str, Any]) -> str:
    """Return how far real runs are apart."""
    spread = score["hit_rate"]["spread"]
    if spread is None:
        return UNKNOWN
    between = score["between_real"]
    requests = "" if between is None else f"{_requests(between)} differ, "
    return f"{requests}{100 * spread:.2f} points"


def medium_table(record: RunRecord) -> Table:
    """Return where cached tokens came from."""
    rows = [(medium, *(count(round(mean)) for mean in pair["means"]), *_errors(pair)) for medium, pair in record["media"].items()]
    return Table("Cached tokens by medium", ("", SIMULATED, REAL, "error", "real to real"), rows)


def time_table(record: RunRecord) -> Table:
    """Return times and throughput."""
    rows = []
    for name, pair in record["times"].items():
        scale, label = (1.0, RATES[name]) if name in RATES else (1000.0, time_label(name))
        rows.append((label, *(digits(mean * scale) for mean in pair["means"]), *_errors(pair)))
    note = "Real to real: largest less smallest run, relative to their mean."
    return Table("Times and throughput", ("", SIMULATED, REAL, "error", "real to real"), rows, note)


def time_label(name: str) -> str:
    """Return ``ttft_p50`` in words, with the unit."""
    time, statistic = name.split("_")
    return f"{LABELS[time]}, {statistic} (ms)"


def _errors(pair: Mapping[str, Any]) -> tuple[str, str]:
    error, spread = pair["error"], pair["relative_spread"]
    return UNKNOWN if error is None else _signed(100 * error, 1, "%"), UNKNOWN if spread is None else f"{spread:.1%}"


def check_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    """Return the checks; those that hold only because real runs differ as much say so."""
    table = tolerance_table(checks)
    rows = [
        (*row[:-1], "within the real runs") if check["holds"] and not check["is_small"] else row
        for row, check in zip(table.rows, checks, strict=True)
    ]
    return table._replace(rows=rows)


# --- the page ------------------------------------------------------------------------------------------------------------


def render_server(record: RunRecord) -> str:
    """Return the validation as a self-contained HTML page."""
    title = f"{count(record['requests'])} requests on {server_name(record)} and simulated: {outcome(record['checks'])}"
    return render_page(
        "plain.html", title, pictures(record), head=_head(record), about=about(record), lines=lines(record),
        tables=tables(record), pictures_first=False, foot=foot(record),
    )  # fmt: skip


def _head(record: RunRecord) -> Head:
    """Return what fails, and how far the numbers asked for first are apart."""
    tiles = []
    for key, name in (("given_order", "hit rate, server's order"), ("simulated_order", "hit rate, simulated")):
        if (found := record[key]) is not None:
            simulated, real, points = _rates(found["hit_rate"])
            tiles.append(Tile(name, f"{points} points", f"{simulated} kvsim, {real} server"))
    for name in ("ttft_p50", "ttft_p99"):
        pair = record["times"].get(name)
        if pair is not None:
            simulated, real = (digits(1000 * mean) for mean in pair["means"])
            error, spread = _errors(pair)
            tiles.append(Tile(f"TTFT {name[5:]}", error, f"{simulated} ms simulated, {real} ms real; real to real {spread}"))
    failed = failures(record)
    return Head(f"Outside of its tolerance: {failed}." if failed else "Everything is within its tolerance.", tiles)


def about(record: RunRecord) -> list[tuple[str, str]]:
    """Return pairs of a name and a text: the server and what it says of itself."""
    facts = record["server"] or {}
    tokens = {"GPU memory for KV": "capacity_tokens", "host memory for KV": "host_capacity_tokens", "page": "page_tokens"}
    pairs = [
        ("server", ", ".join(dict.fromkeys(run["source"] for run in record["runs"]))),
        ("engine", server_name(record)),
        ("model", facts.get("model") or ""),
        *((name, f"{facts[key]:,} tokens" if facts.get(key) else "") for name, key in tokens.items()),
        ("simulated as", _simulated_as(record["choices"])),
    ]
    return [(name, text) for name, text in pairs if text]


def _simulated_as(choices: Mapping[str, Any]) -> str:
    preset = f"preset {choices['preset']}, " if choices.get("preset") else ""
    return f"{preset}{choices.get('model')} on {choices.get('hardware')}"


def pictures(record: RunRecord) -> list[Picture]:
    """Return the pictures; those without data are left out."""
    drawn = [
        Picture("Cached tokens by request", cached_figure(record["requests_cached"]), "Of the first real run."),
        Picture(
            "Time to first token by request",
            scatter(record["requests_ttft_s"][0], record["requests_ttft_s"][1], "on the server"),
            "Each request at the median of its times over all runs.",
        ),
        Picture("Cached tokens by medium", media_figure(record["media"])),
        Picture("Hit rate over time", over_time_figure(record["hits_over_time"]), "By the time at which requests were sent."),
    ]
    return [picture for picture in drawn if picture.figure is not None]


def cached_figure(cached: Mapping[str, Any] | None) -> Figure | None:
    """Draw each request's cached tokens on the server (x) and in kvsim (y), and the line where both are equal."""
    if cached is None:
        return None
    ends = [0, max(*cached["real"], *cached["simulated"], *cached["given_order"], 1)] if cached["real"] else [0, 1]
    equal = {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "name": "equal", "line": {"color": GREY, "dash": "dash"}}
    points = [
        {
            "type": "scatter", "mode": "markers", "name": name, "x": cached["real"], "y": cached[key],
            "text": [f"request {number}" for number in cached["request"]],
            "marker": {"color": colour, "size": size, "opacity": 0.6, "symbol": symbol},
        }
        for key, name, colour, size, symbol in (
            ("simulated", SIMULATED, COLOURS[0], 7, "circle-open"), ("given_order", GIVEN, COLOURS[2], 5, "circle"),
        )
    ]  # fmt: skip
    return laid_out([equal, *points], "on the server (tokens)", "kvsim (tokens)", "", height=460, hovermode="closest")


def media_figure(media: Mapping[str, Any]) -> Figure | None:
    """Draw cached tokens by medium: simulated, and of each real run."""
    if not media:
        return None
    runs = max(len(pair["real"]) for pair in media.values())
    sides = [(SIMULATED, "simulated", 0, COLOURS[0])]
    sides += [(f"real run {number + 1}", "real", number, COLOURS[1]) for number in range(runs)]
    bars = [
        {
            "type": "bar", "name": name, "x": list(media), "y": [pair[key][number] for pair in media.values()],
            "marker": {"color": colour, "opacity": 1.0 if key == "simulated" else 0.75, "line": {"color": "#fff", "width": 1}},
        }
        for name, key, number, colour in sides
    ]  # fmt: skip
    return laid_out(bars, "", "tokens", "", barmode="group")


def over_time_figure(hits: Mapping[str, Any] | None) -> Figure | None:
    """Draw the hit rate over time: simulated, and of the real runs."""
    if hits is None:
        return None
    at_s = places(hits["edges_s"])
    sides: Sequence[tuple[str, str, str]] = (("real", REAL, COLOURS[1]), ("simulated", SIMULATED, COLOURS[0]))
    traces = [line(at_s, hits[key], name, colour) | {"connectgaps": True} for key, name, colour in sides]
    return laid_out(traces, "seconds since the first request", "hit rate")
