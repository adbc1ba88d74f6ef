"""All routers before the same eight engines: who hits most, and who answers first?

Llama 3 8B on eight engines, each one H200 with 80 GiB of KV; four of them share a host's CPU memory of 512 GiB. The first 6,000
requests of the Mooncake conversation trace, its rate multiplied by 0.2 to 0.65 per engine (0.7 to 2.2 requests per second); the
first quarter fills the caches and does not count. All prompts share their first block of 512 tokens. The file does not name
conversations: prompts that share the second block are taken for one, as in the study of 2 to 32 engines.

Every router has its default settings, and exact reports. llm_d is also played with what engines report of their caches (precise),
and with the requests under way that it has sent itself (active: active_request_weight=2).

Claims:

1. every router that knows prefixes or sessions hits more than round_robin, at every load;
2. lmetric has the lowest mean TTFT at every load, within 10%, without a setting;
3. dynamo, which also counts what is in CPU memory, hits more than kv_aware at every load, and its mean TTFT is at most as long;
4. llm_d answers later than round_robin at every load, since what engines report is a step old; with its own count of requests
   under way, it answers sooner;
5. skylb, which keeps requests while others wait on every engine, has a p99 TTFT below prefix_aware's at every load.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from functools import cache

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import (
    CONVERSATION,
    Claim,
    Study,
    bold,
    capacities,
    highest,
    lowest,
    opening,
    section,
    with_conversations,
)
from kvsim.trace.base import Trace

ENGINES = 8
LOADS = (0.2, 0.35, 0.5, 0.65)
"""Factors of the recorded rate, per engine."""
BLIND = ("round_robin", "random", "least_loaded", "power_of_two")
"""Routers that know neither prefixes nor sessions."""
NAMES = (
    *BLIND, "session_affinity", "prefix_aware", "skylb", "kv_aware", "dynamo", "lmetric", "preble", "kv_routing_greedy", "llm_d",
)  # fmt: skip
PRECISE, ACTIVE = "llm_d, precise", "llm_d, active"
ROUTERS = {
    **{name: (f"routing={name}",) for name in NAMES},
    PRECISE: ("routing=llm_d", "routing.prefix=precise"),
    ACTIVE: ("routing=llm_d", "routing.active_request_weight=2"),
}
LABELLED_BELOW = ("kv_routing_greedy", "power_of_two")
MEMORY = ("hardware.gpus=1", *capacities(gpu=80, cpu=512))


@dataclass(frozen=True)
class Cell:
    """One run."""

    load: float
    router: str


@dataclass(frozen=True)
class Row:
    """Results of a run."""

    hit_rate: float
    mean_s: float
    p50_s: float
    p99_s: float
    imbalance: float
    """Prompt tokens computed by the engine with the most, over the mean."""


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    return [Cell(load, router) for load in LOADS for router in ROUTERS]


@cache
def load_trace(path: str, limit: int, rate: float) -> Trace:
    return with_conversations(kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit, rate=rate))


def run(options: Namespace, cell: Cell) -> Row:
    trace = load_trace(options.conversation, options.limit, cell.load * ENGINES)
    cluster = (f"cluster.engines={ENGINES}", "cluster.engines_per_host=4")
    result = kvsim.simulate(trace, *cluster, *MEMORY, *ROUTERS[cell.router], "warmup=0.25")
    times = result.record["ttft_s"]
    uneven = result.record["imbalance"]["both"]["computed_tokens"]
    return Row(result.hit_rate, times["mean"], times["p50"], times["p99"], uneven)


def of(rows: Rows, router: str, name: str) -> dict[float, float]:
    """A measure of one router, by load."""
    return {load: getattr(rows[Cell(load, router)], name) for load in LOADS}


def ratios(rows: Rows, name: str, router: str, other: str) -> dict[float, float]:
    """A measure of one router over that of another one, by load."""
    mine, others = of(rows, router, name), of(rows, other, name)
    return {load: mine[load] / others[load] for load in LOADS}


def between(values: dict[float, float]) -> str:
    """Say between what a ratio lies."""
    (least_at, least), (most_at, most) = lowest(values), highest(values)
    return f"{least:.2f} (load {least_at:g}) to {most:.2f} times (load {most_at:g})"


def claims(rows: Rows) -> list[Claim]:
    aware = [router for router in ROUTERS if router not in BLIND]
    gains = {(router, load): gain for router in aware for load, gain in ratios(rows, "hit_rate", router, "round_robin").items()}
    (router, load), least = min(gains.items(), key=lambda item: item[1])
    soonest = {load: min(ROUTERS, key=lambda name: rows[Cell(load, name)].mean_s) for load in LOADS}
    late = {load: rows[Cell(load, "lmetric")].mean_s / rows[Cell(load, soonest[load])].mean_s for load in LOADS}
    worst, times = highest(late)
    hits, means = ratios(rows, "hit_rate", "dynamo", "kv_aware"), ratios(rows, "mean_s", "dynamo", "kv_aware")
    plain, active = ratios(rows, "mean_s", "llm_d", "round_robin"), ratios(rows, "mean_s", ACTIVE, "round_robin")
    tails = ratios(rows, "p99_s", "skylb", "prefix_aware")
    return [
        Claim(
            "every router that knows prefixes or sessions hits more than round_robin",
            f"at least {least:.2f} times as much ({router}, load {load:g})",
            least > 1,
        ),
        Claim(
            "lmetric has the lowest mean TTFT, within 10%",
            f"up to {times:.2f} times {soonest[worst]}'s (load {worst:g})",
            times <= 1.1,
        ),
        Claim(
            "dynamo hits more than kv_aware, and its mean TTFT is at most as long",
            f"hits {between(hits)}; mean TTFT {between(means)}",
            min(hits.values()) > 1 and max(means.values()) <= 1,
        ),
        Claim(
            "llm_d answers later than round_robin; with its own count of requests under way, sooner",
            f"mean TTFT {between(plain)}; with the count {between(active)}",
            min(plain.values()) > 1 and max(active.values()) < 1,
        ),
        Claim("skylb's p99 TTFT is below prefix_aware's", between(tails), max(tails.values()) < 1),
    ]


def causes(rows: Rows) -> Iterator[str]:
    """Why claims fail that do."""
    plain, tails = ratios(rows, "mean_s", "llm_d", "round_robin"), ratios(rows, "p99_s", "skylb", "prefix_aware")
    if sooner := [load for load in LOADS if plain[load] <= 1]:
        turns = of(rows, "round_robin", "mean_s")
        least = turns[LOADS[0]]
        yield (
            f"llm_d is not later than round_robin at a load of {', '.join(f'{load:g}' for load in sooner)}, because there "
            "round_robin cannot keep up itself: its mean TTFT is "
            f"{max(turns[load] for load in sooner) / least:.0f} times that at "
            f"{LOADS[0]:g}."
        )
    if alike := [load for load in LOADS if tails[load] >= 1]:
        yield (
            f"skylb's p99 is prefix_aware's at a load of {', '.join(f'{load:g}' for load in alike)}: where an engine is nearly "
            "always free to take a request it keeps hardly any, and both send it where most of its prompt has been."
        )


def finding(rows: Rows) -> str:
    usual = LOADS[1]
    at = {name: rows[Cell(usual, name)] for name in ROUTERS}
    first, second, third, *_ = sorted(ROUTERS, key=lambda name: at[name].mean_s)
    most = max(ROUTERS, key=lambda name: at[name].hit_rate)
    tail = min(ROUTERS, key=lambda name: at[name].p99_s)
    counted = ratios(rows, "mean_s", ACTIVE, "llm_d")
    return (
        f"At a load of {usual:g}, {first}, {second} and {third} have the lowest mean TTFT ({at[first].mean_s:.2f} s for the "
        f"first) and {tail} has the lowest p99 ({at[tail].p99_s:.2f} s). {most} hits most ({at[most].hit_rate:.1%}, with a mean "
        f"of {at[most].mean_s:.2f} s): in this trace most of a prompt is new, so a short queue is worth more than a hit. What "
        "engines report is a step old, and until then llm_d sends all requests to the engine that looked best: its own count of "
        f"requests under way shortens its mean TTFT to {between(counted)} that without it. {' '.join(causes(rows))}".strip()
    )


MEASURES = (
    ("hit_rate", "Hit rate", ".3f", max),
    ("mean_s", "Mean TTFT (s)", ".2f", min),
    ("p99_s", "p99 TTFT (s)", ".2f", min),
    ("imbalance", "Imbalance", ".2f", min),
)


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Llama 3 8B, {ENGINES} engines on two hosts; {options.limit:,} requests of the Mooncake conversation trace at four",
        "loads, as factors of its rate per engine. Made by `python experiments/routers/run.py`; all numbers are in",
        "[results.csv](results.csv).",
    ]
    yield from opening(
        "All routers before eight engines", text, "Mean and p99 TTFT of all routers by hit rate", claims(rows), finding(rows)
    )
    for name, title, form, best in MEASURES:
        by_load = [
            bold(list(column), best(column), form)
            for load in LOADS
            if (column := [getattr(rows[Cell(load, router)], name) for router in ROUTERS])
        ]
        lines = [(router, *values) for router, values in zip(ROUTERS, zip(*by_load, strict=True), strict=True)]
        yield from section(title, ("router", *(f"load {load:g}" for load in LOADS)), lines)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield ("load", "router", *(field.name for field in fields(Row)))
    for cell, row in rows.items():
        yield (cell.load, cell.router, *astuple(row))


def figure(rows: Rows) -> go.Figure:
    chart = make_subplots(rows=1, cols=2, subplot_titles=("mean TTFT (s)", "p99 TTFT (s)"), horizontal_spacing=0.08)
    told = ("kv_aware", "dynamo", "lmetric", PRECISE)
    kinds = {
        "knows neither prefixes nor sessions": (BLIND, "#888888"),
        "knows what it has sent": ([name for name in ROUTERS if name not in (*BLIND, *told)], "#e69f00"),
        "knows what engines have cached": (told, "#0a9e74"),
    }
    for column, measure in enumerate(("mean_s", "p99_s"), 1):
        for kind, (names, colour) in kinds.items():
            here = [rows[Cell(LOADS[1], name)] for name in names]
            chart.add_scatter(
                x=[100 * row.hit_rate for row in here], y=[getattr(row, measure) for row in here], text=names, name=kind,
                textposition=["bottom center" if name in LABELLED_BELOW else "top center" for name in names],
                mode="markers+text", marker={"size": 10, "color": colour}, showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    hits = [100 * rows[Cell(LOADS[1], name)].hit_rate for name in ROUTERS]
    chart.update_xaxes(title=f"hit rate (%), load {LOADS[1]:g}", range=(min(hits) - 1, max(hits) + 1))
    chart.update_yaxes(type="log", tickvals=(0.3, 0.4, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20))
    return chart.update_layout(template="plotly_white", width=1500, height=700, legend={"orientation": "h", "y": 1.1})


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION}, limit=6_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
