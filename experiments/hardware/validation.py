"""How close is the simulation to a GPU? The same runs on both, per tier, with errors.

Claims, each a row of the last table:

hits        at least 99 % of the requests hit the same pages in every tier, and each tier's hit rate is within 0.5 points
links       the bytes of every link are within 1 %
times       time to first token: p50 within 5 %, p99 within 10 %
ranking     p50 of the time to first token orders the four agent configurations in the same way
bytes       no word of a reused page is wrong

Two configurations run twice. A table of its own shows how far the GPU's two runs are apart: no simulation can be closer.

    kvsim calibrate name=h200_measured                       on the machine with the GPU, once
    python experiments/hardware/validation.py TRACE          15 minutes; TRACE is the Mooncake conversation trace
    python experiments/hardware/validation.py --read DIR     writes the tables of the runs in DIR; claims about missing runs fail

Writes validation.md and validation.csv, and exits with 1 if a claim fails.
"""

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsim.cli import main as kvsim

HERE = Path(__file__).resolve().parent
SHAPES = ["page_tokens=16", "model=llama3_8b", "hardware=h200_measured", "prefetch=threshold"]
CONVERSATION = [
    "trace=mooncake", "trace.limit=300", "trace.rate=0.25", "tiers.gpu.capacity=64GiB", "tiers.cpu.capacity=24GiB",
    "tiers.disk.capacity=48GiB",
]  # fmt: skip
AGENTS = [
    "trace=synthetic", "trace.seed=89", "trace.sessions=18", "trace.sessions_per_s=0.32", "trace.arrivals=open_loop",
    "trace.limit=50", "trace.mix.chat.weight=0", "trace.mix.agent.weight=1", "trace.mix.agent.turns=8",
    "trace.mix.agent.message_tokens=2000", "trace.mix.agent.answer_tokens=24", "trace.mix.agent.pause_s=6",
    "trace.mix.document.weight=0.1", "trace.mix.document.document_tokens=6000", "trace.mix.document.message_tokens=40",
    "trace.mix.document.answer_tokens=16", "trace.mix.document.pause_s=10", "prefetch.stop=wait_complete",
    "tiers.gpu.capacity=6GiB", "tiers.cpu.capacity=8GiB", "tiers.disk.capacity=40GiB",
]  # fmt: skip
PLACEMENTS, EVICTIONS = ("write_back", "write_through"), ("lru", "arc")
TWICE = ("agents write_back arc", "agents write_through lru")


def configurations(trace: str) -> dict[str, list[str]]:
    """Overrides of each run, by name."""
    runs = {
        f"agents {placement} {eviction}": [*AGENTS, *SHAPES, f"placement={placement}", f"eviction={eviction}"]
        for placement in PLACEMENTS
        for eviction in EVICTIONS
    }
    runs |= {again(name): runs[name] for name in TWICE}
    return runs | {"conversation write_through lru": [*CONVERSATION, f"trace.path={trace}", *SHAPES, "placement=write_through"]}


def again(name: str) -> str:
    return f"{name} again"


def rows(name: str, record: dict[str, Any]) -> Iterator[tuple[str, str, str, float, float]]:
    """(run, what, unit, simulated, measured)"""
    for tier, pair in record["hit_rate"].items():
        yield name, f"hit rate, {tier}", "%", 100 * pair["simulated"], 100 * pair["hardware"]
    for key, label in (("ttft_s", "time to first token"), ("tpot_s", "time per output token")):
        for quantile, pair in record[key].items():
            yield name, f"{label}, {quantile}", "s", pair["simulated"], pair["hardware"]
    for link, use in record["links"].items():
        yield name, f"{link}, moved", "GB", use["bytes"]["simulated"] / 1e9, use["bytes"]["hardware"] / 1e9
        yield name, f"{link}, busy", "s", use["busy_s"]["simulated"], use["busy_s"]["hardware"]


