"""From which length on is it worth reading a stored prefix from disk, and how long should a request wait for it?

Llama 3 8B on one H200 with 80 GiB for KV, 200 GiB of CPU memory and 4 TiB of disk, written through; the first 6,000 requests of
the Mooncake conversation trace at half its rate, 1.7 per second, which the GPU can serve. ``min_tokens`` of prefetch=threshold
goes from 128 to 16,384 with stop=timeout, the disk's read rate from 1 to 20 GB/s. The write rate stays at 20 GB/s, so all runs
have the same pages on disk. Baselines: no disk, and reading at admission (prefetch=none); the other stop rules run with 256
tokens. Prompts of the trace diverge at multiples of 512 tokens, so thresholds of 128 and 512 differ only by partly evicted
prefixes.

The GPU computes at most 57,000 tokens per second, which is 7.4 GB of KV: a slower disk takes longer to read a short prefix than
the GPU takes to recompute it.

Claims:

1. the hit rate never rises with the threshold (by more than .001);
2. at 5 GB/s or less no threshold has a lower mean TTFT than no disk;
3. the threshold with the lowest mean TTFT never rises with bandwidth;
4. at 1 GB/s best_effort has a lower mean TTFT than wait_complete.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import CONVERSATION, Claim, Study, bold, highest, opening, section
from kvsim.trace.base import Trace

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
    """Results of a run."""

    hit_rate: float
    ttft_s: float
    p99_s: float
    read_gb: float
    wasted: float
    """Share of the fetched pages that the waiting request did not use."""


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    choices = [ON_DEMAND, *map(str, THRESHOLDS), *STOPS]
    return [Cell(0, NO_DISK), *(Cell(gb_per_s, choice) for gb_per_s in GB_PER_S for choice in choices)]


@cache
def load(path: str, limit: int) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=128, limit=limit, rate=RATE)


def run(options: Namespace, cell: Cell) -> Row:
    result = kvsim.simulate(load(options.trace, options.limit), *cell.overrides())
    record = result.record
    fetched = record["prefetch"]["fetched_pages"]
    return Row(
        result.hit_rate,
        record["ttft_s"]["mean"],
        record["ttft_s"]["p99"],
        record["links"].get("disk-cpu", {"bytes": 0})["bytes"] / 1e9,
        record["prefetch"]["wasted_pages"] / fetched if fetched else 0.0,
    )


def best(rows: Rows, gb_per_s: int) -> int:
    """The threshold with the lowest mean TTFT; of equal ones the lowest."""
    return min(THRESHOLDS, key=lambda tokens: (rows[Cell(gb_per_s, str(tokens))].ttft_s, tokens))


def claims(rows: Rows) -> list[Claim]:
    rises = {
        (gb_per_s, longer): rows[Cell(gb_per_s, str(longer))].hit_rate - rows[Cell(gb_per_s, str(shorter))].hit_rate
        for gb_per_s in GB_PER_S
        for shorter, longer in pairwise(THRESHOLDS)
    }
    (bandwidth, tokens), rise = highest(rises)
    none = rows[Cell(0, NO_DISK)].ttft_s
    slow = {gb_per_s: rows[Cell(gb_per_s, str(best(rows, gb_per_s)))].ttft_s for gb_per_s in GB_PER_S if gb_per_s <= 5}
    bests = [best(rows, gb_per_s) for gb_per_s in GB_PER_S]
    effort, complete = (rows[Cell(GB_PER_S[0], stop)].ttft_s for stop in ("best_effort", "wait_complete"))
    return [
        Claim(
            "the hit rate never rises with the threshold",
            f"at most {100 * rise:+.2f} points, to {tokens:,} tokens at {bandwidth} GB/s",
            rise <= NOISE,
        ),
        Claim(
            "at 5 GB/s or less no threshold has a lower mean TTFT than no disk",
            f"no disk {none:.3f} s; best threshold " + ", ".join(f"{ttft:.3f} s at {at} GB/s" for at, ttft in slow.items()),
            all(ttft >= none for ttft in slow.values()),
        ),
        Claim(
            "the best threshold never rises with bandwidth",
            ", ".join(f"{tokens:,} at {at} GB/s" for at, tokens in zip(GB_PER_S, bests, strict=True)),
            bests == sorted(bests, reverse=True),
        ),
        Claim(
            f"at {GB_PER_S[0]} GB/s best_effort has a lower mean TTFT than wait_complete",
            f"{effort:.3f} s against {complete:.3f} s",
            effort < complete,
        ),
    ]


def finding(rows: Rows) -> str:
    first, last = GB_PER_S[0], GB_PER_S[-1]
    none = rows[Cell(0, NO_DISK)]

    def at(gb_per_s: int) -> str:
        tokens = best(rows, gb_per_s)
        row = rows[Cell(gb_per_s, str(tokens))]
        return f"{tokens:,} tokens at {gb_per_s} GB/s ({row.ttft_s:.2f} s, {row.hit_rate:.1%} hit)"

    def spread(gb_per_s: int) -> float:
        times = [rows[Cell(gb_per_s, str(tokens))].ttft_s for tokens in THRESHOLDS]
        return max(times) / min(times) - 1

    stops = "; ".join(
        f"{stop} {rows[Cell(first, stop)].ttft_s:.2f} s and {rows[Cell(first, stop)].hit_rate:.1%} at {first} GB/s, "
        f"{rows[Cell(last, stop)].ttft_s:.2f} s and {rows[Cell(last, stop)].hit_rate:.1%} at {last}"
        for stop in STOPS
    )
    widest = max(GB_PER_S, key=spread)
    return (
        f"Without a disk the mean TTFT is {none.ttft_s:.2f} s ({none.hit_rate:.1%} hit). The best threshold is {at(first)}, "
        f"{at(5)} and {at(last)}: where requests queue for the GPU, even a disk slower than recomputing helps, since it reads "
        "while the GPU computes for other requests. "
        f"The wrong threshold costs {spread(first):.0%} at {first} GB/s, {spread(last):.0%} at {last} GB/s, and at most "
        f"{spread(widest):.0%}, at {widest} GB/s. "
        f"The stop rules: {stops}."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Llama 3 8B on one H200, {options.limit:,} requests of the Mooncake conversation trace at half its rate; 80 GiB of GPU",
        "memory, 200 GiB of CPU memory, 4 TiB of disk. Made by `python experiments/prefetch_threshold/run.py`; all numbers are",
        "in [results.csv](results.csv).",
    ]
    picture = "Mean TTFT and hit rate by threshold and bandwidth, and by stop rule"
    yield from opening(
        "Prefetch from disk: from which length on, and how long to wait", text, picture, claims(rows), finding(rows)
    )
    for title, choices in (
        ("By threshold (tokens), stop=timeout", [ON_DEMAND, *map(str, THRESHOLDS)]),
        (f"By stop rule, {STOP_TOKENS} tokens", list(STOPS)),
    ):
        lines = []
        for gb_per_s in GB_PER_S:
            row = [rows[Cell(0, NO_DISK)], *(rows[Cell(gb_per_s, choice)] for choice in choices)]
            times = [one.ttft_s for one in row]
            texts = zip(bold(times, min(times), ".3f"), row, strict=True)
            lines.append([str(gb_per_s), *(f"{text} ({one.hit_rate:.3f})" for text, one in texts)])
        shown = "Mean TTFT (s) with the hit rate in brackets; the lowest TTFT in bold."
        yield from section(title, ("GB/s", NO_DISK, *choices), lines, shown)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "gb_per_s", "choice", "hit_rate", "ttft_mean_s", "ttft_p99_s", "read_gb", "wasted_share"
    for cell, row in rows.items():
        times = f"{row.ttft_s:.4f}", f"{row.p99_s:.4f}"
        yield cell.gb_per_s, cell.choice, f"{row.hit_rate:.6f}", *times, f"{row.read_gb:.1f}", f"{row.wasted:.4f}"


def figure(rows: Rows) -> go.Figure:
    titles = (
        "mean TTFT (s) by threshold",
        f"mean TTFT (s) by stop rule, {STOP_TOKENS} tokens",
        "hit rate by threshold",
        "hit rate by stop rule",
    )
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.12, shared_yaxes="rows")
    baselines = [(choice, choice, colour) for choice, colour in ((ON_DEMAND, "#888888"), (NO_DISK, "#000000"))]
    thresholds = [(str(tokens), f"{tokens:,} tokens", colour) for tokens, colour in zip(THRESHOLDS, COLOURS, strict=False)]
    stops = [(stop, stop, colour) for stop, colour in zip(STOPS, ("#cc79a7", "#b8860b", "#556b2f"), strict=True)]
    for column, lines in ((1, [*baselines, *thresholds]), (2, [*baselines, *stops])):
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
    return figure.update_layout(template="plotly_white", width=1100, height=780, margin={"t": 50})


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": CONVERSATION}, limit=6_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
