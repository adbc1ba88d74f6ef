"""Is one CPU tier for all engines of a host better than the same bytes divided among them?

Llama 3 8B on 2, 4 or 8 H200 of one host, one engine each, with 60 GiB of KV per GPU; the first 4,000 requests of the Mooncake
conversation trace, at 0.84 requests per second and engine. The host has 800 GiB for KV: one tier for all engines
(``tiers.cpu.scope=host``), or the same bytes divided among them (``engine``). Each engine has its own host link. Routers:

round_robin     engines take turns, so the turns of a conversation are scattered
kv_aware        NVIDIA Dynamo's: weighs the load against what each GPU has cached; CPU memory does not count
prefix_aware    SGLang's: where most of the prompt was sent before, unless the load is uneven

``session_affinity`` is left out: the trace does not name its sessions.

Claims:

1. the shared tier hits at least as much as the divided one everywhere;
2. with every write policy and number of engines it gains more under round_robin than under either other router;
3. under prefix_aware it gains at most one point anywhere;
4. under round_robin it gains more with more engines, with every write policy;
5. its mean time to first token is nowhere more than 2% longer;
6. with eight engines in turns, write_through hits more than write_back over a shared tier: what only another GPU holds is
   out of reach.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import CONVERSATION, Claim, Study, capacities, highest, lowest, opening, section
from kvsim.trace.base import Trace

ENGINES = (2, 4, 8)
POLICIES = ("write_through", "write_back", "write_through_selective", "exclusive")
ROUTERS = ("round_robin", "kv_aware", "prefix_aware")
COLOURS = ("#3d8fd1", "#0a9e74", "#d55e00", "#8a6fc9")
SCOPES = {"host": "one tier", "engine": "divided"}
GPU_GIB, CPU_GIB = 60, 800
RATE_PER_ENGINE = 0.25
MARGIN = 1.02


class Place(NamedTuple):
    """Where one shared tier is compared with a divided one."""

    engines: int
    router: str
    policy: str

    def __str__(self) -> str:
        return f"{self.engines} engines, {self.router}, {self.policy}"


class Cell(NamedTuple):
    """One simulation."""

    place: Place
    scope: str


class Row(NamedTuple):
    """Results of a cell; rates of hits are of prompt tokens."""

    hit_rate: float
    gpu_hit_rate: float
    ttft_s: float
    ttft_p99_s: float
    written_gb: float
    busy: float
    """Mean share of time that engines are in steps."""


Rows = dict[Cell, Row]


def places() -> list[Place]:
    return [Place(engines, router, policy) for router in ROUTERS for policy in POLICIES for engines in ENGINES]


def cells() -> list[Cell]:
    return [Cell(place, scope) for place in places() for scope in SCOPES]


@cache
def load(path: str, limit: int, engines: int) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit, rate=RATE_PER_ENGINE * engines)


def run(options: Namespace, cell: Cell) -> Row:
    engines, router, policy = cell.place
    cluster = f"cluster.engines={engines}", f"routing={router}", f"placement={policy}", f"tiers.cpu.scope={cell.scope}"
    tiers = capacities(gpu=GPU_GIB, cpu=CPU_GIB)
    result = kvsim.simulate(load(options.trace, options.limit, engines), *cluster, *tiers)
    record, outcome = result.record, result.outcome
    return Row(
        hit_rate=result.hit_rate,
        gpu_hit_rate=record["hit_tokens"]["gpu"] / record["prompt_tokens"],
        ttft_s=record["ttft_s"]["mean"],
        ttft_p99_s=record["ttft_s"]["p99"],
        written_gb=record["links"].get("gpu-cpu", {"bytes": 0})["bytes"] / 1e9,
        busy=sum(use.busy_s for use in outcome.engines) / engines / outcome.simulated_s,
    )


def gains(rows: Rows) -> dict[Place, float]:
    """Points of hit rate that the shared tier gains."""
    return {place: 100 * (rows[Cell(place, "host")].hit_rate - rows[Cell(place, "engine")].hit_rate) for place in places()}


def slower(rows: Rows) -> dict[Place, float]:
    """Mean TTFT with the shared tier, relative to that with the divided one."""
    return {place: rows[Cell(place, "host")].ttft_s / rows[Cell(place, "engine")].ttft_s for place in places()}


def leads(gain: dict[Place, float]) -> dict[Place, float]:
    """How much more the shared tier gains under round_robin than under the router where it gains most of the others."""
    return {
        place: value - max(gain[place._replace(router=router)] for router in ROUTERS[1:])
        for place, value in gain.items()
        if place.router == ROUTERS[0]
    }


def growth(gain: dict[Place, float]) -> dict[Place, float]:
    """What the gain under round_robin adds with the next larger number of engines, in points."""
    larger = dict(pairwise(ENGINES))
    return {
        place: gain[place._replace(engines=larger[place.engines])] - value
        for place, value in gain.items()
        if place.router == ROUTERS[0] and place.engines in larger
    }


def claims(rows: Rows) -> list[Claim]:
    gain = gains(rows)
    least, least_gain = lowest(gain)
    sticky, most_gain = highest({place: value for place, value in gain.items() if place.router == "prefix_aware"})
    behind, lead = lowest(lead_of := leads(gain))
    shrinking, growing = lowest(growth_of := growth(gain))
    slowest, ratio = highest(slower(rows))
    in_turns = {policy: rows[Cell(Place(ENGINES[-1], ROUTERS[0], policy), "host")].hit_rate for policy in POLICIES}
    return [
        Claim(
            "the shared tier hits at least as much everywhere", f"at least {least_gain:+.2f} points ({least})", least_gain >= 0
        ),
        Claim(
            "it gains most under round_robin",
            f"in {sum(value > 0 for value in lead_of.values())} of {len(lead_of)} cases; at worst its lead over the next router "
            f"is {lead:+.2f} points ({behind.engines} engines, {behind.policy})",
            lead > 0,
        ),
        Claim(
            "under prefix_aware it gains at most one point",
            f"at most {most_gain:+.2f} points ({sticky.engines} engines, {sticky.policy})",
            most_gain <= 1,
        ),
        Claim(
            "under round_robin it gains more with more engines",
            f"in {sum(value > 0 for value in growth_of.values())} of {len(growth_of)} steps; at worst {growing:+.2f} points from "
            f"{shrinking.engines} engines to the next number ({shrinking.policy})",
            growing > 0,
        ),
        Claim(
            "its mean TTFT is nowhere more than 2% longer",
            f"at most {100 * (ratio - 1):+.1f}% ({slowest})",
            ratio <= MARGIN,
        ),
        Claim(
            f"{ENGINES[-1]} engines in turns over one tier: write_through hits more than write_back",
            f"{in_turns['write_through']:.2%} against {in_turns['write_back']:.2%}",
            in_turns["write_through"] > in_turns["write_back"],
        ),
    ]


def finding(rows: Rows) -> str:
    gain, ratio = gains(rows), slower(rows)
    parts = []
    for router in ROUTERS:
        points = [value for place, value in gain.items() if place.router == router]
        times = [value for place, value in ratio.items() if place.router == router]
        parts.append(
            f"under {router} {min(points):+.1f} to {max(points):+.1f} points, with a mean TTFT {100 * (min(times) - 1):+.0f}% to "
            f"{100 * (max(times) - 1):+.0f}%"
        )
    shares = [row.busy for row in rows.values()]
    return (
        f"What one tier adds to the hit rate, over all write policies and numbers of engines: {'; '.join(parts)}. "
        f"Engines are busy {min(shares):.0%} to {max(shares):.0%} of the time. kv_aware counts pages on GPUs only, so it does "
        "not send a request to the part of a divided tier that has its prefix. write_through_selective writes down only what is "
        "hit on a GPU, little in 60 GiB, so it has little to share. Under write_back and exclusive, what only one GPU holds is "
        "out of reach of the others: in turns, the shared tier gains less with eight engines than with four. prefix_aware keeps "
        "a conversation on one engine, so there is little to gain; where one tier answers later there, hits do not explain it."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Llama 3 8B on H200s of one host, {GPU_GIB} GiB of KV per GPU and {CPU_GIB} GiB of CPU memory in all; {options.limit:,}",
        "requests of the Mooncake conversation trace, the rate in proportion to the engines. Made by",
        "`python experiments/shared_host/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    picture = "Hit rate with one tier and with the same bytes divided, by router, write policy and engines"
    yield from opening("One CPU tier per host, or a part for each engine", text, picture, claims(rows), finding(rows))
    for router in ROUTERS:
        lines = []
        for policy in POLICIES:
            here = [[rows[Cell(Place(engines, router, policy), scope)] for scope in SCOPES] for engines in ENGINES]
            hits = [f"{shared.hit_rate:.4f} / {divided.hit_rate:.4f}" for shared, divided in here]
            times = [f"{shared.ttft_s:.3f} / {divided.ttft_s:.3f}" for shared, divided in here]
            lines.append([policy, *hits, *times])
        head = ("placement", *(f"{engines} engines" for engines in ENGINES), *(f"TTFT, {engines}" for engines in ENGINES))
        yield from section(router, head, lines, "Hit rate, then mean TTFT in seconds: one tier against the same bytes divided.")


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield (
        "engines",
        "router",
        "policy",
        "scope",
        "hit_rate",
        "gpu_hit_rate",
        "ttft_mean_s",
        "ttft_p99_s",
        "written_gb",
        "busy_share",
    )
    for (place, scope), row in rows.items():
        rates, times = (f"{row.hit_rate:.6f}", f"{row.gpu_hit_rate:.6f}"), (f"{row.ttft_s:.4f}", f"{row.ttft_p99_s:.4f}")
        yield *place, scope, *rates, *times, f"{row.written_gb:.1f}", f"{row.busy:.3f}"


def figure(rows: Rows) -> go.Figure:
    titles = [f"{router}, {engines} engines" for router in ROUTERS for engines in ENGINES]
    figure = make_subplots(
        rows=len(ROUTERS), cols=len(ENGINES), subplot_titles=titles, shared_yaxes=True, shared_xaxes=True, vertical_spacing=0.08
    )
    for at, router in enumerate(ROUTERS, 1):
        for column, engines in enumerate(ENGINES, 1):
            for scope, colour in zip(SCOPES, COLOURS, strict=False):
                values = [rows[Cell(Place(engines, router, policy), scope)].hit_rate for policy in POLICIES]
                figure.add_bar(
                    x=[policy.replace("write_through_selective", "selective") for policy in POLICIES], y=values,
                    name=SCOPES[scope], legendgroup=scope, marker_color=colour, showlegend=at == column == 1,
                    row=at, col=column,
                )  # fmt: skip
    figure.update_yaxes(tickformat=".0%", matches="y")
    figure.update_yaxes(title="hit rate", col=1)
    return figure.update_layout(
        template="plotly_white", width=1100, height=850, legend={"orientation": "h", "y": 1.09}, margin={"t": 120},
        title=f"{CPU_GIB} GiB of CPU memory: one tier for all engines, or divided among them", barmode="group",
    )  # fmt: skip


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": CONVERSATION}, limit=4_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
