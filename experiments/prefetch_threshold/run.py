"""From which length on is it worth reading a stored prefix from disk, and how long should a request wait for it?

Llama 3 8B on one H200 with 80 GiB for KV, 200 GiB of CPU memory and 4 TiB of disk, written through; the first 6,000 requests of
the Mooncake conversation trace at half its rate, 1.7 a second, which the GPU can serve. ``min_tokens`` of prefetch=threshold goes
from 128 to 16,384 with stop=timeout, the disk's reading from 1 to 20 GB/s. Writing stays at 20 GB/s, so that all have the same
pages on disk. Beside them: no disk at all, reading at admission (prefetch=none), and the other stop rules at 256 tokens. Prompts
of the trace part at multiples of 512 tokens: 128 and 512 differ only by what evictions leave.

Computing takes 57,000 tokens a second at most, which is 7.4 GB of KV: a slower disk reads short prefixes later than they would be
computed.

Claims:

1. the hit rate never rises with the threshold (by more than .001);
2. with 5 GB/s or less no threshold answers sooner than no disk does;
3. the threshold with the least mean TTFT never rises with bandwidth;
4. at 1 GB/s best_effort answers sooner than wait_complete.

Exits with 1 if a claim fails.
"""

import argparse
import csv
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import kvsim
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACE = HERE.parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
COMMAND = "python experiments/prefetch_threshold/run.py"

REQUESTS = 6_000
RATE = 0.5
THRESHOLDS = (128, 512, 2048, 4096, 8192, 16384)
GB_PER_S = (1, 2, 5, 10, 20)
STOPS = ("best_effort", "timeout", "wait_complete")
STOP_TOKENS = 256
NO_DISK, ON_DEMAND = "no disk", "at admission"
COLOURS = ("#d55e00", "#e69f00", "#0a9e74", "#56b4e9", "#3d8fd1", "#8c7ae6")
NOISE = 0.001


@dataclass(frozen=True)
class Cell:
    """One run: ``choice`` is a threshold in tokens, a stop rule, or one of the two baselines."""

    gb_per_s: int
    choice: str

    def overrides(self) -> tuple[str, ...]:
        tiers = "tiers.gpu.capacity=80GiB", "tiers.cpu.capacity=200GiB", "placement=write_through"
        if self.choice == NO_DISK:
            return tiers
        disk = f"hardware.disk_read_bytes_per_s={self.gb_per_s}e9", "hardware.disk_write_bytes_per_s=20e9"
        common = (*tiers, *disk, "tiers.disk.capacity=4TiB")
        if self.choice == ON_DEMAND:
            return common
        stop, tokens = (self.choice, STOP_TOKENS) if self.choice in STOPS else ("timeout", self.choice)
        return *common, "prefetch=threshold", f"prefetch.stop={stop}", f"prefetch.min_tokens={tokens}"


@dataclass(frozen=True)
class Row:
    """What a run gave; pages as shares of what was fetched."""

    hit_rate: float
    ttft_s: float
    p99_s: float
    read_gb: float
    wasted: float


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    choices = [ON_DEMAND, *map(str, THRESHOLDS), *STOPS]
    return [Cell(0, NO_DISK), *(Cell(gb_per_s, choice) for gb_per_s in GB_PER_S for choice in choices)]


@cache
def load(path: str, limit: int) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=128, limit=limit, rate=RATE)


def run(path: str, limit: int, cell: Cell) -> Row:
    result = kvsim.simulate(load(path, limit), *cell.overrides())
    record = result.record
    fetched = record["prefetch"]["fetched_pages"]
    return Row(
        result.hit_rate,
        record["ttft_s"]["mean"],
        record["ttft_s"]["p99"],
        record["links"].get("disk-cpu", {"bytes": 0})["bytes"] / 1e9,
        record["prefetch"]["wasted_pages"] / fetched if fetched else 0.0,
    )


def measure(path: str, limit: int) -> Rows:
    """All runs, two processes at a time."""
    every = cells()
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        return dict(zip(every, pool.map(run, [path] * len(every), [limit] * len(every), every), strict=True))


def best(rows: Rows, gb_per_s: int) -> int:
    """The threshold with the least mean TTFT; of equal ones the lowest."""
    return min(THRESHOLDS, key=lambda tokens: (rows[Cell(gb_per_s, str(tokens))].ttft_s, tokens))


