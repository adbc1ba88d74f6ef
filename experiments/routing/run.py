"""When does affinity lose to load? Every router before 2 to 32 engines.

Llama 3 8B on engines that share a host's CPU memory four by four. The load of each engine stays the same as engines are added:

conversation    the first 6,000 requests of the Mooncake conversation trace, its rate multiplied by 0.35 per engine (1.2 requests
                per second). An engine is one H200 with 80 GiB of KV; a host has 128 GiB of CPU memory for each of its engines.
                The file does not name conversations: all prompts share the first block of 512 tokens, and those that share the
                second one are taken for a conversation. The pauses of the users shrink as the rate grows.
agents          WEKA's agent sessions in a closed loop, 12 users per engine, and the 300 requests per engine that arrive first.
                An engine is two H200 with 200 GiB of KV; a host has 256 GiB of CPU memory for each of its engines.

Eight engines are also played with other loads. The first quarter of the requests fills the caches and does not count. The
imbalance is what the engine with the most prompt tokens to compute computes, over the mean of all engines. kv_aware also gets
reports that are 1 and 10 seconds old, or counts what it must compute eight times (overlap_score_weight=8).

Claims:

1. kv_aware, which knows what every GPU has cached, has the highest hit rate everywhere, within one point;
2. on one host (2 and 4 engines) all routers hit alike, within one point: the CPU tier has what the other engines compute;
3. from 4 engines on, round_robin's hit rate falls with every doubling of the engines;
4. session_affinity's p99 TTFT is above least_loaded's wherever one of its engines computes more than 1.5 times the mean;
5. kv_aware has the lowest p99 TTFT everywhere, within 10%;
6. reports that are 10 s old cost kv_aware at most one point of hit rate and a tenth of p99 TTFT everywhere.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import pairwise

import plotly.graph_objects as go
from clusters import (
    ENGINES,
    ENGINES_PER_HOST,
    LOADED_ENGINES,
    LOADS,
    PLAIN,
    ROUTERS,
    STALENESS_S,
    STALEST,
    WEIGHTED,
    Cell,
    Place,
    Rows,
    cells,
    loads,
    places,
    run,
    sizes,
)
from plotly.subplots import make_subplots

from kvsim.report.study import CONVERSATION, WEKA, Claim, Study, bold, highest, lowest, opening, section

COLOURS = (
    dict(zip(PLAIN, ("#888888", "#bbbbbb", "#3d8fd1", "#8cc3ee", "#d55e00", "#e69f00", "#0a9e74"), strict=True))
    | dict.fromkeys(("kv_aware, 1 s", STALEST), "#0a9e74")
    | {WEIGHTED: "#6a3d9a"}
)
DASHES = {"kv_aware, 1 s": "dash", STALEST: "dot"}
UNEVEN = 1.5
"""Imbalance from which on an engine counts as overloaded."""


def of(rows: Rows, router: str, name: str) -> dict[Place, float]:
    """A measure of one router, everywhere."""
    return {place: getattr(rows[Cell(place, router)], name) for place in places()}


def best(rows: Rows, place: Place, name: str, choose: Callable[..., str]) -> str:
    """The router with the highest or lowest value, of those with default settings."""
    return choose(PLAIN, key=lambda router: getattr(rows[Cell(place, router)], name))


def relative(values: dict[Place, float], others: dict[Place, float]) -> dict[Place, float]:
    return {place: value / others[place] for place, value in values.items()}


def best_hits(rows: Rows) -> Claim:
    """Claim 1."""
    firsts = {place: best(rows, place, "hit_rate", max) for place in places()}
    rates = of(rows, "kv_aware", "hit_rate")
    place, points = highest({place: rows[Cell(place, firsts[place])].hit_rate - rates[place] for place in places()})
    text = "kv_aware has the highest hit rate everywhere, within one point"
    return Claim(text, f"up to {100 * points:.1f} points below {firsts[place]} ({place})", points <= 0.01)


def one_host(rows: Rows) -> Claim:
    """Claim 2."""
    small = [place for place in places() if place.engines <= ENGINES_PER_HOST]
    rates = {place: [rows[Cell(place, router)].hit_rate for router in PLAIN] for place in small}
    place, points = highest({place: max(each) - min(each) for place, each in rates.items()})
    text = "on one host all routers hit alike, within one point"
    return Claim(text, f"up to {100 * points:.1f} points apart ({place})", points <= 0.01)


def turns(rows: Rows) -> Claim:
    """Claim 3."""
    rates = of(rows, "round_robin", "hit_rate")
    series = {trace: [rates[place] for place in sizes(trace) if place.engines >= ENGINES_PER_HOST] for trace in LOADS}
    return Claim(
        f"from {ENGINES_PER_HOST} engines on, round_robin's hit rate falls with every doubling",
        "; ".join(f"{trace}: " + ", ".join(f"{rate:.1%}" for rate in each) for trace, each in series.items()),
        all(later < earlier for each in series.values() for earlier, later in pairwise(each)),
    )


def overloaded(rows: Rows) -> Claim:
    """Claim 4."""
    text = f"session_affinity's p99 TTFT is above least_loaded's wherever one engine computes {UNEVEN} times the mean"
    ratios = affinity_delays(rows)
    uneven = {place: ratios[place] for place, factor in of(rows, "session_affinity", "imbalance").items() if factor > UNEVEN}
    if not uneven:
        return Claim(text, "no engine does", False)
    (first, least), (last, most) = lowest(uneven), highest(uneven)
    where = f"in {sum(ratio > 1 for ratio in uneven.values())} of {len(uneven)} places"
    return Claim(text, f"{where}; from {least:.2f} times ({first}) to {most:.2f} times ({last})", least > 1)


def affinity_delays(rows: Rows) -> dict[Place, float]:
    """p99 TTFT of session_affinity relative to least_loaded's."""
    return relative(of(rows, "session_affinity", "p99_s"), of(rows, "least_loaded", "p99_s"))