def claims(records: dict[str, dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """(claim, finding, whether it holds)"""
    found = []
    for name, record in records.items():
        rates = max(abs(pair["difference"]) for pair in record["hit_rate"].values())
        text = f"{100 * record['identical']:.1f} % the same, {100 * rates:.2f} points"
        found.append((f"hits, {name}", text, record["identical"] >= 0.99 and rates <= 0.005))
        n_bytes = max(abs(use["bytes"]["error"] or 0) for use in record["links"].values())
        found.append((f"links, {name}", f"{100 * n_bytes:.1f} %", n_bytes <= 0.01))
        p50, p99 = (record["ttft_s"][quantile]["error"] for quantile in ("p50", "p99"))
        found.append((f"times, {name}", f"p50 {100 * p50:+.1f} %, p99 {100 * p99:+.1f} %", abs(p50) <= 0.05 and abs(p99) <= 0.1))
    missing = [name for name in configurations("") if name not in records]
    found += [(f"hits, links, times, {name}", "not measured", False) for name in missing]
    agents = [f"agents {placement} {eviction}" for placement in PLACEMENTS for eviction in EVICTIONS]
    orders = [
        sorted(agents, key=lambda name: records[name]["ttft_s"]["p50"][side] if name in records else 0.0)
        for side in ("simulated", "hardware")
    ]
    is_whole = not set(agents) & set(missing)
    text = " < ".join(name.removeprefix("agents ") for name in orders[1]) if is_whole else "not all measured"
    found.append(("ranking", text, is_whole and orders[0] == orders[1]))
    wrong = sum(record["hardware"]["wrong_words"] for record in records.values())
    moved = sum(sum(record["hardware"]["page_moves"].values()) for record in records.values())
    verified = sum(record["hardware"]["verified_pages"] for record in records.values())
    found.append(("bytes", f"{wrong} wrong words in {verified:,} reused pages; {moved:,} pages moved", wrong == 0))
    return found


def hits(file: Path) -> list[tuple[str, ...]]:
    """Pages hit by each request of a run, by tier."""
    with gzip.open(file, "rt", newline="") as text:
        return [tuple(value for key, value in row.items() if key.startswith("hit_pages")) for row in csv.DictReader(text)]


def repeats(records: dict[str, dict[str, Any]], runs: Path) -> list[str]:
    """The table of the configurations that ran twice: the second run relative to the first."""
    lines = ["## The GPU against itself", "", "| repeated run | requests with the same hits | p50 | p99 |", "|---|---|---|---|"]
    for name in TWICE:
        if not {name, again(name)} <= set(records):
            continue
        first, second = (hits(runs / run / "hardware" / "requests.csv.gz") for run in (name, again(name)))
        same = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
        times = [[records[run]["ttft_s"][quantile]["hardware"] for run in (again(name), name)] for quantile in ("p50", "p99")]
        lines.append(f"| {name} | {100 * same:.1f} % | {percent(*times[0])} | {percent(*times[1])} |")
    return [*lines, ""]


def write(records: dict[str, dict[str, Any]], runs: Path, folder: Path) -> bool:
    """Write both files into a folder; return whether all claims hold."""
    table = [row for name, record in records.items() for row in rows(name, record)]
    with (folder / "validation.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "what", "unit", "simulated", "measured"])
        writer.writerows([name, what, unit, f"{a:.6g}", f"{b:.6g}"] for name, what, unit, a, b in table)
    device = next(iter(records.values()))["device"]
    lines = [
        "# Simulated against measured", "",
        f"{device}. Made by `python experiments/hardware/validation.py TRACE`, which lists the settings; all rows are in "
        "validation.csv.", "",
    ]  # fmt: skip
    for name in records:
        lines += [f"## {name.capitalize()}", "", "| | simulated | measured | error |", "|---|---|---|---|"]
        for run, what, unit, simulated, measured in table:
            if run == name:
                error = f"{simulated - measured:+.2f} points" if unit == "%" else percent(simulated, measured)
                lines.append(f"| {what} ({unit}) | {simulated:.4g} | {measured:.4g} | {error} |")
        lines.append("")
    found = claims(records)
    lines += repeats(records, runs)
    lines += ["## Claims", "", "| claim | found | |", "|---|---|---|"]
    lines += [f"| {claim} | {text} | {'holds' if holds else 'FAILS'} |" for claim, text, holds in found]
    findings = folder / "validation_findings.md"
    if findings.exists():
        lines += ["", findings.read_text().rstrip()]
    (folder / "validation.md").write_text("\n".join(lines) + "\n")
    return all(holds for _, _, holds in found)


def percent(simulated: float, measured: float) -> str:
    return f"{100 * (simulated / measured - 1):+.1f} %" if measured else ""


def main(arguments: list[str] | None = None) -> int:
    """Run, or read earlier runs, and write the tables. Return the exit code."""
    parser = argparse.ArgumentParser(description="Compare simulated with measured runs.")
    parser.add_argument("trace", nargs="?", help="the Mooncake conversation trace")
    parser.add_argument("--read", type=Path, metavar="DIR", help="write the tables again from the runs in this folder")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR", help="folder for the tables")
    options = parser.parse_args(arguments)
    if (options.trace is None) == (options.read is None):
        parser.error("name the trace to run, or set --read to a folder of runs")
    folder = options.read or Path("outputs") / "validation"
    for name, overrides in configurations(options.trace or "").items():
        if options.read is None and kvsim(["validate", *overrides, f"output={folder / name}"]) == 2:
            return 2
    files = {name: folder / name / "validate.json" for name in configurations("")}
    records = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if not records:
        parser.error(f"--read: no runs in {folder}")
    return 0 if write(records, folder, options.output) else 1


if __name__ == "__main__":
    sys.exit(main())
