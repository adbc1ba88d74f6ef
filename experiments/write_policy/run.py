"""Which write policy is best over GPU and CPU memory, and where does the clock overturn the hit rate?

Llama 3 8B on one H200, the Mooncake conversation trace at half its rate: 1.7 requests a second, which the GPU can serve at every
place here. The hit rate is that of a replay, one request at a time; the time to first token (TTFT) that of a simulation, with the
host link of the H200, 55.4 GB/s each way, and with one of 8 GB/s. Timestamps of the trace go in steps of 3 s, 6 s at this rate,
and ten requests share one: half of a mean TTFT is the wait for others of the same burst.

Claims:

1. in the replay write_back hits most at every place;
2. with the fast link the policy that hits most is the soonest at every place, within 2% of the least mean TTFT;
3. with the slow link it is not: somewhere the policy that hits most is more than 2% slower than another;
4. the simulated hit rates are within a point of the replay's everywhere.

Exits with 1 if a claim fails.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import kvsim
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACE = HERE.parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
COMMAND = "python experiments/write_policy/run.py"

POLICIES = ("write_through", "write_through_selective", "write_back")
COLOURS = ("#3d8fd1", "#0a9e74", "#d55e00")
GPU_GIB = (40, 60, 100)
CPU_GIB = (100, 400, 1600)
LINKS = {"fast": 55.4, "slow": 8.0}
"""GB/s of the host link, each way. Both ways together carry 1.82 times as much, as was measured of the H200's."""
RATE = 0.5
MARGIN = 1.02
"""Means of TTFT that differ by less count as equal."""


@dataclass(frozen=True)
class Place:
    """Sizes of the tiers."""

    gpu: int
    cpu: int

    def __str__(self) -> str:
        return f"{self.gpu} + {self.cpu:,} GiB"


@dataclass(frozen=True)
class Cell:
    """One policy at one place."""

    place: Place
    policy: str

    def overrides(self) -> tuple[str, ...]:
        tiers = f"tiers.gpu.capacity={self.place.gpu}GiB", f"tiers.cpu.capacity={self.place.cpu}GiB"
        return *tiers, f"placement={self.policy}"


@dataclass(frozen=True)
class Row:
    """What the runs of a cell gave; by link where there is a clock."""

    replayed: float
    hit_rate: dict[str, float]
    ttft_s: dict[str, float]
    p99_s: dict[str, float]
    written_gb: dict[str, float]


def places() -> list[Place]:
    return [Place(gpu, cpu) for gpu in GPU_GIB for cpu in CPU_GIB]


def cells() -> Iterator[Cell]:
    yield from (Cell(place, policy) for place in places() for policy in POLICIES)


@cache
def load(path: str, limit: int | None) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit, rate=RATE)


def run(path: str, limit: int | None, cell: Cell) -> Row:
    trace = load(path, limit)
    row = Row(kvsim.replay(trace, *cell.overrides()).hit_rate, {}, {}, {}, {})
    for link, gb_per_s in LINKS.items():
        speed = [f"hardware.{way}_bytes_per_s={gb_per_s}e9" for way in ("host_to_device", "device_to_host")]
        both = f"hardware.both_directions_bytes_per_s={1.82 * gb_per_s}e9"
        result = kvsim.simulate(trace, *cell.overrides(), *speed, both)
        record = result.record
        row.hit_rate[link] = result.hit_rate
        row.ttft_s[link], row.p99_s[link] = record["ttft_s"]["mean"], record["ttft_s"]["p99"]
        row.written_gb[link] = record["links"].get("gpu-cpu", {"bytes": 0})["bytes"] / 1e9
    return row


def measure(path: str, limit: int | None) -> dict[Cell, Row]:
    """All runs, two processes at a time."""
    every = list(cells())
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        return dict(zip(every, pool.map(run, [path] * len(every), [limit] * len(every), every), strict=True))


@dataclass(frozen=True)
class Verdict:
    """At one place and link, the policy that hits most in the replay and the one with the least mean TTFT."""

    place: Place
    most_hits: str
    soonest: str
    loss: float
    """How much slower the first is than the second; 0.3 is 30%."""

    @property
    def is_overturned(self) -> bool:
        return 1 + self.loss > MARGIN