def soonest(rows: Rows) -> Claim:
    """Claim 5."""
    firsts = {place: best(rows, place, "p99_s", min) for place in places()}
    times = {place: rows[Cell(place, router)].p99_s for place, router in firsts.items()}
    place, ratio = highest(relative(of(rows, "kv_aware", "p99_s"), times))
    text = "kv_aware has the lowest p99 TTFT everywhere, within 10%"
    return Claim(text, f"up to {ratio:.2f} times that of {firsts[place]} ({place})", ratio <= 1.1)


def stale(rows: Rows) -> Claim:
    """Claim 6."""
    fresh, old = of(rows, "kv_aware", "hit_rate"), of(rows, STALEST, "hit_rate")
    lost, loss = highest({place: fresh[place] - old[place] for place in places()})
    later, ratio = highest(relative(of(rows, STALEST, "p99_s"), of(rows, "kv_aware", "p99_s")))
    text = f"reports that are {STALENESS_S[-1]} s old cost kv_aware at most one point of hit rate and a tenth of p99 TTFT"
    measured = f"up to {100 * loss:.1f} points ({lost}) and {ratio:.2f} times ({later})"
    return Claim(text, measured, loss <= 0.01 and ratio <= 1.1)


def claims(rows: Rows) -> list[Claim]:
    return [claim(rows) for claim in (best_hits, one_host, turns, overloaded, soonest, stale)]


def finding(rows: Rows) -> str:
    ratios, kv = affinity_delays(rows), of(rows, "kv_aware", "p99_s")
    firsts = sum(kv[place] <= 1.1 * rows[Cell(place, best(rows, place, "p99_s", min))].p99_s for place in places())
    more, weighted = of(rows, "kv_aware", "hit_rate"), of(rows, WEIGHTED, "hit_rate")
    sooner = relative(of(rows, WEIGHTED, "mean_s"), of(rows, "kv_aware", "mean_s"))
    lists = "; ".join(
        f"{trace}: " + ", ".join(f"{ratios[place]:.2f} with {place.engines}" for place in sizes(trace)) for trace in LOADS
    )
    last = {
        trace: [rows[Cell(sizes(trace)[-1], name)].hit_rate for name in ("session_affinity", "least_loaded")] for trace in LOADS
    }
    hits = " and ".join(f"{high:.0%} against {low:.0%} ({trace})" for trace, (high, low) in last.items())
    by_load = ", ".join(f"{ratios[place]:.2f} with {place.load}" for place in loads(list(LOADS)[-1]))
    return (
        f"Affinity loses to load where there is little to gain from it. With {max(ENGINES)} engines session_affinity hits {hits},"
        f" but its p99 TTFT relative to least_loaded's is, by number of engines, {lists}. In conversations most of a prompt is "
        "new, so a short queue is worth more than a hit at every size and load. Agents' prompts are nearly all old. On one host "
        "the other engines find them in its CPU memory, and affinity only makes queues uneven; with two hosts either may win, "
        f"depending on the load ({by_load} users per engine); with more, misses cost more than uneven queues. "
        f"kv_aware weighs both and has the lowest p99 TTFT, within 10%, in {firsts} of {len(kv)} places. It does not hit most: "
        "with a weight of 1 a block to compute counts as much as a block in use. A weight of 8 hits "
        f"{100 * min(weighted[place] - more[place] for place in places()):+.1f} to "
        f"{100 * max(weighted[place] - more[place] for place in places()):+.1f} points more, at "
        f"{min(sooner.values()):.2f} to {max(sooner.values()):.2f} times the mean TTFT. "
        "Sizes are not comparable in every respect: more engines have more memory in all, and play more of the agents' sessions; "
        "with 2 engines the p99 of agents is that of the five slowest requests."
    )


