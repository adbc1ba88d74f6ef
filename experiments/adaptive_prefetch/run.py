"""Where host memory is scarce, is a prefetch that takes what fits better than one that takes all or nothing?

prefetch=threshold reads a stored continuation from disk only if the CPU tier can hold all of it; prefetch=adaptive reads the
first part that fits. Llama 3 8B on one H200 with 20 GiB for KV, 1 to 32 GiB of CPU memory and 1 TiB of disk, written through;
1,500 requests of the synthetic trace, one session per second; both policies with their defaults, which are SGLang's.

Each pair of runs plays the same requests. They come from 16 seeds, and all results are means over seeds with 95% confidence
intervals (Student's t, paired by seed where policies are compared). Seeds 0 and 1 served to choose the sizes; the study uses
others.

Claims, about these intervals:

1. with 4 GiB adaptive hits more;
2. with 32 GiB the hit rates differ by less than one point;
3. with no capacity adaptive has the higher mean TTFT.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import Claim, Study, capacities, opening, section
from kvsim.trace.base import Trace

CPU_GIB = (1, 2, 4, 8, 16, 32)
SEEDS = range(10, 26)
T_QUANTILE = 2.131
"""97.5% quantile of Student's t for 16 values."""
THRESHOLD, ADAPTIVE = POLICIES = ("threshold", "adaptive")
COLOURS = {THRESHOLD: "#3d8fd1", ADAPTIVE: "#d55e00"}


class Cell(NamedTuple):
    """One simulation."""

    cpu_gib: int
    seed: int
    policy: str


class Row(NamedTuple):
    """Results of a simulation; pages are of 64 tokens."""

    hit_rate: float
    ttft_s: float
    used_pages: int
    wasted_pages: int
    refused_by_memory_pages: int
    refused_by_rate_limit_pages: int


