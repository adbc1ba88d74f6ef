"""One more GiB of memory: for the GPU, the CPU or the disk?

Llama 3 8B on one H200, the first 6,000 requests of the Mooncake conversation trace at half its rate, 1.7 per second, which the
GPU can serve from every base. A base is three tier sizes and a write policy; each tier in turn gets 8, 16 and 32 GiB more. The
worth of a GiB is the slope of a least-squares line through these three runs and the base, in points of hit rate and in
milliseconds of mean time to first token (TTFT) saved; its error is the slope's standard error. The disk is that of the H200's
host: it reads 3.2 and writes 3.0 GB/s, and is read at admission.

Claims:

1. in TTFT a GiB of GPU memory is worth most from every base;
2. with write_back a GiB is worth the same hit rate in every tier, within .05 points, since the tiers hold different pages;
3. with write_through a GiB of GPU memory adds less hit rate than one of CPU memory, which has all GPU pages, from every base;
4. the TTFT saved by a GiB of CPU memory falls from each base to the next larger one.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import CONVERSATION, Claim, Study, capacities, highest, lowest, markdown, opening
from kvsim.trace.base import Trace

RATE = 0.5
TIERS = ("gpu", "cpu", "disk")
COLOURS = ("#d55e00", "#3d8fd1", "#0a9e74")
SIZES = ((40, 100, 400), (50, 200, 800), (70, 400, 1600))
"""GiB of GPU, CPU and disk."""
POLICIES = ("write_through", "write_back")
MORE_GIB = (8, 16, 32)
EQUAL_POINTS = 0.05


@dataclass(frozen=True)
class Base:
    """The sizes and the write policy from which memory is added."""

    sizes: tuple[int, int, int]
    policy: str

    def __str__(self) -> str:
        return f"{' + '.join(f'{gib:,}' for gib in self.sizes)} GiB, {self.policy}"


@dataclass(frozen=True)
class Cell:
    """A base with more memory in one tier; the base itself has 0 more on the GPU."""

    base: Base
    tier: str
    more_gib: int

    def overrides(self) -> tuple[str, ...]:
        gib = {tier: size + self.more_gib * (tier == self.tier) for tier, size in zip(TIERS, self.base.sizes, strict=True)}
        return *capacities(**gib), f"placement={self.base.policy}"


@dataclass(frozen=True)
class Row:
    """Results of a run."""

    hit_rate: float
    ttft_s: float


@dataclass(frozen=True)
class Worth:
    """What one GiB adds, with its standard error."""

    points: float
    points_error: float
    saved_ms: float
    saved_ms_error: float


Rows = dict[Cell, Row]


def bases() -> list[Base]:
    return [Base(sizes, policy) for policy in POLICIES for sizes in SIZES]


def cells() -> list[Cell]:
    return [
        *(Cell(base, TIERS[0], 0) for base in bases()),
        *(Cell(base, tier, more) for base in bases() for tier in TIERS for more in MORE_GIB),
    ]


@cache
def load(path: str, limit: int) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit, rate=RATE)


def run(options: Namespace, cell: Cell) -> Row:
    result = kvsim.simulate(load(options.trace, options.limit), *cell.overrides())
    return Row(result.hit_rate, result.record["ttft_s"]["mean"])


def worth(rows: Rows, base: Base, tier: str) -> Worth:
    here = [rows[Cell(base, TIERS[0], 0)], *(rows[Cell(base, tier, more)] for more in MORE_GIB)]
    return Worth(*slope([100 * row.hit_rate for row in here]), *slope([-1000 * row.ttft_s for row in here]))


def slope(values: list[float]) -> tuple[float, float]:
    """Least-squares slope of values at 0 and ``MORE_GIB``, and its standard error."""
    x = np.array([0, *MORE_GIB], dtype=float)
    y = np.array(values)
    x -= x.mean()
    steepness = float(x @ y / (x @ x))
    left = y - y.mean() - steepness * x
    return steepness, float(np.sqrt(left @ left / (len(x) - 2) / (x @ x)))


def claims(rows: Rows) -> list[Claim]:
    found = {base: {tier: worth(rows, base, tier) for tier in TIERS} for base in bases()}
    through, back = ([(base, found[base]) for base in bases() if base.policy == policy] for policy in POLICIES)
    lead = {base: each["gpu"].saved_ms - max(each["cpu"].saved_ms, each["disk"].saved_ms) for base, each in found.items()}
    less = {base: each["cpu"].points - each["gpu"].points for base, each in through}
    points = {base: [one.points for one in each.values()] for base, each in back}
    apart = {base: max(values) - min(values) for base, values in points.items()}
    (closest, ahead), (least, short), (widest, gap) = lowest(lead), lowest(less), highest(apart)
    falls = {policy: [found[Base(sizes, policy)]["cpu"].saved_ms for sizes in SIZES] for policy in POLICIES}
    return [
        Claim(
            "in TTFT a GiB of GPU memory is worth most from every base", f"by at least {ahead:+.2f} ms/GiB ({closest})", ahead > 0
        ),
        Claim(
            "with write_back a GiB is worth the same hit rate in every tier",
            f"at most {gap:.3f} points/GiB apart ({widest})",
            gap <= EQUAL_POINTS,
        ),
        Claim(
            "with write_through a GiB of GPU memory adds less hit rate than one of CPU memory",
            f"by at least {short:+.3f} points/GiB ({least})",
            short > 0,
        ),
        Claim(
            "the TTFT saved by a GiB of CPU memory falls as the base grows",
            "; ".join(f"{policy}: " + ", ".join(f"{ms:.2f}" for ms in saved) + " ms" for policy, saved in falls.items()),
            all(saved == sorted(saved, reverse=True) for saved in falls.values()),
        ),
    ]


def finding(rows: Rows) -> str:
    def points(tier: str, policy: str) -> list[float]:
        return [worth(rows, Base(sizes, policy), tier).points for sizes in SIZES]

    def ttft(sizes: tuple[int, int, int], policy: str) -> float:
        return rows[Cell(Base(sizes, policy), TIERS[0], 0)].ttft_s

    def saved(base: Base) -> str:
        gpu, cpu, disk = (worth(rows, base, tier).saved_ms for tier in TIERS)
        return f"{gpu:.1f}, {cpu:.1f} and {disk:.1f} ms"

    first, last = Base(SIZES[0], "write_through"), Base(SIZES[-1], "write_through")
    slower = [ttft(sizes, "write_back") / ttft(sizes, "write_through") for sizes in SIZES]
    disk, cpu = points("disk", "write_through"), points("cpu", "write_back")
    return (
        f"From {first}, one more GiB of GPU memory, CPU memory and disk saves {saved(first)} of mean TTFT; from {last}, "
        f"{saved(last)}: on the GPU it lets more requests run at a time, whatever they reuse. "
        f"In hit rate, with write_through only the disk counts, {min(disk):.3f} to {max(disk):.3f} points, as each tier has all "
        f"pages of the tiers above it; with write_back all three count alike, {min(cpu):.3f} to {max(cpu):.3f} points for CPU "
        "memory. "
        f"Yet from the same base write_back takes {min(slower):.1f} to {max(slower):.1f} times as long to the first token as "
        "write_through, although it hits more: pages evicted from the GPU wait for room in the CPU tier, which waits for a disk "
        "of 3 GB/s."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Llama 3 8B on one H200, {options.limit:,} requests of the Mooncake conversation trace at half its rate; the worth of",
        "one more GiB, ± its standard error. Made by `python experiments/memory_split/run.py`; all runs are in",
        "[results.csv](results.csv).",
    ]
    picture = "Points of hit rate that one more GiB in each tier adds, and the TTFT that it saves"
    yield from opening("One more GiB: GPU, CPU or disk?", text, picture, claims(rows), finding(rows))
    yield ""
    lines = []
    for base in bases():
        row = rows[Cell(base, TIERS[0], 0)]
        each = [worth(rows, base, tier) for tier in TIERS]
        points = [f"{one.points:.3f} ± {one.points_error:.3f}" for one in each]
        saved = [f"{one.saved_ms:.2f} ± {one.saved_ms_error:.2f}" for one in each]
        lines.append([str(base), f"{row.hit_rate:.4f}", f"{row.ttft_s:.3f}", *points, *saved])
    head = ("base", "hit rate", "mean TTFT (s)", "points/GiB: GPU", "CPU", "disk", "ms/GiB: GPU", "CPU", "disk")
    yield from markdown(head, lines)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "gpu_gib", "cpu_gib", "disk_gib", "policy", "tier", "more_gib", "hit_rate", "ttft_mean_s"
    for cell, row in rows.items():
        tier = cell.tier if cell.more_gib else ""
        yield *cell.base.sizes, cell.base.policy, tier, cell.more_gib, f"{row.hit_rate:.6f}", f"{row.ttft_s:.4f}"


def figure(rows: Rows) -> go.Figure:
    measures = (("points", "points of hit rate per GiB"), ("saved_ms", "ms of mean TTFT saved per GiB"))
    titles = [f"{name}, {policy}" for _, name in measures for policy in POLICIES]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, shared_yaxes="rows", vertical_spacing=0.14)
    for column, policy in enumerate(POLICIES, 1):
        for tier, colour in zip(TIERS, COLOURS, strict=True):
            each = [worth(rows, Base(sizes, policy), tier) for sizes in SIZES]
            for at, (name, _) in enumerate(measures, 1):
                errors = [getattr(one, f"{name}_error") for one in each]
                figure.add_bar(
                    x=[" + ".join(f"{gib:,}" for gib in sizes) for sizes in SIZES], y=[getattr(one, name) for one in each],
                    error_y={"type": "data", "array": errors}, name=tier, legendgroup=tier, marker_color=colour,
                    showlegend=at == column == 1, row=at, col=column,
                )  # fmt: skip
    figure.update_xaxes(title="GPU + CPU + disk (GiB)", row=2)
    return figure.update_layout(template="plotly_white", width=1100, height=760, legend={"orientation": "h", "y": 1.12})


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": CONVERSATION}, limit=6_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