def verdicts(rows: dict[Cell, Row], link: str) -> list[Verdict]:
    found = []
    for place in places():
        here = {policy: rows[Cell(place, policy)] for policy in POLICIES}
        most = max(POLICIES, key=lambda policy: here[policy].replayed)
        soonest = min(POLICIES, key=lambda policy: here[policy].ttft_s[link])
        found.append(Verdict(place, most, soonest, here[most].ttft_s[link] / here[soonest].ttft_s[link] - 1))
    return found


def claims(rows: dict[Cell, Row]) -> list[tuple[str, str, bool]]:
    """(claim, what was measured, whether it holds)."""
    fast, slow = verdicts(rows, "fast"), verdicts(rows, "slow")
    lead = min(fast, key=lambda verdict: _lead(rows, verdict.place))
    apart = max(rows, key=lambda cell: _apart(rows[cell]))
    return [
        (
            "in the replay write_back hits most at every place",
            f"it leads the next one by {100 * _lead(rows, lead.place):+.2f} points at least, {lead.place}",
            all(verdict.most_hits == "write_back" for verdict in fast),
        ),
        (
            f"over {LINKS['fast']:g} GB/s the policy that hits most is the soonest at every place",
            _overturned(fast),
            not any(verdict.is_overturned for verdict in fast),
        ),
        (
            f"over {LINKS['slow']:g} GB/s it is not, somewhere",
            _overturned(slow),
            any(verdict.is_overturned for verdict in slow),
        ),
        (
            "simulated hit rates are within a point of the replay's",
            f"{100 * _apart(rows[apart]):.2f} points apart at most, {apart.policy}, {apart.place}",
            _apart(rows[apart]) <= 0.01,
        ),
    ]


def _lead(rows: dict[Cell, Row], place: Place) -> float:
    others = max(rows[Cell(place, policy)].replayed for policy in POLICIES if policy != "write_back")
    return rows[Cell(place, "write_back")].replayed - others


def _apart(row: Row) -> float:
    return max(abs(rate - row.replayed) for rate in row.hit_rate.values())


def _overturned(found: list[Verdict]) -> str:
    count = sum(verdict.is_overturned for verdict in found)
    worst = max(found, key=lambda verdict: verdict.loss)
    return (
        f"overturned at {count} of {len(found)} places, at most by {worst.loss:.2%}: "
        f"{worst.most_hits} after {worst.soonest}, {worst.place}"
    )


def finding(rows: dict[Cell, Row]) -> str:
    """Three sentences, their figures from the runs."""
    fast, slow = verdicts(rows, "fast"), verdicts(rows, "slow")
    slowest = max(slow, key=lambda verdict: verdict.loss)
    behind = rows[Cell(slowest.place, slowest.most_hits)]
    ahead = rows[Cell(slowest.place, slowest.soonest)]
    wins = {policy: sum(verdict.soonest == policy for verdict in slow) for policy in POLICIES}
    named = ", ".join(f"{policy} at {count}" for policy, count in wins.items() if count)
    return (
        f"Over {LINKS['fast']:g} GB/s the policy that hits most in the replay is the soonest, or within {MARGIN - 1:.0%} of it, "
        f"at {sum(not verdict.is_overturned for verdict in fast)} of {len(fast)} places. "
        f"Over {LINKS['slow']:g} GB/s that is so at {sum(not verdict.is_overturned for verdict in slow)} places, and the soonest "
        f"of the {len(slow)} is {named}. "
        f"The clock overturns most at {slowest.place}: {slowest.most_hits} hits {behind.replayed:.2%} against "
        f"{ahead.replayed:.2%} of {slowest.soonest} and answers after {behind.ttft_s['slow']:.2f} s against "
        f"{ahead.ttft_s['slow']:.2f} s, since a page that has to be written out when room is needed makes its request wait."
    )


