"""Does a time to live keep agents' KV in the cache better than LRU while their tools run?

WEKA's agent sessions, the 8,000 earliest requests, in a closed loop: a request arrives when the previous answer is complete and
its tool has run for as long as it did in the recording. Llama 3 8B on eight H200 without CPU or disk tier; prompts of 120,000
tokens take 15 GiB of KV each. 16 sessions at a time are a light load; 64 are about what the GPUs can serve with all of their
memory. In a closed loop more sessions add no load, only waiting time. Policies:

lru         evict the least recently used page first
ttl         evict pages first that no session has used for 300 s
continuum   learn the time to live from the pauses, the queue and the cost of recomputing (ttl_s=learned)
belady      the bound; replay only, because it needs the future

Claims:

1. in the replay a fixed time to live hits what LRU hits, within .0001: the first page to expire is the least recently used one;
2. in the replay continuum nowhere hits less than LRU (by more than .001);
3. in the simulation, wherever LRU misses more than a tenth, continuum's mean TTFT is at least 5% below LRU's;
4. continuum closes less than half of the gap between LRU and Belady's bound everywhere.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import nan

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import WEKA, Claim, Study, capacities, highest, lowest, opening, section
from kvsim.trace.base import Trace

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
class Place:
    """A load and a memory size at which the policies are compared."""

    sessions: int
    gib: int

    def __str__(self) -> str:
        return f"{self.sessions} sessions, {self.gib} GiB"


@dataclass(frozen=True)
class Cell:
    """One policy at one place."""

    place: Place
    policy: str


@dataclass(frozen=True)
class Row:
    """Results of a cell; the bound has only the replayed hit rate."""

    replayed: float
    hit_rate: float = nan
    ttft_s: float = nan
    p99_s: float = nan
    retractions: int = 0
    simulated_s: float = nan


Rows = dict[Cell, Row]


def places() -> list[Place]:
    return [Place(sessions, gib) for sessions in SESSIONS for gib in GIB]


def cells() -> list[Cell]:
    return [Cell(place, policy) for place in places() for policy in (*POLICIES, BOUND)]


@cache
def load(path: str, limit: int, sessions: int) -> Trace:
    return kvsim.load_trace("weka", path=path, page_tokens=64, limit=limit, arrivals="closed_loop", concurrent_sessions=sessions)


def run(options: Namespace, cell: Cell) -> Row:
    trace = load(options.trace, options.limit, cell.place.sessions)
    capacity = capacities(gpu=cell.place.gib)
    if cell.policy == BOUND:
        return Row(kvsim.replay(trace, f"eviction={BOUND}", *capacity, "replay.hold_output=false").hit_rate)
    settings = (*POLICIES[cell.policy], *capacity)
    gpus = (f"hardware.gpus={GPUS}",)
    # The learned time depends on the cost of recomputing, so its replay needs the hardware too.
    replayed = kvsim.replay(trace, *settings, *(gpus if cell.policy == "continuum" else ())).hit_rate
    result = kvsim.simulate(trace, *settings, *gpus, "hardware.allreduce_bytes_per_s=null")
    times, record = result.record["ttft_s"], result.record
    return Row(replayed, result.hit_rate, times["mean"], times["p99"], record["retractions"], record["simulated_s"])


def gain(rows: Rows, policy: str) -> dict[Place, float]:
    """Replayed hit rate of a policy minus that of LRU."""
    return {place: rows[Cell(place, policy)].replayed - rows[Cell(place, "lru")].replayed for place in places()}


def delay(rows: Rows) -> dict[Place, float]:
    """Mean TTFT of continuum relative to LRU's; 0.1 is 10% slower."""
    return {place: rows[Cell(place, "continuum")].ttft_s / rows[Cell(place, "lru")].ttft_s - 1 for place in places()}


def claims(rows: Rows) -> list[Claim]:
    apart = {place: abs(points) for place, points in gain(rows, "ttl").items()}
    gains, left = gain(rows, "continuum"), gain(rows, BOUND)
    delays = {place: ratio for place, ratio in delay(rows).items() if rows[Cell(place, "lru")].hit_rate < SHORT_OF_MEMORY}
    closed = {place: gains[place] / left[place] for place in places() if left[place] > 0.001}
    (widest, gap), (least, worst) = highest(apart), lowest(gains)
    most = max(closed, key=closed.__getitem__, default=None)
    sooner, later = (of(delays, key=delays.__getitem__, default=None) for of in (min, max))
    return [
        Claim("a fixed time to live hits what LRU hits", f"at most {100 * gap:.2f} points apart ({widest})", gap <= 0.0001),
        Claim(
            "in the replay continuum nowhere hits less than LRU",
            f"{100 * worst:+.2f} points at worst ({least})",
            worst >= -0.001,
        ),
        Claim(
            "where LRU misses more than a tenth, continuum's mean TTFT is at least 5% below LRU's",
            f"{delays[sooner]:+.1%} at best ({sooner}), {delays[later]:+.1%} at worst ({later})"
            if sooner and later
            else "LRU misses less everywhere",
            bool(delays) and max(delays.values()) <= -0.05,
        ),
        Claim(
            "continuum closes less than half of the gap between LRU and Belady",
            f"at most {closed[most]:.0%} ({most})" if most else "there is no gap",
            not closed or max(closed.values()) < 0.5,
        ),
    ]


