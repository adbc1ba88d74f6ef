"""Does a time to live keep agents' caches better than LRU while their tools run?

WEKA's agent sessions, the 8,000 requests that arrive first, in a closed loop: a request waits for the answer before it and then
for its tool, as long as in the recording. Llama 3 8B on eight H200 without lower tiers: its prompts of 120,000 tokens are 15 GiB
of KV each. 16 sessions at a time are a light load, 64 about what the GPUs can do with all of their memory; the load of a closed
loop cannot grow beyond that, it only makes everybody wait. Policies:

lru         least recently used first
ttl         what no session has used for 300 s first
continuum   the time to live is learned from the pauses, the queue and the cost of computing anew (ttl_s=learned)
belady      the bound: replay only, it needs the future

Claims:

1. a fixed time to live hits in the replay what LRU hits, to .0001, since the first to expire is the least recently used;
2. continuum hits at least as much as LRU in the replay, everywhere (by no more than .001 less);
3. where LRU misses more than a tenth, simulated, continuum's mean TTFT is at least 5% below LRU's;
4. continuum closes less than half of what separates LRU from Belady's bound, everywhere.

Exits with 1 if a claim fails.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import kvsim
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACE = HERE.parents[2] / "shared" / "traces" / "weka_claude_code_traces_rle.jsonl.gz"
COMMAND = "python experiments/agents/run.py"

REQUESTS = 8_000
SESSIONS = (16, 32, 64)
GIB = (200, 400, 800)
GPUS = 8
POLICIES = {
    "lru": ("eviction=lru",),
    "ttl": ("eviction=ttl",),
    "continuum": ("eviction=ttl", "eviction.ttl_s=learned"),
}
BOUND = "belady"
COLOURS = {"lru": "#3d8fd1", "ttl": "#0a9e74", "continuum": "#d55e00", BOUND: "#888888"}
SHORT_OF_MEMORY = 0.9
"""Simulated hit rate of LRU below which memory counts as short."""


@dataclass(frozen=True)
class Cell:
    """One policy, so many sessions at a time, so much memory."""

    sessions: int
    gib: int
    policy: str


@dataclass(frozen=True)
class Row:
    """What the runs of a cell gave; of the bound only the first."""

    replayed: float
    hit_rate: float = float("nan")
    ttft_s: float = float("nan")
    p99_s: float = float("nan")
    retractions: int = 0
    simulated_s: float = float("nan")


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    return [Cell(sessions, gib, policy) for sessions in SESSIONS for gib in GIB for policy in (*POLICIES, BOUND)]


@cache
def load(path: str, limit: int, sessions: int) -> Trace:
    return kvsim.load_trace("weka", path=path, page_tokens=64, limit=limit, arrivals="closed_loop", concurrent_sessions=sessions)


def run(path: str, limit: int, cell: Cell) -> Row:
    trace = load(path, limit, cell.sessions)
    capacity = f"tiers.gpu.capacity={cell.gib}GiB"
    if cell.policy == BOUND:
        return Row(kvsim.replay(trace, f"eviction={BOUND}", capacity, "replay.hold_output=false").hit_rate)
    settings = (*POLICIES[cell.policy], capacity)
    gpus = (f"hardware.gpus={GPUS}",)
    # What is learned depends on what computing anew costs, so that its replay knows the machine, too.
    replayed = kvsim.replay(trace, *settings, *(gpus if "learned" in settings[-2] else ())).hit_rate
    result = kvsim.simulate(trace, *settings, *gpus)
    times, record = result.record["ttft_s"], result.record
    return Row(replayed, result.hit_rate, times["mean"], times["p99"], record["retractions"], record["simulated_s"])


def measure(path: str, limit: int) -> Rows:
    """All runs, two processes at a time."""
    every = cells()
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        return dict(zip(every, pool.map(run, [path] * len(every), [limit] * len(every), every), strict=True))


def places() -> list[tuple[int, int]]:
    return [(sessions, gib) for sessions in SESSIONS for gib in GIB]


def claims(rows: Rows) -> list[tuple[str, str, bool]]:
    """(claim, what was measured, whether it holds)."""

    def at(place: tuple[int, int], policy: str) -> Row:
        return rows[Cell(*place, policy)]

    apart = {place: abs(at(place, "ttl").replayed - at(place, "lru").replayed) for place in places()}
    gain = {place: at(place, "continuum").replayed - at(place, "lru").replayed for place in places()}
    short = [place for place in places() if at(place, "lru").hit_rate < SHORT_OF_MEMORY]
    ttft = {place: at(place, "continuum").ttft_s / at(place, "lru").ttft_s - 1 for place in short}
    closed = {
        place: gain[place] / left for place in places() if (left := at(place, BOUND).replayed - at(place, "lru").replayed) > 0.001
    }
    widest, least = max(apart, key=lambda p: apart[p]), min(gain, key=lambda p: gain[p])
    slower = max(ttft, key=lambda p: ttft[p], default=None)
    sooner = min(ttft, key=lambda p: ttft[p], default=None)
    most = max(closed, key=lambda p: closed[p], default=None)
    return [
        (
            "a fixed time to live hits what LRU hits",
            f"{100 * apart[widest]:.2f} points apart at most, {_name(widest)}",
            apart[widest] <= 0.0001,
        ),
        (
            "continuum hits at least as much as LRU in the replay",
            f"{100 * gain[least]:+.2f} points at worst, {_name(least)}",
            gain[least] >= -0.001,
        ),
        (
            "where LRU misses more than a tenth, continuum's mean TTFT is at least 5% below LRU's",
            f"{ttft[sooner]:+.1%} at best, {_name(sooner)}; {ttft[slower]:+.1%} at worst, {_name(slower)}"
            if slower and sooner
            else "nowhere",
            bool(ttft) and max(ttft.values()) <= -0.05,
        ),
        (
            "continuum closes less than half of what separates LRU from Belady",
            f"{closed[most]:.0%} at most, {_name(most)}" if most else "nothing separates them",
            not closed or max(closed.values()) < 0.5,
        ),
    ]


def _name(place: tuple[int, int]) -> str:
    return f"{place[0]} sessions, {place[1]} GiB"


def finding(rows: Rows) -> str:
    """Three sentences, their figures from the runs."""
    ratio = {p: rows[Cell(*p, "continuum")].ttft_s / rows[Cell(*p, "lru")].ttft_s - 1 for p in places()}
    falls = {p: rows[Cell(*p, "lru")].replayed - rows[Cell(*p, "lru")].hit_rate for p in places()}
    furthest = max(falls, key=lambda p: abs(falls[p]))
    lru = rows[Cell(*furthest, "lru")]
    gains = f"{100 * _gain(rows, min):+.1f} to {100 * _gain(rows, max):+.1f} points of hit rate in the replay"
    delays = f"{min(ratio.values()):+.1%} to {max(ratio.values()):+.1%} of mean TTFT"
    left = f"{100 * _left(rows, min):.1f} to {100 * _left(rows, max):.1f} points from LRU to Belady's bound"
    return (
        f"As an order of eviction Continuum is LRU or a little worse, {gains} and {delays}: tools pause for longer than their "
        "prompts take to compute anew, so most learned times are 0. "
        f"There is something to gain, {left}, most where memory is short. "
        f"The clock matters more than the policy: at {_name(furthest)} LRU hits {lru.replayed:.1%} in the order of the recording "
        f"and {lru.hit_rate:.1%} in the closed loop, where all sessions wait in one queue, come back one after the other, and "
        "each finds that the others have pushed it out."
    )


def _gain(rows: Rows, of: Callable[[Iterable[float]], float]) -> float:
    return float(of(rows[Cell(*p, "continuum")].replayed - rows[Cell(*p, "lru")].replayed for p in places()))


def _left(rows: Rows, of: Callable[[Iterable[float]], float]) -> float:
    return float(of(rows[Cell(*p, BOUND)].replayed - rows[Cell(*p, "lru")].replayed for p in places()))


def write_markdown(path: Path, rows: Rows, limit: int) -> None:
    lines = [
        "# Agents: LRU, a time to live, Continuum",
        "",
        f"Llama 3 8B on {GPUS} H200, {limit:,} requests of WEKA's agent sessions in a closed loop, pages of 64 tokens; made by",
        f"`{COMMAND}`. All figures are in [results.csv](results.csv).",
        "",
        "![Hit rate replayed, hit rate simulated and mean TTFT by policy, memory and sessions](results.png)",
        "",
        "| claim | measured | |",
        "|---|---|---|",
        *(f"| {claim} | {measured} | {'holds' if holds else 'FAILS'} |" for claim, measured, holds in claims(rows)),
        "",
        finding(rows),
    ]
    for title, names, value in (
        ("Hit rate, replayed", (*POLICIES, BOUND), lambda row: f"{row.replayed:.4f}"),
        ("Hit rate, simulated", tuple(POLICIES), lambda row: f"{row.hit_rate:.4f}"),
        ("Mean TTFT (s), in brackets the 99th percentile", tuple(POLICIES), lambda row: f"{row.ttft_s:.3f} ({row.p99_s:.1f})"),
    ):
        lines += ["", f"## {title}", "", f"| sessions, GiB | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for place in places():
            lines.append(f"| {_name(place)} | {' | '.join(value(rows[Cell(*place, name)]) for name in names)} |")
    path.write_text("\n".join(lines) + "\n")


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            (
                "sessions",
                "gib",
                "policy",
                "replayed_hit_rate",
                "hit_rate",
                "ttft_mean_s",
                "ttft_p99_s",
                "retractions",
                "simulated_s",
            )
        )
        for cell, row in rows.items():
            numbers = (row.hit_rate, row.ttft_s, row.p99_s, row.retractions, row.simulated_s)
            simulated = [""] * 5 if cell.policy == BOUND else [f"{number:.4f}" for number in numbers]
            writer.writerow((cell.sessions, cell.gib, cell.policy, f"{row.replayed:.6f}", *simulated))


def draw(folder: Path, rows: Rows) -> None:
    """``results.html``, and ``results.png`` from it where there is a Chromium."""
    from plotly.subplots import make_subplots

    measures = (("replayed", "hit rate, replayed"), ("hit_rate", "hit rate, simulated"), ("ttft_s", "mean TTFT (s)"))
    titles = [f"{name}, {sessions} sessions" for _, name in measures for sessions in SESSIONS]
    figure = make_subplots(rows=3, cols=len(SESSIONS), subplot_titles=titles, shared_yaxes="rows", vertical_spacing=0.1)
    dashes = {"ttl": "dash", BOUND: "dot"}
    for column, sessions in enumerate(SESSIONS, 1):
        for at, (name, _) in enumerate(measures, 1):
            for policy in (*POLICIES, BOUND) if name == "replayed" else POLICIES:
                values = [getattr(rows[Cell(sessions, gib, policy)], name) for gib in GIB]
                figure.add_scatter(
                    x=[str(gib) for gib in GIB], y=values, name=policy, legendgroup=policy, mode="lines+markers",
                    showlegend=at == column == 1, row=at, col=column,
                    line={"color": COLOURS[policy], "width": 2, "dash": dashes.get(policy, "solid")},
                )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="GPU memory (GiB)", row=3)
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    figure.update_yaxes(type="log", tickformat="", rangemode="normal", row=3)
    figure.update_layout(template="plotly_white", width=1100, height=940, legend={"orientation": "h", "y": 1.09})
    page = folder / "results.html"
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(page, folder / "results.png", width=1116, height=956)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="WEKA's agent sessions")
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