MEASURES = (
    ("hit_rate", "hit rate", ".3f", max),
    ("p99_s", "p99 TTFT (s)", ".2f", min),
    ("imbalance", "imbalance", ".2f", min),
)


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    chats, agents = options.limit
    text = [
        f"Llama 3 8B, hosts of {ENGINES_PER_HOST} engines; {chats:,} requests of the Mooncake conversation trace and, with "
        f"{max(ENGINES)} engines,",
        f"{agents:,} of WEKA's agent sessions. Made by `python experiments/routing/run.py`; all numbers are in",
        "[results.csv](results.csv).",
    ]
    picture = "Hit rate, p99 TTFT and imbalance by router and engines, and p99 TTFT by load"
    yield from opening("Which router, from 2 to 32 engines", text, picture, claims(rows), finding(rows))
    for trace in LOADS:
        for name, title, form, of in MEASURES:
            yield from section(f"{trace}: {title}", ("engines", "load", *ROUTERS), grid(rows, trace, name, form, of))


def grid(rows: Rows, trace: str, name: str, form: str, of: Callable[[list[float]], float]) -> list[list[str]]:
    """Return the lines of a table of one measure: all numbers of engines at the usual load, then the other loads."""
    body = []
    for place in dict.fromkeys((*sizes(trace), *loads(trace))):
        values = [getattr(rows[Cell(place, router)], name) for router in ROUTERS]
        body.append([str(place.engines), f"{place.load:g}", *bold(values, of(values), form)])
    return body


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield (
        "trace", "engines", "load_per_engine", "router", "hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s",
        "imbalance", "busy_imbalance", "busy_share", "simulated_s",
    )  # fmt: skip
    for cell, row in rows.items():
        place = cell.place
        yield place.trace, place.engines, place.load, cell.router, *(f"{number:.6g}" for number in astuple(row))


def figure(rows: Rows) -> go.Figure:
    columns = (
        *((name, title, "engines") for name, title, _, _ in MEASURES),
        ("p99_s", "p99 TTFT (s)", "load"),
    )
    titles = [
        f"{trace}: {title}" + (f", {LOADED_ENGINES} engines" if along == "load" else "")
        for trace in LOADS
        for _, title, along in columns
    ]
    figure = make_subplots(rows=2, cols=len(columns), subplot_titles=titles, vertical_spacing=0.16, horizontal_spacing=0.05)
    for row, trace in enumerate(LOADS, 1):
        for column, (name, _, along) in enumerate(columns, 1):
            for router in ROUTERS:
                here = sizes(trace) if along == "engines" else loads(trace)
                figure.add_scatter(
                    x=[f"{getattr(place, along):g}" for place in here],
                    y=[getattr(rows[Cell(place, router)], name) for place in here],
                    name=router, legendgroup=router, showlegend=row == column == 1, mode="lines+markers", row=row, col=column,
                    line={"color": COLOURS[router], "width": 2, "dash": DASHES.get(router, "solid")},
                )  # fmt: skip
            figure.update_xaxes(
                type="category", title={"engines": "engines", "load": "load per engine"}[along], row=row, col=column
            )
            if name == "p99_s":
                figure.update_yaxes(type="log", tickvals=(3, 4, 5, 6, 8, 10, 20, 50, 100, 200, 500), row=row, col=column)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", col=1)
    figure.update_annotations(font_size=14)
    return figure.update_layout(template="plotly_white", width=1500, height=800, legend={"orientation": "h", "y": 1.13})


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION, "weka": WEKA}, limit=(6_000, 9_600),
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
