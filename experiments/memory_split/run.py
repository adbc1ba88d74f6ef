"""One more GiB of memory: for the GPU, the CPU or the disk?

Llama 3 8B on one H200, the first 6,000 requests of the Mooncake conversation trace at half its rate, 1.7 a second, which the GPU
can serve at every base. From each base, three sizes and a write policy, each tier in turn gets 8, 16 and 32 GiB more. The worth
of a GiB is the slope of a line through these four runs (least squares), in points of hit rate and in milliseconds of mean time to
first token (TTFT) saved; the error is the slope's standard error. The disk is the H200 host's: it reads 3.2 and writes 3.0 GB/s,
and is read at admission.

Claims:

1. in TTFT a GiB of the GPU is worth most at every base;
2. under write_back a GiB is worth the same hit rate in each tier, within .05 points, since tiers hold different pages;
3. under write_through a GiB of the GPU adds less hit rate than one of the CPU at every base, since the CPU has all that it has;
4. what a GiB of the CPU saves in TTFT falls from each base to the next larger one.

Exits with 1 if a claim fails.
"""

import argparse
import csv
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import kvsim
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACE = HERE.parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
COMMAND = "python experiments/memory_split/run.py"

REQUESTS = 6_000
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
    """From where memory is added."""

    sizes: tuple[int, int, int]
    policy: str

    def __str__(self) -> str:
        return f"{' + '.join(f'{gib:,}' for gib in self.sizes)} GiB, {self.policy}"


@dataclass(frozen=True)
class Cell:
    """A base with so much more in one tier; 0 more stands for the base itself."""

    base: Base
    tier: str
    more_gib: int

    def overrides(self) -> tuple[str, ...]:
        gib = {tier: size + self.more_gib * (tier == self.tier) for tier, size in zip(TIERS, self.base.sizes, strict=True)}
        return *(f"tiers.{tier}.capacity={size}GiB" for tier, size in gib.items()), f"placement={self.base.policy}"


@dataclass(frozen=True)
class Row:
    """What a run gave."""

    hit_rate: float
    ttft_s: float


@dataclass(frozen=True)
class Worth:
    """What a GiB adds, with its standard error."""

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


def run(path: str, limit: int, cell: Cell) -> Row:
    result = kvsim.simulate(load(path, limit), *cell.overrides())
    return Row(result.hit_rate, result.record["ttft_s"]["mean"])


def measure(path: str, limit: int) -> Rows:
    """All runs, two processes at a time."""
    every = cells()
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        return dict(zip(every, pool.map(run, [path] * len(every), [limit] * len(every), every), strict=True))


def worth(rows: Rows, base: Base, tier: str) -> Worth:
    here = [rows[Cell(base, TIERS[0], 0)], *(rows[Cell(base, tier, more)] for more in MORE_GIB)]
    points, points_error = slope([100 * row.hit_rate for row in here])
    ms, ms_error = slope([-1000 * row.ttft_s for row in here])
    return Worth(points, points_error, ms, ms_error)


def slope(values: list[float]) -> tuple[float, float]:
    """Least-squares slope of values at 0 and ``MORE_GIB``, and its standard error."""
    x = np.array([0, *MORE_GIB], dtype=float)
    y = np.array(values)
    x -= x.mean()
    steepness = float(x @ y / (x @ x))
    left = y - y.mean() - steepness * x
    return steepness, float(np.sqrt(left @ left / (len(x) - 2) / (x @ x)))


def claims(rows: Rows) -> list[tuple[str, str, bool]]:
    """(claim, what was measured, whether it holds)."""
    found = {base: {tier: worth(rows, base, tier) for tier in TIERS} for base in bases()}
    ahead = {base: each["gpu"].saved_ms - max(each["cpu"].saved_ms, each["disk"].saved_ms) for base, each in found.items()}
    closest = min(ahead, key=lambda base: ahead[base])
    back = {base: _spread([one.points for one in each.values()]) for base, each in found.items() if base.policy == "write_back"}
    widest = max(back, key=lambda base: back[base])
    through = {base: each["cpu"].points - each["gpu"].points for base, each in found.items() if base.policy == "write_through"}
    least = min(through, key=lambda base: through[base])
    falls = {policy: [found[Base(sizes, policy)]["cpu"].saved_ms for sizes in SIZES] for policy in POLICIES}
    return [
        (
            "in TTFT a GiB of the GPU is worth most at every base",
            f"ahead by {ahead[closest]:+.2f} ms/GiB at least, {closest}",
            ahead[closest] > 0,
        ),
        (
            "under write_back a GiB is worth the same hit rate in each tier",
            f"{back[widest]:.3f} points/GiB apart at most, {widest}",
            back[widest] <= EQUAL_POINTS,
        ),
        (
            "under write_through a GiB of the GPU adds less hit rate than one of the CPU",
            f"{through[least]:+.3f} points/GiB less at least, {least}",
            through[least] > 0,
        ),
        (
            "what a GiB of the CPU saves in TTFT falls with the base",
            "; ".join(f"{policy}: " + ", ".join(f"{ms:.2f}" for ms in saved) + " ms" for policy, saved in falls.items()),
            all(saved == sorted(saved, reverse=True) for saved in falls.values()),
        ),
    ]


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