def write_markdown(path: Path, rows: dict[Cell, Row]) -> None:
    lines = [
        "# Write policies: hit rate and time to first token",
        "",
        "Llama 3 8B on one H200, the Mooncake conversation trace at half its rate, pages of 512 tokens; made by",
        f"`{COMMAND}`. Hit tokens per prompt token; mean TTFT. All figures are in [results.csv](results.csv).",
        "",
        "![Hit rate and mean TTFT by policy, GPU and CPU memory, and link](results.png)",
        "",
        "| claim | measured | |",
        "|---|---|---|",
        *(f"| {claim} | {measured} | {'holds' if holds else 'FAILS'} |" for claim, measured, holds in claims(rows)),
        "",
        finding(rows),
        "",
        "## Hit rate, replayed",
        "",
        *table(rows, lambda row: row.replayed, "{:.4f}", max),
    ]
    for link, gb_per_s in LINKS.items():
        lines += ["", f"## Mean TTFT (s), {gb_per_s:g} GB/s", "", *table(rows, lambda row: row.ttft_s[link], "{:.3f}", min)]  # noqa: B023
    path.write_text("\n".join(lines) + "\n")


def table(rows: dict[Cell, Row], value: Callable[[Row], float], text: str, best: Callable[[Iterable[float]], float]) -> list[str]:
    """One row a place, the best value in bold."""
    lines = [f"| GPU + CPU | {' | '.join(POLICIES)} |", "|---" * (len(POLICIES) + 1) + "|"]
    for place in places():
        values = [value(rows[Cell(place, policy)]) for policy in POLICIES]
        texts = [f"**{text.format(one)}**" if one == best(values) else text.format(one) for one in values]
        lines.append(f"| {place} | {' | '.join(texts)} |")
    return lines


def write_csv(path: Path, rows: dict[Cell, Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            (
                "gpu_gib",
                "cpu_gib",
                "policy",
                "link_gb_per_s",
                "replayed_hit_rate",
                "hit_rate",
                "ttft_mean_s",
                "ttft_p99_s",
                "written_gb",
            )
        )
        for cell, row in rows.items():
            for link, gb_per_s in LINKS.items():
                rates = f"{row.replayed:.6f}", f"{row.hit_rate[link]:.6f}"
                times = f"{row.ttft_s[link]:.4f}", f"{row.p99_s[link]:.4f}"
                writer.writerow(
                    (cell.place.gpu, cell.place.cpu, cell.policy, gb_per_s, *rates, *times, f"{row.written_gb[link]:.1f}")
                )


def draw(folder: Path, rows: dict[Cell, Row]) -> None:
    """``results.html``, and ``results.png`` from it where there is a Chromium."""
    from plotly.subplots import make_subplots

    names = ["hit rate, replayed", *(f"mean TTFT (s), {gb_per_s:g} GB/s" for gb_per_s in LINKS.values())]
    titles = [f"{name}, GPU {gpu} GiB" for name in names for gpu in GPU_GIB]
    figure = make_subplots(rows=len(names), cols=len(GPU_GIB), subplot_titles=titles, shared_yaxes="rows", vertical_spacing=0.1)
    for column, gpu in enumerate(GPU_GIB, 1):
        for policy, colour in zip(POLICIES, COLOURS, strict=True):
            here = [rows[Cell(Place(gpu, cpu), policy)] for cpu in CPU_GIB]
            for at, values in enumerate(
                ([row.replayed for row in here], *([row.ttft_s[link] for row in here] for link in LINKS)), 1
            ):
                figure.add_scatter(
                    x=[f"{cpu:,}" for cpu in CPU_GIB], y=values, name=policy, legendgroup=policy, mode="lines+markers",
                    showlegend=column == 1 and at == 1, line={"color": colour, "width": 2}, row=at, col=column,
                )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="CPU memory (GiB)", row=len(names))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(tickformat=".0%", row=1)
    figure.update_layout(
        template="plotly_white", width=1100, height=900, legend={"orientation": "h", "y": 1.08}, margin={"t": 120},
        title="Write policies: the policy that hits most, and the one that answers first",
    )  # fmt: skip
    page = folder / "results.html"
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(page, folder / "results.png", width=1116, height=916)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="the Mooncake conversation trace")
    parser.add_argument("--limit", type=int, help="play this many requests only; the claims are about all of them")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the results")
    arguments = parser.parse_args()
    if not arguments.trace.exists():
        parser.error(f"no trace at {arguments.trace}: name it with --trace")
    rows = measure(str(arguments.trace.resolve()), arguments.limit)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.output / "results.csv", rows)
    write_markdown(arguments.output / "results.md", rows)
    draw(arguments.output, rows)
    print((arguments.output / "results.md").read_text())
    return 0 if arguments.limit or all(holds for _, _, holds in claims(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