def finding(rows: Rows) -> str:
    gains, left, delays = gain(rows, "continuum").values(), gain(rows, BOUND).values(), delay(rows).values()
    falls = {place: rows[Cell(place, "lru")].replayed - rows[Cell(place, "lru")].hit_rate for place in places()}
    furthest = max(falls, key=lambda place: abs(falls[place]))
    lru = rows[Cell(furthest, "lru")]
    return (
        f"As an eviction order Continuum equals LRU or is slightly worse: {100 * min(gains):+.1f} to {100 * max(gains):+.1f} "
        f"points of hit rate in the replay. In the closed loop its mean TTFT differs from LRU's by {min(delays):+.1%} to "
        f"{max(delays):+.1%}. Tools run for longer than their prompts take to recompute, so most learned times are 0. "
        f"There is something to gain: Belady's bound is {100 * min(left):.1f} to {100 * max(left):.1f} points above LRU, most "
        "where memory is short. "
        f"The clock matters more than the policy: with {furthest}, LRU hits {lru.replayed:.1%} in recorded order and "
        f"{lru.hit_rate:.1%} in the closed loop, where all sessions wait in one queue, return one after another, and find that "
        "the others have evicted their pages."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Llama 3 8B on {GPUS} H200, {options.limit:,} requests of WEKA's agent sessions in a closed loop, pages of 64 tokens.",
        "Made by `python experiments/agents/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    picture = "Replayed hit rate, simulated hit rate and mean TTFT by policy, memory and sessions"
    yield from opening("Agents: LRU, a time to live, Continuum", text, picture, claims(rows), finding(rows))
    for title, names, text in (
        ("Hit rate, replayed", (*POLICIES, BOUND), lambda row: f"{row.replayed:.4f}"),
        ("Hit rate, simulated", tuple(POLICIES), lambda row: f"{row.hit_rate:.4f}"),
        ("Mean TTFT (s), 99th percentile in brackets", tuple(POLICIES), lambda row: f"{row.ttft_s:.3f} ({row.p99_s:.1f})"),
    ):
        body = [[str(place), *(text(rows[Cell(place, name)]) for name in names)] for place in places()]
        yield from section(title, ("sessions, GiB", *names), body)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "sessions", "gib", "policy", "replayed_hit_rate", "hit_rate", "ttft_mean_s", "ttft_p99_s", "retractions", "simulated_s"
    for cell, row in rows.items():
        numbers = (row.hit_rate, row.ttft_s, row.p99_s, row.retractions, row.simulated_s)
        simulated = [""] * 5 if cell.policy == BOUND else [f"{number:.4f}" for number in numbers]
        yield cell.place.sessions, cell.place.gib, cell.policy, f"{row.replayed:.6f}", *simulated


def figure(rows: Rows) -> go.Figure:
    measures = (("replayed", "hit rate, replayed"), ("hit_rate", "hit rate, simulated"), ("ttft_s", "mean TTFT (s)"))
    titles = [f"{name}, {sessions} sessions" for _, name in measures for sessions in SESSIONS]
    figure = make_subplots(rows=3, cols=len(SESSIONS), subplot_titles=titles, shared_yaxes="rows", vertical_spacing=0.1)
    dashes = {"ttl": "dash", BOUND: "dot"}
    for column, sessions in enumerate(SESSIONS, 1):
        for at, (name, _) in enumerate(measures, 1):
            for policy in (*POLICIES, BOUND) if name == "replayed" else POLICIES:
                values = [getattr(rows[Cell(Place(sessions, gib), policy)], name) for gib in GIB]
                figure.add_scatter(
                    x=[str(gib) for gib in GIB], y=values, name=policy, legendgroup=policy, mode="lines+markers",
                    showlegend=at == column == 1, row=at, col=column,
                    line={"color": COLOURS[policy], "width": 2, "dash": dashes.get(policy, "solid")},
                )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="GPU memory (GiB)", row=3)
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    figure.update_yaxes(type="log", tickformat="", rangemode="normal", row=3)
    return figure.update_layout(template="plotly_white", width=1100, height=940, legend={"orientation": "h", "y": 1.09})


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": WEKA}, limit=8_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