def claims(rows: Rows) -> list[tuple[str, str, bool]]:
    """(claim, what was measured, whether it holds)."""
    rises = {
        (gb_per_s, longer): rows[Cell(gb_per_s, str(longer))].hit_rate - rows[Cell(gb_per_s, str(shorter))].hit_rate
        for gb_per_s in GB_PER_S
        for shorter, longer in pairwise(THRESHOLDS)
    }
    steepest = max(rises, key=lambda place: rises[place])
    none = rows[Cell(0, NO_DISK)].ttft_s
    slow = {gb_per_s: rows[Cell(gb_per_s, str(best(rows, gb_per_s)))].ttft_s for gb_per_s in GB_PER_S if gb_per_s <= 5}
    bests = [best(rows, gb_per_s) for gb_per_s in GB_PER_S]
    effort, complete = (rows[Cell(GB_PER_S[0], stop)].ttft_s for stop in ("best_effort", "wait_complete"))
    return [
        (
            "the hit rate never rises with the threshold",
            f"{100 * rises[steepest]:+.2f} points at most, to {steepest[1]:,} tokens at {steepest[0]} GB/s",
            rises[steepest] <= NOISE,
        ),
        (
            "with 5 GB/s or less no threshold answers sooner than no disk",
            f"no disk {none:.3f} s; best threshold " + ", ".join(f"{ttft:.3f} s at {at} GB/s" for at, ttft in slow.items()),
            all(ttft >= none for ttft in slow.values()),
        ),
        (
            "the best threshold never rises with bandwidth",
            ", ".join(f"{tokens:,} at {at} GB/s" for at, tokens in zip(GB_PER_S, bests, strict=True)),
            bests == sorted(bests, reverse=True),
        ),
        (
            f"at {GB_PER_S[0]} GB/s best_effort answers sooner than wait_complete",
            f"{effort:.3f} s against {complete:.3f} s",
            effort < complete,
        ),
    ]


def finding(rows: Rows) -> str:
    """Three sentences, their figures from the runs."""
    first, last = GB_PER_S[0], GB_PER_S[-1]
    none = rows[Cell(0, NO_DISK)]

    def at(gb_per_s: int) -> str:
        tokens = best(rows, gb_per_s)
        row = rows[Cell(gb_per_s, str(tokens))]
        return f"{tokens:,} tokens at {gb_per_s} GB/s ({row.ttft_s:.2f} s, {row.hit_rate:.1%} hit)"

    stops = "; ".join(
        f"{stop} {rows[Cell(first, stop)].ttft_s:.2f} s and {rows[Cell(first, stop)].hit_rate:.1%} at {first} GB/s, "
        f"{rows[Cell(last, stop)].ttft_s:.2f} s and {rows[Cell(last, stop)].hit_rate:.1%} at {last}"
        for stop in STOPS
    )
    spreads = {
        gb_per_s: max(rows[Cell(gb_per_s, str(t))].ttft_s for t in THRESHOLDS)
        / rows[Cell(gb_per_s, str(best(rows, gb_per_s)))].ttft_s
        for gb_per_s in GB_PER_S
    }
    widest = max(spreads, key=lambda gb_per_s: spreads[gb_per_s])
    return (
        f"Without a disk the mean TTFT is {none.ttft_s:.2f} s ({none.hit_rate:.1%} hit), and the best threshold is {at(first)}, "
        f"{at(5)} and {at(last)}: where the GPU is what requests queue for, a disk that is slower than computing helps as well, "
        "since it reads while the GPU computes for others. "
        f"A wrong threshold costs {spreads[first] - 1:.0%} at {first} GB/s, {spreads[last] - 1:.0%} at {last} GB/s and at most "
        f"{spreads[widest] - 1:.0%}, at {widest} GB/s. "
        f"Of the stop rules: {stops}."
    )


