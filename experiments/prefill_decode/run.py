"""Do four GPUs serve better when some only compute prompts and others only decode?

Llama 3 8B on four H200 of one host, one engine each, with 100 GiB of KV per GPU and one CPU tier of 800 GiB; the first 4,000
requests of the Mooncake conversation trace at 0.3 to 1.2 of its rate of 3.4 requests per second. The GPUs are undivided, or
split into prefill + decode (``cluster.prefill``, ``cluster.decode``), with four rates of the link on which each GPU sends and
receives pages: 3.125 GB/s (25 Gbit/s), 12.5 (100 Gbit/s), 50 (400 Gbit/s) and 400 (NVLink). Prompts go where NVIDIA Dynamo's
router sends them (``routing=kv_aware``), answers to the decode engine with the fewest tokens. A decode engine has pages for a
request before its prompt is computed, and the first token counts when the prompt's pages have landed there.

A request is good if its first token takes at most 2 s and each further one at most 50 ms on average; with the strict limit, at
most 10 ms, about twice what an idle GPU needs. The trace's timestamps advance in steps of 3 s, 10 s at the lowest rate, and ten
requests share one, so even an idle system serves bursts: times to first token (TTFT) are those of a burst.

Claims:

1. at 50 GB/s every split has a lower p99 of the time per output token (TPOT) than the undivided GPUs, at every rate;
2. at the lowest rate every split has a higher p50 and p99 of the TTFT, over every link;
3. with the limit of 50 ms, no split serves a larger share of good requests than the undivided GPUs, at any rate;
4. with the strict limit some split serves a larger share at every rate;
5. with 2 + 2, 12.5 GB/s lengthen the mean TTFT by at most 10% against 400 GB/s, at every rate;
6. with 2 + 2, 3.125 GB/s at least double it, at every rate;
7. the hit rate of every split is within half a point of the undivided GPUs', since all share the CPU tier.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.report.study import CONVERSATION, Claim, Study, capacities, highest, lowest, opening, section
from kvsim.trace.base import Trace

RATES = (0.3, 0.6, 0.9, 1.2)
SPLITS = (1, 2, 3)
"""Numbers of prefill engines, of four."""
LINKS = (3.125, 12.5, 50.0, 400.0)
"""GB/s of each GPU, each way."""
ENGINES = 4
USUAL = 50.0
TTFT_S, TPOT_S, STRICT_TPOT_S = 2.0, 0.050, 0.010
COLOURS = {0: "#444444", 1: "#d55e00", 2: "#3d8fd1", 3: "#0a9e74"}


class Cell(NamedTuple):
    """One simulation; 0 prefill engines: the GPUs are undivided, and there is no link between them."""

    rate: float
    prefill: int = 0
    gb_per_s: float = 0.0

    @property
    def name(self) -> str:
        return split_name(self.prefill)

    def __str__(self) -> str:
        return f"{self.name} at rate {self.rate:g}" + (f" over {self.gb_per_s:g} GB/s" if self.prefill else "")


class Row(NamedTuple):
    """Results of a cell; times in seconds, shares of all requests."""

    hit_rate: float
    ttft_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    good: float
    strictly_good: float
    good_per_s: float
    sent_gb: float
    prefill_busy: float
    """Mean share of time that engines are in steps, those that compute prompts; of undivided GPUs, all."""
    decode_busy: float
    retractions: int


Rows = dict[Cell, Row]


def split_name(prefill: int) -> str:
    return f"{prefill} + {ENGINES - prefill}" if prefill else "undivided"


def cells() -> list[Cell]:
    return [cell for rate in RATES for cell in (Cell(rate), *splits(rate))]


def splits(rate: float, links: tuple[float, ...] | None = None) -> list[Cell]:
    return [Cell(rate, prefill, gb_per_s) for prefill in SPLITS for gb_per_s in links or LINKS]


@cache
def load(path: str, limit: int, rate: float) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit, rate=rate)


def run(options: Namespace, cell: Cell) -> Row:
    tiers = *capacities(gpu=100, cpu=800), "routing=kv_aware"
    cluster = [f"cluster.engines={ENGINES}"]
    if cell.prefill:
        cluster = [f"cluster.prefill={cell.prefill}", f"cluster.decode={ENGINES - cell.prefill}"]
        cluster.append(f"hardware.interconnect_bytes_per_s={cell.gb_per_s}e9")
    result = kvsim.simulate(load(options.trace, options.limit, cell.rate), *tiers, *cluster)
    outcome, record = result.outcome, result.record
    good = good_share(outcome, TPOT_S)
    return Row(
        hit_rate=result.hit_rate,
        ttft_s=record["ttft_s"]["mean"],
        ttft_p50_s=record["ttft_s"]["p50"],
        ttft_p99_s=record["ttft_s"]["p99"],
        tpot_p50_s=record["tpot_s"]["p50"],
        tpot_p99_s=record["tpot_s"]["p99"],
        good=good,
        strictly_good=good_share(outcome, STRICT_TPOT_S),
        good_per_s=good * len(outcome.requests) / outcome.simulated_s,
        sent_gb=record["links"].get("gpu-gpu", {"bytes": 0})["bytes"] / 1e9,
        prefill_busy=busy_share(outcome, ("both", "prefill")),
        decode_busy=busy_share(outcome, ("both", "decode")),
        retractions=outcome.retractions,
    )


def good_share(outcome: Outcome, tpot_s: float) -> float:
    """Share of the requests that are finished, and meet both limits; an answer of one token has no time per further token."""
    is_fluent = np.isnan(outcome.tpot_s) | (outcome.tpot_s <= tpot_s)
    return float(np.mean((outcome.status == FINISHED) & (outcome.ttft_s <= TTFT_S) & is_fluent))


def busy_share(outcome: Outcome, roles: tuple[str, ...]) -> float:
    return float(np.mean([use.busy_s for use in outcome.engines if use.role in roles]) / outcome.simulated_s)


def against(rows: Rows, value: Callable[[Row], float]) -> dict[Cell, float]:
    """The ratio of what every split has to what the undivided GPUs have."""
    return {cell: value(row) / value(rows[Cell(cell.rate)]) for cell, row in rows.items() if cell.prefill}


def more(rows: Rows, value: Callable[[Row], float]) -> dict[Cell, float]:
    """What every split has minus what the undivided GPUs have."""
    return {cell: value(row) - value(rows[Cell(cell.rate)]) for cell, row in rows.items() if cell.prefill}


def link_cost(rows: Rows, gb_per_s: float) -> dict[Cell, float]:
    """Mean TTFT of 2 + 2 over a link, relative to the fastest."""
    slow = [Cell(rate, 2, gb_per_s) for rate in RATES]
    return {cell: rows[cell].ttft_s / rows[cell._replace(gb_per_s=LINKS[-1])].ttft_s for cell in slow}


def claims(rows: Rows) -> list[Claim]:
    return [*claims_of_times(rows), *claims_of_goodput(rows), *claims_of_links(rows)]


def claims_of_times(rows: Rows) -> list[Claim]:
    idle = {cell: row for cell, row in rows.items() if cell.rate == RATES[0]}
    tpots = against({cell: row for cell, row in rows.items() if cell.gb_per_s in (0, USUAL)}, lambda row: row.tpot_p99_s)
    cell, tpot = highest(tpots)
    median_cell, median = lowest(against(idle, lambda row: row.ttft_p50_s))
    tail_cell, tail = lowest(against(idle, lambda row: row.ttft_p99_s))
    below = sum(ratio < 1 for ratio in tpots.values())
    return [
        Claim(
            f"at {USUAL:g} GB/s every split has a lower TPOT p99 at every rate",
            f"{below} of {len(tpots)}; at most {tpot:.2f} times the undivided GPUs' ({cell})",
            tpot < 1,
        ),
        Claim(
            "at the lowest rate every split has a higher TTFT p50 and p99",
            f"p50 at least {median:.2f} times ({median_cell}), p99 at least {tail:.2f} times ({tail_cell})",
            min(median, tail) > 1,
        ),
    ]


def claims_of_goodput(rows: Rows) -> list[Claim]:
    (best, lead) = highest(more(rows, lambda row: row.good))
    strict = more(rows, lambda row: row.strictly_good)
    leads = {rate: highest({cell: value for cell, value in strict.items() if cell.rate == rate}) for rate in RATES}
    least, least_lead = min(leads.values(), key=lambda found: found[1])
    return [
        Claim(
            f"no split has a larger share of requests within {TTFT_S:g} s and {1e3 * TPOT_S:g} ms",
            f"at most {100 * lead:+.1f} points ({best})",
            lead <= 0,
        ),
        Claim(
            f"some split has a larger share within {TTFT_S:g} s and {1e3 * STRICT_TPOT_S:g} ms at every rate",
            f"at {sum(found[1] > 0 for found in leads.values())} of {len(RATES)} rates; at worst {100 * least_lead:+.1f} points "
            f"({least})",
            least_lead > 0,
        ),
    ]


def claims_of_links(rows: Rows) -> list[Claim]:
    (usual, cost), (slow, least) = highest(link_cost(rows, LINKS[1])), lowest(link_cost(rows, LINKS[0]))
    apart, points = highest({cell: abs(value) for cell, value in more(rows, lambda row: row.hit_rate).items()})
    return [
        Claim(
            f"with 2 + 2, {LINKS[1]:g} GB/s lengthen the mean TTFT by at most 10% against {LINKS[-1]:g}",
            f"at most {100 * (cost - 1):+.1f}% (rate {usual.rate:g})",
            cost <= 1.1,
        ),
        Claim(
            f"with 2 + 2, {LINKS[0]:g} GB/s at least double it",
            f"at least {least:.2f} times (rate {slow.rate:g})",
            least >= 2,
        ),
        Claim(
            "hit rates are within half a point of the undivided GPUs'",
            f"at most {100 * points:.2f} points apart ({apart})",
            points <= 0.005,
        ),
    ]


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Llama 3 8B on four H200; {options.limit:,} requests of the Mooncake conversation trace. Made by",
        "`python experiments/prefill_decode/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    picture = "TTFT, TPOT and the share of good requests by rate and split, and TTFT by link"
    yield from opening("Prefill and decode apart", text, picture, claims(rows), finding(rows))
    shown = [
        f"Good: the first token within {TTFT_S:g} s, and at most {1e3 * TPOT_S:g} ms per further one on average; strict:",
        f"{1e3 * STRICT_TPOT_S:g} ms. Busy: mean share of time in steps, first of engines that compute prompts, then of those",
        "that decode.",
    ]
    head = ("rate", "GPUs", "TTFT p50", "p99 (s)", "TPOT p50", "p99 (ms)", "good", "strict", "busy", "retracted", "sent (GB)")
    lines = [line(cell, rows[cell]) for rate in RATES for cell in (Cell(rate), *splits(rate, (USUAL,)))]
    yield from section(f"{USUAL:g} GB/s per GPU, by rate and split", head, lines, *shown)
    lines = []
    for rate in RATES:
        for prefill in SPLITS:
            times = [f"{rows[Cell(rate, prefill, link)].ttft_s:.3f}" for link in LINKS]
            lines.append([f"{rate:g}", split_name(prefill), *times, f"{rows[Cell(rate)].ttft_s:.3f}"])
    yield from section("Mean TTFT (s) by link", ("rate", "GPUs", *(f"{link:g} GB/s" for link in LINKS), "undivided"), lines)


def finding(rows: Rows) -> str:
    """What decides, with the least and the most over the rates, at the usual link."""
    tails = against({cell: row for cell, row in rows.items() if cell.gb_per_s in (0, USUAL)}, lambda row: row.tpot_p99_s)
    parts = []
    for prefill in SPLITS:
        good = [100 * (rows[Cell(rate, prefill, USUAL)].good - rows[Cell(rate)].good) for rate in RATES]
        ratios = [ratio for cell, ratio in tails.items() if cell.prefill == prefill]
        parts.append(
            f"{split_name(prefill)} has {min(ratios):.2f} to {max(ratios):.2f} times the TPOT p99 and "
            f"{min(good):+.1f} to {max(good):+.1f} points of good requests"
        )
    return (
        f"At {USUAL:g} GB/s, against undivided GPUs: {'; '.join(parts)}. Undivided, a decode step is as long as the prompts "
        "computed in it make it. Apart, a burst of prompts has fewer GPUs, so the first token comes later; only one GPU of "
        "four is enough to decode for this trace, and only while the limit on the time per token is loose. A link that cannot "
        "carry what one GPU must send (1 + 3) or receive (3 + 1) makes the queue grow without end."
    )


def line(cell: Cell, row: Row) -> list[str]:
    ttft, tpot = (
        (f"{row.ttft_p50_s:.3f}", f"{row.ttft_p99_s:.2f}"),
        (f"{1e3 * row.tpot_p50_s:.1f}", f"{1e3 * row.tpot_p99_s:.1f}"),
    )
    busy = f"{row.prefill_busy:.0%}, {row.decode_busy:.0%}" if cell.prefill else f"{row.prefill_busy:.0%}"
    shares = f"{row.good:.1%}", f"{row.strictly_good:.1%}"
    return [f"{cell.rate:g}", cell.name, *ttft, *tpot, *shares, busy, str(row.retractions), f"{row.sent_gb:,.0f}"]


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "rate", "prefill", "decode", "gb_per_s", *Row._fields
    for cell, row in rows.items():
        decode = ENGINES - cell.prefill if cell.prefill else 0
        yield cell.rate, cell.prefill, decode, cell.gb_per_s, *(f"{value:.6g}" for value in row)


def figure(rows: Rows) -> go.Figure:
    panels: list[tuple[str, Callable[[Row], float]]] = [
        ("TTFT p99 (s)", lambda row: row.ttft_p99_s),
        ("TPOT p99 (ms)", lambda row: 1e3 * row.tpot_p99_s),
        (f"share within {TTFT_S:g} s and {1e3 * TPOT_S:g} ms", lambda row: row.good),
        (f"share within {TTFT_S:g} s and {1e3 * STRICT_TPOT_S:g} ms", lambda row: row.strictly_good),
    ]
    titles = [f"{name}, {USUAL:g} GB/s" for name, _ in panels]
    figure = make_subplots(rows=2, cols=3, subplot_titles=[*titles[:2], "mean TTFT (s) by link, 2 + 2", *titles[2:]])
    for at, (_, value) in enumerate(panels):
        row, column = 1 + at // 2, 1 + at % 2
        for prefill in (0, *SPLITS):
            here = [rows[Cell(rate, prefill, USUAL if prefill else 0.0)] for rate in RATES]
            figure.add_scatter(
                x=RATES, y=[value(one) for one in here], name=split_name(prefill), legendgroup=str(prefill),
                showlegend=at == 0, mode="lines+markers", line={"color": COLOURS[prefill], "width": 2}, row=row, col=column,
            )  # fmt: skip
        figure.update_xaxes(title="rate of the trace", row=row, col=column)
        figure.update_yaxes(
            **({"tickformat": ".0%", "rangemode": "tozero"} if row == 2 else {"type": "log"}), row=row, col=column
        )
    add_links(figure, rows)
    return figure.update_layout(
        template="plotly_white", width=1200, height=750, legend={"orientation": "h", "y": 1.11}, margin={"t": 130},
        title="Four H200: undivided, or split into prefill + decode",
    )  # fmt: skip


def add_links(figure: go.Figure, rows: Rows) -> None:
    for rate, dash in zip(RATES, ("dot", "dash", "dashdot", "solid"), strict=False):
        figure.add_scatter(
            x=LINKS, y=[rows[Cell(rate, 2, link)].ttft_s for link in LINKS], name=f"rate {rate:g}", mode="lines+markers",
            line={"color": COLOURS[2], "dash": dash}, row=1, col=3,
        )  # fmt: skip
    figure.update_xaxes(type="log", title="GB/s per GPU", tickvals=LINKS, row=1, col=3)
    figure.update_yaxes(type="log", row=1, col=3)


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": CONVERSATION}, limit=4_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
