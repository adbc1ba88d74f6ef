"""How close is a replay of samples to one of the whole trace, and does its interval cover the truth?

``kvsim replay sample=1%`` plays eight samples of whole subtrees, one by one and all together, under several seeds. The truth is a
replay of all requests. Mooncake's conversations have 7,401 subtrees, WEKA's sessions 772, and 40,000 generated sessions
about 35,000.

Claims:

1. over all cells but those of few subtrees, the interval covers the truth in at least 95 % of the draws;
2. with samples of 1 %, LRU errs by less than .5 points (root mean square) in every cell, in one tier and in two;
3. with samples of 1 %, every policy errs by less than .5 points on Mooncake's conversations;
4. with samples of 1 %, every policy errs by less than .5 points on the 40,000 generated sessions;
5. in every cell the error is smaller than that of SHARDS-adj on the same samples;
6. on the generated sessions, samples of 1 % take at most half of the CPU time of the whole replay, reading left out.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from math import sqrt
from time import process_time
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.engine.columns import hit_tokens
from kvsim.errors import UsageError
from kvsim.report.study import CONVERSATION, WEKA, Claim, Study, markdown, opening
from kvsim.trace.base import Trace

POLICIES = {
    "lru": ("eviction=lru",),
    "arc": ("eviction=arc",),
    "s3_fifo": ("eviction=s3_fifo",),
    "lfu": ("eviction=lfu",),
    "two tiers": ("eviction=lru", "placement=write_back"),
}
"""Two tiers are a GPU tier of the capacity, and a CPU tier of twice as much."""
SESSIONS = 40_000
PLACES = (
    ("generated", (500_000,), 0.01, 2),
    ("sessions", (345_000,), 0.05, 2),
    ("conversations", (25_000, 50_000, 100_000), 0.01, 12),
    ("conversations", (50_000,), 0.03, 12),
)
"""By trace and share of a sample: capacities in pages, and draws of each."""
FAILING = [("conversations", 10_000, 0.01), ("conversations", 10_000, 0.05), ("first 1,000", 25_000, 0.05)]
"""Where samples should not be used: small tiers, few requests."""
TRIED = 6
"""Draws of these."""
FEW = 100
"""Subtrees in a sample below which a result says that it is not to be relied on."""
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951")


class Cell(NamedTuple):
    """Samples of one configuration, under many seeds."""

    trace: str
    pages: int
    policy: str
    share: float
    seeds: int


class Row(NamedTuple):
    """What became of them."""

    truth: float
    rates: list[float]
    lows: list[float]
    highs: list[float]
    shards: list[float]
    """What SHARDS-adj would say of the same samples."""
    subtrees: int
    """In a sample, on average."""
    cpu_s: float
    whole_cpu_s: float
    refusal: str

    @property
    def error(self) -> float:
        """Root mean square of the errors, in points."""
        return rms([rate - self.truth for rate in self.rates])

    @property
    def covered(self) -> list[bool]:
        """Whether each interval covers the truth."""
        return [low - 1e-9 <= self.truth <= high + 1e-9 for low, high in zip(self.lows, self.highs, strict=True)]

    @property
    def half_width(self) -> float:
        """Half of the mean width of the intervals, in points."""
        return 50 * float(np.mean(np.subtract(self.highs, self.lows)))


Rows = dict[Cell, Row]


def rms(errors: list[float]) -> float:
    return 100 * sqrt(sum(error**2 for error in errors) / len(errors))


def cells() -> list[Cell]:
    usual = [
        Cell(trace, pages, policy, share, seeds)
        for trace, capacities, share, seeds in PLACES
        for pages in capacities
        for policy in POLICIES
    ]
    return usual + [Cell(trace, pages, policy, share, TRIED) for trace, pages, share in FAILING for policy in ("lru", "s3_fifo")]


@cache
def load(name: str, conversation: str, weka: str, limit: int | None) -> Trace:
    if name == "sessions":
        return kvsim.load_trace(weka, page_tokens=64, limit=limit)
    if name == "generated":
        return kvsim.load_trace("synthetic", page_tokens=64, sessions=SESSIONS, sessions_per_s=10.0, limit=limit)
    return kvsim.load_trace(conversation, page_tokens=512, limit=1_000 if name == "first 1,000" else limit)


def run(options: Namespace, cell: Cell) -> Row:
    """Replay the whole trace, and samples of it under each seed."""
    trace = load(cell.trace, options.conversation, options.weka, options.limit)
    tiers = {"tiers.gpu.capacity": f"{cell.pages}pages"}
    if cell.policy == "two tiers":
        tiers["tiers.cpu.capacity"] = f"{2 * cell.pages}pages"
    began = process_time()
    truth = kvsim.replay(trace, tiers, *POLICIES[cell.policy]).hit_rate
    whole_cpu_s = process_time() - began
    found, refusal, began = list[tuple[float, float, float, float, int]](), "", process_time()
    for seed in range(cell.seeds):
        try:
            result = kvsim.replay(trace, tiers, *POLICIES[cell.policy], f"sample={cell.share}", seed=seed)
        except UsageError as error:
            refusal = str(error)
            continue
        sample, all_tokens = result.record["sample"], result.record["prompt_tokens"]
        expected = cell.share * sample["draws"] * all_tokens
        tokens = sum(request.prompt_tokens for request in result.outcome.requests)
        shards = (int(hit_tokens(result.outcome).sum()) + expected - tokens) / expected
        found.append((result.hit_rate, *sample["hit_rate"].values(), shards, sample["subtrees"] // sample["draws"]))
    cpu_s = (process_time() - began) / max(len(found), 1)
    rates, lows, highs, shards, subtrees = (list(column) for column in zip(*found, strict=True)) if found else ([],) * 5
    return Row(truth, rates, lows, highs, shards, round(np.mean(subtrees)) if found else 0, cpu_s, whole_cpu_s, refusal)


def claims(rows: Rows) -> list[Claim]:
    usual = {cell: row for cell, row in rows.items() if row.rates and cell.seeds != TRIED}
    hits = [one for row in usual.values() if row.subtrees >= FEW for one in row.covered]
    one = {cell: row for cell, row in usual.items() if cell.share == 0.01}
    by_lru = {cell: row for cell, row in one.items() if cell.policy in ("lru", "two tiers")}
    found = [
        Claim(
            f"where a sample has at least {FEW} subtrees, at least 95% of the intervals cover the truth",
            f"{sum(hits) / max(len(hits), 1):.1%} of {len(hits):,} draws",
            bool(hits) and sum(hits) >= 0.95 * len(hits),
        ),
        _below("with samples of 1%, LRU errs by less than .5 points, in one tier and in two", by_lru),
    ]
    for trace, name in (("conversations", "Mooncake's conversations"), ("generated", "the generated sessions")):
        text = f"with samples of 1%, every policy errs by less than .5 points on {name}"
        found.append(_below(text, {cell: row for cell, row in one.items() if cell.trace == trace}))
    gains = {cell: row.error / max(rms([rate - row.truth for rate in row.shards]), 1e-9) for cell, row in usual.items()}
    text = "every error is smaller than that of SHARDS-adj on the same samples"
    times = {cell: row.cpu_s / row.whole_cpu_s for cell, row in one.items() if cell.trace == "generated"}
    half = "on the generated sessions, samples of 1% take at most half of the CPU time of the whole, without reading"
    return [*found, _worst(text, gains, "at most {:.2f} times as large", 1.0), _worst(half, times, "at most {:.0%}", 0.5)]


def _below(text: str, rows: Rows) -> Claim:
    return _worst(text, {cell: row.error for cell, row in rows.items()}, "at most {:.2f} points", 0.5)


def _worst(text: str, values: dict[Cell, float], told: str, limit: float) -> Claim:
    """Claim that all values are below a limit."""
    if not values:
        return Claim(text, "not measured", False)
    worst = max(values, key=values.__getitem__)
    return Claim(text, f"{told.format(values[worst])} ({_name(worst)})", values[worst] < limit)


def _name(cell: Cell) -> str:
    return f"{cell.policy}, {cell.trace}, {cell.pages:,} pages, {cell.share:.0%}"


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        "Replays of samples (`kvsim replay sample=1%`) of Mooncake's conversations (12,031 requests, pages of 512 tokens),",
        f"WEKA's agent sessions (49,334, 64 tokens) and {SESSIONS:,} generated sessions (111,057, 64 tokens), against a replay",
        "of all requests.",
        "Errors are root mean squares over draws, in points of hit rate; half is half of the mean width of the 95% interval,",
        "covers the share of the draws whose interval has the truth in it. SHARDS-adj adds the difference between the tokens",
        "expected and found in the samples to their hits. CPU is that of the samples over that of the whole replay, both without",
        "reading the trace.",
        "There are 2 draws of each cell of the generated and of WEKA's sessions, 12 of conversations, and 6 of the last six",
        "rows, so that a share of draws is rough. How the interval is made, and from how many subtrees on it counts here, was",
        "chosen on the conversations and on WEKA's sessions with seeds that are also played here: coverage there is not that",
        "of unseen traces. With the conversations in samples of 1% (74 to 77 subtrees), 207 of 215 intervals cover the truth.",
        "LRU is what estimates are corrected with, so that it is nearly exact by construction; SHARDS-adj does not have that.",
        "Made by `python experiments/sampling/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    yield from opening("Samples of prefix trees", text, "Error and interval by capacity and policy", claims(rows))
    yield ""
    head = ("trace", "pages", "share", "policy", "hit rate", "error", "SHARDS-adj", "half", "covers", "subtrees", "CPU")
    yield from markdown(head, [_line(cell, row) for cell, row in rows.items()])


def _line(cell: Cell, row: Row) -> list[str]:
    what = [cell.trace, f"{cell.pages:,}", f"{cell.share:.0%}", cell.policy, f"{row.truth:.2%}"]
    if not row.rates:
        return [*what, "refused", *[""] * 5]
    refused = cell.seeds - len(row.rates)
    covers = f"{sum(row.covered) / len(row.covered):.0%}" + (f" ({refused} refused)" if refused else "")
    shards = f"{rms([rate - row.truth for rate in row.shards]):.2f}"
    cost = f"{row.cpu_s / row.whole_cpu_s:.0%}"
    return [*what, f"{row.error:.2f}", shards, f"{row.half_width:.2f}", covers, f"{row.subtrees:,}", cost]


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "trace", "gpu_pages", "policy", "share", "seed_number", "truth", "estimate", "low", "high", "shards_adj"
    for cell, row in rows.items():
        for number, found in enumerate(zip(row.rates, row.lows, row.highs, row.shards, strict=True)):
            yield *cell[:4], number, f"{row.truth:.6f}", *(f"{value:.6f}" for value in found)


def figure(rows: Rows) -> go.Figure:
    places = [(trace, share) for trace, capacities, share, _ in PLACES if len(capacities) > 1]
    titles = [f"{trace}, {share:.0%}" for trace, share in places]
    figure = make_subplots(rows=1, cols=len(places), subplot_titles=titles)
    for column, (trace, share) in enumerate(places, 1):
        for policy, color in zip(POLICIES, COLORS, strict=False):
            known = [
                (c.pages, r)
                for c, r in rows.items()
                if (c.trace, c.share, c.policy) == (trace, share, policy) and r.rates and c.seeds != TRIED
            ]
            sizes = [pages for pages, _ in known]
            look = {"name": policy, "legendgroup": policy, "line_color": color}
            errors = [row.error for _, row in known]
            figure.add_scatter(x=sizes, y=errors, showlegend=column == 1, mode="lines+markers", row=1, col=column, **look)
            halves = [row.half_width for _, row in known]
            figure.add_scatter(x=sizes, y=halves, showlegend=False, mode="lines", line_dash="dot", row=1, col=column, **look)
    figure.update_xaxes(type="log", title="GPU pages", nticks=4)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="points of hit rate: error (line), half interval (dots)", col=1)
    return figure.update_layout(template="plotly_white", width=650 * len(places), height=450)


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION, "weka": WEKA},
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