def write_markdown(path: Path, rows: Rows, limit: int) -> None:
    lines = [
        "# Prefetch from disk: from which length on, and how long to wait",
        "",
        f"Llama 3 8B on one H200, {limit:,} requests of the Mooncake conversation trace at half its rate; 80 GiB of GPU memory,",
        f"200 GiB of CPU memory, 4 TiB of disk; made by `{COMMAND}`. All figures are in [results.csv](results.csv).",
        "",
        "![Mean TTFT and hit rate by threshold and bandwidth, and by stop rule](results.png)",
        "",
        "| claim | measured | |",
        "|---|---|---|",
        *(f"| {claim} | {measured} | {'holds' if holds else 'FAILS'} |" for claim, measured, holds in claims(rows)),
        "",
        finding(rows),
    ]
    for title, choices in (
        ("By threshold (tokens), stop=timeout", [ON_DEMAND, *map(str, THRESHOLDS)]),
        (f"By stop rule, {STOP_TOKENS} tokens", list(STOPS)),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            "Mean TTFT (s) and, in brackets, the hit rate; the least TTFT in bold.",
            "",
            f"| GB/s | {NO_DISK} | {' | '.join(choices)} |",
            "|---" * (len(choices) + 2) + "|",
        ]
        for gb_per_s in GB_PER_S:
            row = [rows[Cell(0, NO_DISK)], *(rows[Cell(gb_per_s, choice)] for choice in choices)]
            least = min(one.ttft_s for one in row)
            texts = [f"{'**' if one.ttft_s == least else ''}{one.ttft_s:.3f}{'**' if one.ttft_s == least else ''}" for one in row]
            full = [f"{text} ({one.hit_rate:.3f})" for text, one in zip(texts, row, strict=True)]
            lines.append(f"| {gb_per_s} | {' | '.join(full)} |")
    path.write_text("\n".join(lines) + "\n")


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("gb_per_s", "choice", "hit_rate", "ttft_mean_s", "ttft_p99_s", "read_gb", "wasted_share"))
        for cell, row in rows.items():
            times = f"{row.ttft_s:.4f}", f"{row.p99_s:.4f}"
            writer.writerow(
                (cell.gb_per_s, cell.choice, f"{row.hit_rate:.6f}", *times, f"{row.read_gb:.1f}", f"{row.wasted:.4f}")
            )


def draw(folder: Path, rows: Rows) -> None:
    """``results.html``, and ``results.png`` from it where there is a Chromium."""
    from plotly.subplots import make_subplots

    titles = (
        "mean TTFT (s) by threshold",
        f"mean TTFT (s) by stop rule, {STOP_TOKENS} tokens",
        "hit rate by threshold",
        "hit rate by stop rule",
    )
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.12, shared_yaxes="rows")
    baselines = ((ON_DEMAND, "#888888"), (NO_DISK, "#000000"))
    thresholds = [(str(tokens), f"{tokens:,} tokens", colour) for tokens, colour in zip(THRESHOLDS, COLOURS, strict=False)]
    stops = [(stop, stop, colour) for stop, colour in zip(STOPS, ("#cc79a7", "#b8860b", "#556b2f"), strict=True)]
    bounds = [(choice, choice, colour) for choice, colour in baselines]
    for column, lines in ((1, [*bounds, *thresholds]), (2, [*bounds, *stops])):
        for choice, name, colour in lines:
            here = [rows[Cell(0 if choice == NO_DISK else gb_per_s, choice)] for gb_per_s in GB_PER_S]
            dash = "dot" if choice in (ON_DEMAND, NO_DISK) else "solid"
            for at, values in enumerate(([row.ttft_s for row in here], [row.hit_rate for row in here]), 1):
                figure.add_scatter(
                    x=list(GB_PER_S), y=values, name=name, legendgroup=name, mode="lines+markers",
                    showlegend=at == 1 and (column == 1 or choice in STOPS),
                    line={"color": colour, "width": 2, "dash": dash}, row=at, col=column,
                )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=list(GB_PER_S))
    figure.update_xaxes(title="the disk reads (GB/s)", row=2)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(tickformat=".0%", row=2)
    figure.update_layout(template="plotly_white", width=1100, height=780, margin={"t": 50})
    page = folder / "results.html"
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(page, folder / "results.png", width=1116, height=796)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="the Mooncake conversation trace")
    parser.add_argument("--limit", type=int, default=REQUESTS, help="requests to play; the claims are about the default")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the results")
    arguments = parser.parse_args()
    if not arguments.trace.exists():
        parser.error(f"no trace at {arguments.trace}: name it with --trace")
    rows = measure(str(arguments.trace.resolve()), arguments.limit)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.output / "results.csv", rows)
    write_markdown(arguments.output / "results.md", rows, arguments.limit)
    draw(arguments.output, rows)
    print((arguments.output / "results.md").read_text())
    return 0 if arguments.limit != REQUESTS or all(holds for _, _, holds in claims(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
