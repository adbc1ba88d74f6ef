"""Does ARC, which protects pages used more than once, hit more than LRU? A small study to copy.

Replays 1,000 requests of the synthetic trace with either eviction policy and several GPU capacities, one request at a time.

Claims:

1. with the smallest capacity ARC hits at least one point more than LRU;
2. nowhere does it hit more than one point less.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import plotly.graph_objects as go

import kvsim
from kvsim.report.study import Claim, Study, bold, lowest, markdown, opening
from kvsim.trace.base import Trace

CAPACITIES = (4_000, 16_000, 64_000)
POLICIES = ("lru", "arc")


class Cell(NamedTuple):
    """One replay."""

    pages: int
    policy: str


Rates = dict[Cell, float]


def cells() -> list[Cell]:
    return [Cell(pages, policy) for pages in CAPACITIES for policy in POLICIES]


@cache
def load(limit: int) -> Trace:
    return kvsim.load_trace("synthetic", page_tokens=16, limit=limit)


def run(options: Namespace, cell: Cell) -> float:
    """The hit rate of a cell."""
    return kvsim.replay(load(options.limit), f"tiers.gpu.capacity={cell.pages}pages", f"eviction={cell.policy}").hit_rate


def claims(rates: Rates) -> list[Claim]:
    gains = {pages: 100 * (rates[Cell(pages, "arc")] - rates[Cell(pages, "lru")]) for pages in CAPACITIES}
    smallest = CAPACITIES[0]
    worst, gain = lowest(gains)
    return [
        Claim(
            f"with {smallest:,} pages ARC hits at least one point more than LRU",
            f"{gains[smallest]:+.2f} points",
            gains[smallest] >= 1,
        ),
        Claim(
            "nowhere does it hit more than one point less",
            f"at worst {gain:+.2f} points ({worst:,} pages)",
            gain >= -1,
        ),
    ]


def page(options: Namespace, rates: Rates) -> Iterator[str]:
    text = [
        f"{options.limit:,} requests of the synthetic trace; hit tokens per prompt token. Made by",
        "`python experiments/template/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    picture = "Hit rate by capacity and policy"
    yield from opening("LRU or ARC?", text, picture, claims(rates))
    yield ""
    lines = []
    for pages in CAPACITIES:
        values = [rates[Cell(pages, policy)] for policy in POLICIES]
        lines.append([f"{pages:,}", *bold(values, max(values))])
    yield from markdown(("GPU pages", *POLICIES), lines)


def table(rates: Rates) -> Iterator[tuple[object, ...]]:
    yield "gpu_pages", "policy", "hit_rate"
    yield from ((*cell, f"{rate:.6f}") for cell, rate in rates.items())


def figure(rates: Rates) -> go.Figure:
    figure = go.Figure()
    for policy in POLICIES:
        figure.add_scatter(x=CAPACITIES, y=[rates[Cell(pages, policy)] for pages in CAPACITIES], name=policy)
    figure.update_xaxes(type="log", title="GPU pages")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="hit rate")
    return figure.update_layout(template="plotly_white", width=700, height=450)


STUDY = Study(
    file=__file__, question=__doc__, traces={}, limit=1_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
