"""Is there an eviction policy that hits more than LRU, and where? All policies, one tier.

Replays the Mooncake conversation trace (pages of 512 tokens) and 600 sessions of the synthetic one (chats, agents, documents;
pages of 16 tokens), one request at a time, with Belady's bound and every eviction policy for which the traces have what it
needs.

Claims, on both traces:

1. with the smallest capacity some policy hits at least three points more than LRU;
2. with the largest none hits more than half a point more;
3. no policy hits as much as LRU, or more, at every capacity.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import CONVERSATION, Claim, Study, bold, highest, lowest, opening, section
from kvsim.trace.base import Trace

CAPACITIES = {"conversation": (1_000, 3_000, 6_000, 12_000, 30_000), "synthetic": (5_000, 10_000, 20_000, 40_000, 80_000)}
OF_ANY_TRACE = (
    "lru", "mq", "laru", "arc", "slru", "w_tinylfu", "s3_fifo", "two_q", "lru_k", "sieve", "lfu_da", "gdsf", "flop_aware", "lfu",
    "length_aware", "fifo", "random", "random_compute", "rlt", "hpt", "filo", "mru",
)  # fmt: skip
OF_SESSIONS = ("tail_latency", "ttl", "workload_aware", "session_aware", "lpc", "sae_cache")
SETTINGS = {"tail_latency": ("eviction.threshold=4000",), "flop_aware": ("eviction.alpha=1",)}
"""Where the default is LRU."""
POLICIES = {"conversation": OF_ANY_TRACE, "synthetic": (*OF_ANY_TRACE, *OF_SESSIONS)}
BOUND = "belady"
FORESIGHT = {"conversation": ("belady_compute", BOUND), "synthetic": ("kv_flow", "belady_compute", BOUND)}
"""What reads in the trace what comes next; no claim is about it."""


class Cell(NamedTuple):
    """One replay."""

    trace: str
    policy: str
    pages: int


Rates = dict[Cell, float]


def cells() -> list[Cell]:
    return [
        Cell(trace, policy, pages)
        for trace, capacities in CAPACITIES.items()
        for policy in (*POLICIES[trace], *FORESIGHT[trace])
        for pages in capacities
    ]


@cache
def load(trace: str, path: str, limit: int | None) -> Trace:
    if trace == "conversation":
        return kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit)
    return kvsim.load_trace("synthetic", sessions=600, page_tokens=16, limit=limit)


def run(options: Namespace, cell: Cell) -> float:
    """The hit rate of a cell."""
    held = ("replay.hold_output=false",) if cell.policy == BOUND else ()
    overrides = (f"eviction={cell.policy}", *SETTINGS.get(cell.policy, ()), f"tiers.gpu.capacity={cell.pages}pages", *held)
    return kvsim.replay(load(cell.trace, options.trace, options.limit), *overrides).hit_rate


def gains(rates: Rates, trace: str, policy: str) -> dict[int, float]:
    """Points of the hit rate above LRU's, by capacity."""
    return {pages: 100 * (rates[Cell(trace, policy, pages)] - rates[Cell(trace, "lru", pages)]) for pages in CAPACITIES[trace]}


def claims(rates: Rates) -> list[Claim]:
    found = []
    for trace, capacities in CAPACITIES.items():
        others = [policy for policy in POLICIES[trace] if policy != "lru"]
        by_policy = {policy: gains(rates, trace, policy) for policy in others}
        for pages, least in ((capacities[0], True), (capacities[-1], False)):
            name, gain = highest({policy: by_policy[policy][pages] for policy in others})
            text = "some policy hits at least 3 points more than LRU" if least else "no policy hits more than 0.5 points more"
            found.append(Claim(f"{trace}, {pages:,} pages: {text}", f"{name} {gain:+.2f}", gain >= 3 if least else gain <= 0.5))
        name, worst = highest({policy: lowest(by_policy[policy])[1] for policy in others})
        text = f"{trace}: no policy hits as much as LRU, or more, at every capacity"
        found.append(Claim(text, f"the best, {name}, {worst:+.2f} at worst", worst < 0))
    return found


def page(_: Namespace, rates: Rates) -> Iterator[str]:
    text = [
        "Hit tokens per prompt token, one tier, one request at a time. `flop_aware` has `alpha=1` and `tail_latency`",
        "`threshold=4000`, since their defaults are LRU here. `kv_flow` and `belady_compute` read in the trace what comes",
        "next, as the bound does; no claim is about them. Made by `python experiments/lru_or_not/run.py`; all numbers are in",
        "[results.csv](results.csv).",
    ]
    yield from opening("LRU or not?", text, "Points of hit rate above LRU's, by policy and capacity", claims(rates))
    for trace, capacities in CAPACITIES.items():
        best = {pages: max(rates[Cell(trace, policy, pages)] for policy in POLICIES[trace]) for pages in capacities}
        lines = []
        for policy in (*POLICIES[trace], *FORESIGHT[trace]):
            values = [rates[Cell(trace, policy, pages)] for pages in capacities]
            shown = [bold([value], best[pages])[0] for value, pages in zip(values, capacities, strict=True)]
            lines.append([policy, *shown])
        yield from section(trace.capitalize(), ("pages", *(f"{pages:,}" for pages in capacities)), lines)


def table(rates: Rates) -> Iterator[tuple[object, ...]]:
    yield "trace", "policy", "pages", "hit_rate"
    yield from ((*cell, f"{rate:.6f}") for cell, rate in rates.items())


def figure(rates: Rates) -> go.Figure:
    """A map for each trace: policies by capacities, coloured by the points above (red: LRU is wrong) or below (blue) LRU."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=list(CAPACITIES), horizontal_spacing=0.16)
    for column, (trace, capacities) in enumerate(CAPACITIES.items(), 1):
        names = [policy for policy in POLICIES[trace] if policy != "lru"][::-1]
        points = [list(gains(rates, trace, policy).values()) for policy in names]
        figure.add_heatmap(
            x=[f"{pages:,}" for pages in capacities], y=names, z=points, zmid=0, zmin=-15, zmax=15, colorscale="RdBu_r",
            showscale=False, text=[[f"{value:+.1f}" for value in row] for row in points], texttemplate="%{text}",
            row=1, col=column,
        )  # fmt: skip
    figure.update_xaxes(title="pages", type="category")
    return figure.update_layout(template="plotly_white", width=900, height=660, margin={"t": 40, "l": 100, "r": 20, "b": 50})


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": CONVERSATION},
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