def finding(rows: Rows) -> str:
    """Three sentences, their figures from the runs."""
    found = {base: {tier: worth(rows, base, tier) for tier in TIERS} for base in bases()}
    first, last = Base(SIZES[0], POLICIES[0]), Base(SIZES[-1], POLICIES[0])

    def ttft(sizes: tuple[int, int, int], policy: str) -> float:
        return rows[Cell(Base(sizes, policy), TIERS[0], 0)].ttft_s

    def saved(base: Base) -> str:
        return f"{found[base]['gpu'].saved_ms:.1f}, {found[base]['cpu'].saved_ms:.1f} and {found[base]['disk'].saved_ms:.1f} ms"

    through = [found[Base(sizes, "write_through")] for sizes in SIZES]
    back = [found[Base(sizes, "write_back")] for sizes in SIZES]
    slower = [ttft(sizes, "write_back") / ttft(sizes, "write_through") for sizes in SIZES]
    disk, cpu = [one["disk"].points for one in through], [one["cpu"].points for one in back]
    return (
        f"From {first} a GiB more on the GPU, in the CPU and on disk saves {saved(first)} of mean TTFT, from {last} "
        f"{saved(last)}: on the GPU it lets more requests run at a time, whatever is reused. "
        f"In hit rate, under write_through only the disk's counts, {min(disk):.3f} to {max(disk):.3f} points, as each tier has "
        f"all that those above it have; under write_back the three are alike, {min(cpu):.3f} to {max(cpu):.3f} points for the "
        "CPU's. "
        f"Yet write_back takes {min(slower):.1f} to {max(slower):.1f} times as long to the first token as write_through from the "
        "same base, though it hits more: what the GPU evicts waits for room in the CPU tier, and that for a disk of 3 GB/s."
    )


def write_markdown(path: Path, rows: Rows, limit: int) -> None:
    lines = [
        "# One more GiB: GPU, CPU or disk?",
        "",
        f"Llama 3 8B on one H200, {limit:,} requests of the Mooncake conversation trace at half its rate; made by",
        f"`{COMMAND}`. What a GiB more is worth, ± its standard error; all runs are in [results.csv](results.csv).",
        "",
        "![What a GiB more in each tier adds to the hit rate and saves of TTFT](results.png)",
        "",
        "| claim | measured | |",
        "|---|---|---|",
        *(f"| {claim} | {measured} | {'holds' if holds else 'FAILS'} |" for claim, measured, holds in claims(rows)),
        "",
        finding(rows),
        "",
        "| base | hit rate | mean TTFT (s) | points/GiB: GPU | CPU | disk | ms/GiB: GPU | CPU | disk |",
        "|---" * 9 + "|",
    ]
    for base in bases():
        row = rows[Cell(base, TIERS[0], 0)]
        each = [worth(rows, base, tier) for tier in TIERS]
        points = [f"{one.points:.3f} ± {one.points_error:.3f}" for one in each]
        saved = [f"{one.saved_ms:.2f} ± {one.saved_ms_error:.2f}" for one in each]
        lines.append(f"| {base} | {row.hit_rate:.4f} | {row.ttft_s:.3f} | {' | '.join(points)} | {' | '.join(saved)} |")
    path.write_text("\n".join(lines) + "\n")


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("gpu_gib", "cpu_gib", "disk_gib", "policy", "tier", "more_gib", "hit_rate", "ttft_mean_s"))
        for cell, row in rows.items():
            tier = cell.tier if cell.more_gib else ""
            results = f"{row.hit_rate:.6f}", f"{row.ttft_s:.4f}"
            writer.writerow((*cell.base.sizes, cell.base.policy, tier, cell.more_gib, *results))


def draw(folder: Path, rows: Rows) -> None:
    """``results.html``, and ``results.png`` from it where there is a Chromium."""
    from plotly.subplots import make_subplots

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
    figure.update_layout(template="plotly_white", width=1100, height=760, legend={"orientation": "h", "y": 1.12})
    page = folder / "results.html"
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(page, folder / "results.png", width=1116, height=776)


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