class Interval(NamedTuple):
    """A mean over seeds, and half the width of its 95% confidence interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    return [Cell(cpu_gib, seed, policy) for seed in SEEDS for cpu_gib in CPU_GIB for policy in POLICIES]


@cache
def load(seed: int, limit: int) -> Trace:
    return kvsim.load_trace("synthetic", page_tokens=64, seed=seed, sessions=500, limit=limit)


def run(options: Namespace, cell: Cell) -> Row:
    tiers = capacities(gpu=20, cpu=cell.cpu_gib, disk=1024)
    trace = load(cell.seed, options.limit)
    result = kvsim.simulate(trace, *tiers, "hardware=h200", "placement=write_through", f"prefetch={cell.policy}")
    counts = result.record["prefetch"]
    return Row(result.hit_rate, result.record["ttft_s"]["mean"], *(counts[name] for name in Row._fields[2:]))


def interval(values: Sequence[float]) -> Interval:
    """The 95% confidence interval of the mean of one value per seed."""
    return Interval(fmean(values), T_QUANTILE * stdev(values) / sqrt(len(values)))


def over_seeds(rows: Rows, cpu_gib: int, policy: str, value: Callable[[Row], float]) -> Interval:
    return interval([value(rows[Cell(cpu_gib, seed, policy)]) for seed in SEEDS])


def gains(rows: Rows, cpu_gib: int, gain: Callable[[Row, Row], float]) -> Interval:
    """What adaptive gains over threshold, seed by seed."""
    return interval([gain(rows[Cell(cpu_gib, seed, ADAPTIVE)], rows[Cell(cpu_gib, seed, THRESHOLD)]) for seed in SEEDS])


def points(adaptive: Row, threshold: Row) -> float:
    """Points of hit rate gained."""
    return 100 * (adaptive.hit_rate - threshold.hit_rate)


def slower(adaptive: Row, threshold: Row) -> float:
    """Change of the mean TTFT in percent; negative is faster."""
    return 100 * (adaptive.ttft_s / threshold.ttft_s - 1)


def shown(one: Interval, form: str = "+.2f") -> str:
    return f"{one.mean:{form}} ± {one.half:{form.lstrip('+')}}"


def claims(rows: Rows) -> list[Claim]:
    scarce, ample = gains(rows, 4, points), gains(rows, 32, points)
    times = {cpu_gib: gains(rows, cpu_gib, slower) for cpu_gib in CPU_GIB}
    worst = max(CPU_GIB, key=lambda cpu_gib: times[cpu_gib].low)
    return [
        Claim("with 4 GiB adaptive hits more", f"{shown(scarce)} points", scarce.low > 0),
        Claim(
            "with 32 GiB the hit rates differ by less than one point", f"{shown(ample)} points", ample.low > -1 and ample.high < 1
        ),
        Claim(
            "with no capacity adaptive has the higher mean TTFT",
            f"at worst {shown(times[worst], '+.1f')}%, with {worst} GiB",
            times[worst].low <= 0,
        ),
    ]


def finding(rows: Rows) -> str:
    hits = {cpu_gib: gains(rows, cpu_gib, points) for cpu_gib in CPU_GIB}
    times = {cpu_gib: gains(rows, cpu_gib, slower) for cpu_gib in CPU_GIB}

    def sizes(holds: Callable[[int], bool]) -> str:
        return ", ".join(f"{cpu_gib} GiB" for cpu_gib in CPU_GIB if holds(cpu_gib)) or "no capacity"

    best = max(CPU_GIB, key=lambda cpu_gib: hits[cpu_gib].mean)
    return (
        f"The whole interval of the gain in hit rate is above 0 with {sizes(lambda size: hits[size].low > 0)}, below 0 with "
        f"{sizes(lambda size: hits[size].high < 0)}. The largest mean gain is {hits[best].mean:.1f} points, with {best} GiB. The "
        f"mean TTFT is lower with confidence with {sizes(lambda size: times[size].high < 0)}, higher with "
        f"{sizes(lambda size: times[size].low > 0)}."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Llama 3 8B on one H200, {options.limit:,} requests of the synthetic trace for each of {len(SEEDS)} seeds; 20 GiB of",
        "GPU memory, 1 TiB of disk. Means over the seeds with 95% confidence intervals; gains are paired by seed. Made by",
        "`python experiments/adaptive_prefetch/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    picture = "Hit rate and mean TTFT of both policies by CPU memory, and the difference"
    yield from opening(
        "Prefetch under scarce host memory: all or nothing, or what fits?", text, picture, claims(rows), finding(rows)
    )
    lines = []
    for cpu_gib in CPU_GIB:
        rates = [over_seeds(rows, cpu_gib, policy, lambda row: row.hit_rate) for policy in POLICIES]
        times = [over_seeds(rows, cpu_gib, policy, lambda row: row.ttft_s) for policy in POLICIES]
        changes = f"{shown(gains(rows, cpu_gib, points))} points", f"{shown(gains(rows, cpu_gib, slower), '+.1f')}%"
        lines.append([str(cpu_gib), *(shown(one, ".4f") for one in rates), changes[0]])
        lines[-1] += [*(f"{shown(one, '.3f')} s" for one in times), changes[1]]
    head = (
        "CPU GiB",
        *(f"hit rate, {policy}" for policy in POLICIES),
        "gain",
        *(f"TTFT, {policy}" for policy in POLICIES),
        "change",
    )
    yield from section("Hit rate and mean TTFT", head, lines)
    lines = []
    for cpu_gib in CPU_GIB:
        for policy in POLICIES:
            of_seeds = [rows[Cell(cpu_gib, seed, policy)] for seed in SEEDS]
            counts = [f"{fmean(row[at] for row in of_seeds) / 1000:.1f}" for at in range(2, len(Row._fields))]
            lines.append([str(cpu_gib), policy, *counts])
    head = ("CPU GiB", "prefetch", "used", "wasted", "refused by memory", "refused by rate limit")
    yield from section("What became of the pages that only the disk had (thousands, means)", head, lines)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield *Cell._fields, *Row._fields
    yield from ((*cell, f"{row.hit_rate:.6f}", f"{row.ttft_s:.4f}", *row[2:]) for cell, row in rows.items())


def figure(rows: Rows) -> go.Figure:
    titles = "hit rate", "mean TTFT (s)", "gain of adaptive (points of hit rate)", "change of mean TTFT by adaptive (%)"
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.12)

    def add(name: str, ends: list[Interval], colour: str, row: int, column: int) -> None:
        figure.add_scatter(
            x=list(CPU_GIB), y=[one.mean for one in ends], error_y={"array": [one.half for one in ends]}, name=name,
            mode="lines+markers", line={"color": colour, "width": 2}, showlegend=(row, column) == (1, 1), row=row, col=column,
        )  # fmt: skip

    values: list[Callable[[Row], float]] = [lambda row: row.hit_rate, lambda row: row.ttft_s]
    for column, value in enumerate(values, 1):
        for policy in POLICIES:
            add(policy, [over_seeds(rows, cpu_gib, policy, value) for cpu_gib in CPU_GIB], COLOURS[policy], 1, column)
    for column, gain in enumerate((points, slower), 1):
        add("difference", [gains(rows, cpu_gib, gain) for cpu_gib in CPU_GIB], "#444444", 2, column)
    figure.update_xaxes(type="log", tickvals=list(CPU_GIB))
    figure.update_xaxes(title="CPU memory (GiB); bars: 95% confidence", row=2)
    figure.update_yaxes(tickformat=".0%", row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=1)
    figure.update_yaxes(zerolinecolor="#000000", row=2)
    return figure.update_layout(template="plotly_white", width=1000, height=720, margin={"t": 50})


STUDY = Study(
    file=__file__, question=__doc__, traces={}, limit=1_500,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
