"""Does LMetric's order of routers come out as in its paper (Zhang et al., OSDI 2026, arXiv 2603.15202)?

The paper serves four traces with 16 instances of vLLM v1, each on one H20 of 96 GB, at half of the rate that they can serve, and
compares times to first token and per output token (section 6). So does this study, by simulation: Qwen3 30B-A3B, blocks of 16
tokens, steps of at most 4,096 tokens and 90% of the memory, as in its artifact (github.com/blitz-serving/blitz-router). The first
quarter of the requests fills the caches and does not count.

The paper does not say how it finds what its servers can serve. Here it is what they serve when all requests are there at once and
vllm spreads them, without the first and the last quarter to end. Requests that wait for long find little of what was cached, so
a scheduler that knows caches can serve more: the paper's half lies between ours and our whole.

lmetric     the paper's: new and waiting prefill tokens * requests, this one among both
llm-d       as the paper has it: the lowest time to first token that a model of the engine predicts; not kvsim's llm_d
linear      the scheduler of Alibaba's Bailian as the paper has it: 0.7 * (1 - hit ratio) + 0.3 * batch / largest batch
dynamo      NVIDIA Dynamo's router, kvsim's, with its defaults; the paper tunes its weight for each trace
preble      Preble's E2, kvsim's, with its defaults; the paper runs AIBrix's simpler version
vllm        load alone: 4 * requests before their first token + the others

PolyServe, which fills engines one after another so that others can be switched off, is not played. The paper's traces are played
where they have been fetched; the page says which are missing, and how to get them. Two others always are: Mooncake's
conversations and the synthetic trace. The paper prints few numbers beside its pictures; its text gives the order by mean time to
first token: lmetric and llm-d alike, then linear combinations (linear, dynamo) and preble alike, then vllm.

Claims, at half of what can be served:

1. Kendall's tau-b with the paper's order by mean TTFT is at least 0.6 on every trace;
2. lmetric has the lowest mean TTFT on every trace, within 10% (the paper: 10% above llm-d's on one trace of four);
3. every router that knows caches has a lower mean TTFT than vllm on every trace;
4. lmetric has the lowest mean TPOT on every trace, within 2%;
5. lmetric's mean TTFT is a smaller share of vllm's at the whole load than at half, on every trace.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from schedulers import VLLM, Linear, LowestTTFT

import kvsim
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.report.study import CONVERSATION, Claim, Study, bold, highest, lowest, opening, option_parser, section
from kvsim.trace.base import Trace
from kvsim.trace.published import TRACES, cache_folder

ENGINES = 16
HALF, WHOLE = 0.5, 1.0
LOADS = (HALF, 0.75, WHOLE)
"""As shares of what the engines can serve."""
ROUTERS = ("lmetric", "llm-d", "linear", "dynamo", "preble", "vllm")
ORDER = {"lmetric": 1, "llm-d": 1, "linear": 2, "dynamo": 2, "preble": 2, "vllm": 3}
"""The paper's, by mean TTFT: it calls llm-d second best with a similar TTFT, and preble similar to the linear combinations."""
AT_HAND = ("conversation", "synthetic")
PAPERS = {
    "ChatBot": "bailian_a", "Agent": "bailian_b", "Coder": "bailian_coder", "ToolAgent": "mooncake_toolagent",
}  # fmt: skip
"""The paper's traces, by their names there: what ``kvsim trace fetch`` calls them."""
RELATIVE = (
    ("ChatBot", "mean TTFT", "mean_s", "lmetric", "vllm", -92.0),
    ("ChatBot", "mean TPOT", "tpot_s", "lmetric", "vllm", -24.0),
    ("ChatBot", "mean TTFT", "mean_s", "linear", "vllm", -84.0),
    ("ChatBot", "mean TPOT", "tpot_s", "linear", "vllm", -17.0),
    ("ChatBot", "p99 TPOT", "p99_tpot_s", "lmetric", "llm-d", -13.0),
    ("ChatBot", "mean TTFT", "mean_s", "lmetric", "preble", -56.0),
    ("ChatBot", "p99 TTFT", "p99_s", "lmetric", "preble", -45.0),
    ("ChatBot", "mean TPOT", "tpot_s", "lmetric", "preble", -8.0),
    ("ChatBot", "p99 TPOT", "p99_tpot_s", "lmetric", "preble", -16.0),
    ("ToolAgent", "mean TTFT", "mean_s", "lmetric", "llm-d", 10.0),
    ("ToolAgent", "mean TPOT", "tpot_s", "lmetric", "llm-d", -30.0),
)
"""Every comparison between these routers that the paper prints (sections 4.2, 6.1 and 6.2): per cent."""
SERVERS = (
    "preset=vllm", "model=qwen3_30b_a3b", f"cluster.engines={ENGINES}", "engine.max_batch_tokens=4096", "tiers.gpu.capacity=auto",
    "hardware=h100", "hardware.memory_bytes=96000000000", "hardware.flops_per_s=148e12", "hardware.memory_bytes_per_s=4e12",
    "warmup=0.25",
)  # fmt: skip
"""An H20 by its data sheet: 148e12 FLOPs in bf16, 4e12 bytes of HBM3 a second, 96 GB; an H100's share of both."""
QUICK = "preble, 30 s"
"""Preble that counts what was sent in the last 30 s instead of 180; only at half, to tell why it is slow."""
AGREES, WITHIN, WITHIN_TPOT = 0.6, 1.1, 1.02


@dataclass(frozen=True)
class Cell:
    """One run."""

    trace: str
    load: float
    router: str


@dataclass(frozen=True)
class Row:
    """Results of a run."""

    requests_per_s: float
    """That arrive."""
    hit_rate: float
    mean_s: float
    p99_s: float
    tpot_s: float
    p99_tpot_s: float


Rows = dict[Cell, Row]


def router(name: str) -> RoutingPolicy | str:
    """A router by its name here."""
    own: dict[str, RoutingPolicy] = {"vllm": VLLM(), "linear": Linear(), "llm-d": LowestTTFT()}
    return own.get(name, name)


def found(folder: Path) -> list[str]:
    """The paper's traces that have been fetched."""
    return [name for name, published in PAPERS.items() if (folder / TRACES[published].file).is_file()]


def cells(traces: Sequence[str] = AT_HAND) -> list[Cell]:
    every = [Cell(trace, share, name) for trace in traces for share in LOADS for name in ROUTERS]
    return [*every, *(Cell(trace, HALF, QUICK) for trace in traces)]


@cache
def load(options: tuple[str, Path, int], name: str, rate: float) -> Trace:
    conversation, folder, limit = options
    if name == "synthetic":
        return kvsim.load_trace("synthetic", limit=limit, rate=rate, arrivals="open_loop")
    path = conversation if name == "conversation" else folder / TRACES[PAPERS[name]].file
    return kvsim.load_trace(path, limit=limit, rate=rate)


@cache
def most(options: tuple[str, Path, int], name: str) -> float:
    """What the engines can serve, as a factor of the trace's rate: how fast the middle half of all requests ends at once."""
    span_s = span(load(options, name, 1.0))
    crowd = load(options, name, max(1.0, span_s))
    ends_s = np.sort(kvsim.simulate(crowd, *SERVERS, "warmup=0", routing=VLLM()).requests["last_token_s"])
    first, last = len(ends_s) // 4, 3 * len(ends_s) // 4
    return float((last - first) / (ends_s[last] - ends_s[first]) * span_s / len(ends_s))


def span(trace: Trace) -> float:
    """The seconds in which the requests of a trace arrive."""
    return float(trace.requests[-1].arrival_s - trace.requests[0].arrival_s)


def run(options: Namespace, cell: Cell) -> Row:
    given = options.conversation, options.published, options.limit
    trace = load(given, cell.trace, cell.load * most(given, cell.trace))
    name, *more = ("preble", "routing.window_s=30") if cell.router == QUICK else (cell.router,)
    result = kvsim.simulate(trace, *SERVERS, *more, routing=router(name))
    first, each = result.record["ttft_s"], result.record["tpot_s"]
    return Row(len(trace.requests) / span(trace), result.hit_rate, first["mean"], first["p99"], each["mean"], each["p99"])


def traces_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(cell.trace for cell in rows))


def of(rows: Rows, trace: str, measure: str, load: float = HALF) -> dict[str, float]:
    """A measure of each router on a trace."""
    return {name: float(getattr(rows[Cell(trace, load, name)], measure)) for name in ROUTERS}


def tau(ranks: Mapping[str, float], values: Mapping[str, float]) -> float:
    """Kendall's tau-b of two orders of the same names: 1 if they agree, -1 if one is the other reversed; 0 if one is all ties."""
    names = list(ranks)
    pairs = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]
    signs = [(_sign(ranks[one] - ranks[other]), _sign(values[one] - values[other])) for one, other in pairs]
    agreed = sum(left * right for left, right in signs)
    untied = [sum(sign[side] != 0 for sign in signs) for side in (0, 1)]
    return agreed / (untied[0] * untied[1]) ** 0.5 if all(untied) else 0.0


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


def taus(rows: Rows, load: float = HALF) -> dict[str, float]:
    """The agreement with the paper's order by trace."""
    return {trace: tau(ORDER, of(rows, trace, "mean_s", load)) for trace in traces_of(rows)}


def above_least(rows: Rows, measure: str) -> dict[str, float]:
    """lmetric's measure by the lowest of all, by trace."""
    return {trace: values["lmetric"] / min(values.values()) for trace in traces_of(rows) if (values := of(rows, trace, measure))}


def claims(rows: Rows) -> list[Claim]:
    agreement = taus(rows)
    late, slow = above_least(rows, "mean_s"), above_least(rows, "tpot_s")
    means = {(trace, load): of(rows, trace, "mean_s", load) for trace in traces_of(rows) for load in LOADS}
    (worst_trace, worst), most_of_vllm = highest(
        {
            (trace, name): means[trace, HALF][name] / means[trace, HALF]["vllm"]
            for trace in traces_of(rows)
            for name in ROUTERS[:-1]
        }
    )
    shares = {
        trace: [means[trace, load]["lmetric"] / means[trace, load]["vllm"] for load in (HALF, WHOLE)] for trace in traces_of(rows)
    }
    at_least, at_most, at_slowest = lowest(agreement), highest(late), highest(slow)
    return [
        Claim(
            f"Kendall's tau-b with the paper's order by mean TTFT is at least {AGREES}",
            f"at least {at_least[1]:.2f} ({at_least[0]})",
            at_least[1] >= AGREES,
        ),
        Claim(
            "lmetric has the lowest mean TTFT, within 10%",
            f"up to {at_most[1]:.2f} times the lowest ({at_most[0]})",
            at_most[1] <= WITHIN,
        ),
        Claim(
            "every router that knows caches has a lower mean TTFT than vllm",
            f"at most {most_of_vllm:.2f} times vllm's ({worst}, {worst_trace})",
            most_of_vllm < 1,
        ),
        Claim(
            "lmetric has the lowest mean TPOT, within 2%",
            f"up to {at_slowest[1]:.2f} times the lowest ({at_slowest[0]})",
            at_slowest[1] <= WITHIN_TPOT,
        ),
        Claim(
            "lmetric's mean TTFT is a smaller share of vllm's at the whole load than at half",
            "; ".join(f"{trace} {half:.2f} and {whole:.2f}" for trace, (half, whole) in shares.items()),
            all(whole < half for half, whole in shares.values()),
        ),
    ]


def relative(rows: Rows, place: tuple[str, float], measure: str, one: str, other: str) -> float:
    """How much one router's measure is above another's, in per cent."""
    values = of(rows, place[0], measure, place[1])
    return 100 * (values[one] / values[other] - 1)


def places_of(rows: Rows) -> list[tuple[str, float]]:
    return [(trace, load) for trace in traces_of(rows) for load in LOADS]


def beside(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Every number that the paper prints, with ours."""
    for where, title, measure, one, other, printed in RELATIVE:
        ours = [f"{relative(rows, place, measure, one, other):+.0f}%" for place in places_of(rows)]
        yield (f"{title}, {one} against {other}", f"{printed:+.0f}% ({where})", *ours)


def why(rows: Rows) -> Iterator[str]:
    """What sets ours apart from the paper's."""
    chats, mixed = AT_HAND
    at_half = {trace: relative(rows, (trace, HALF), "mean_s", "lmetric", "vllm") for trace in AT_HAND}
    at_whole = relative(rows, (mixed, WHOLE), "mean_s", "lmetric", "vllm")
    agreed = taus(rows, WHOLE)
    yield (
        "- **The load.** At half, vllm's queues are short; at the whole they only grow, while a scheduler that knows "
        f"caches leaves less to compute. On the {mixed} trace lmetric's mean TTFT is {at_half[mixed]:+.0f}% and "
        f"{at_whole:+.0f}% against vllm's: the paper's -92% lies between. At the whole load, tau-b is "
        f"{agreed[chats]:.2f} ({chats}) and {agreed[mixed]:.2f} ({mixed})."
    )
    hits = of(rows, chats, "hit_rate")
    yield (
        "- **The trace.** Most of a prompt of Mooncake's conversations is new, and 16 engines with what the weights "
        f"leave of 96 GB hit {hits['vllm']:.0%} under vllm and {max(hits.values()):.0%} at most: "
        f"{at_half[chats]:+.0f}% is what so little reuse gives."
    )
    quick, slow = rows[Cell(chats, HALF, QUICK)].mean_s, rows[Cell(chats, HALF, "preble")].mean_s
    yield (
        "- **preble** counts what it has sent to an engine in the last 180 s, done or not. Prompts of conversations "
        "differ a hundredfold in length, so that says little of who is busy now: with 30 s its mean TTFT is "
        f"{quick:.1f} s, not {slow:.1f} s. The paper runs AIBrix's version, which weighs load in another way, and has "
        "tuned it."
    )
    linear = {trace: relative(rows, (trace, HALF), "mean_s", "linear", "vllm") for trace in AT_HAND}
    yield (
        "- **linear** has the highest hit rates and pays in queues: 0.7 is the weight that the paper found best for "
        f"its chats. Its mean TTFT is {linear[mixed]:+.0f}% against vllm's on the {mixed} trace, and "
        f"{linear[chats]:+.0f}% on {chats}. That the weight must be found for each trace is the paper's point."
    )
    ttft, tpot = [relative(rows, (mixed, HALF), measure, "lmetric", "llm-d") for measure in ("mean_s", "tpot_s")]
    yield (
        "- **llm-d** estimates by the model with which the simulated engines compute, so it errs less than the "
        "paper's, where one estimate in ten is off by more than 20%. Its times to first token are lmetric's "
        f"({ttft:+.0f}% on the {mixed} trace). It does not count requests that decode: lmetric's mean TPOT is "
        f"{tpot:+.0f}% against it; the paper has -30% on ToolAgent."
    )
    half, later = [of(rows, mixed, "tpot_s", load) for load in LOADS[:2]]
    soonest = min(half, key=half.__getitem__)
    yield (
        f"- **Mean TPOT.** On the {mixed} trace at half, where decode steps are short for all, {soonest} has the lowest: "
        f"{1000 * half[soonest]:.2f} ms, lmetric {1000 * half['lmetric']:.2f} ms. Dynamo's cost counts the pages that running "
        f"requests use, LMetric's product their number. At {LOADS[1]:g} lmetric has {1000 * later['lmetric']:.2f} ms, dynamo "
        f"{1000 * later['dynamo']:.2f} ms."
    )


def missing(traces: list[str]) -> Iterator[tuple[str, ...]]:
    """What to fetch for the paper's own traces."""
    for name, published in PAPERS.items():
        if name not in traces:
            trace = TRACES[published]
            yield name, f"`kvsim trace fetch {published}`", f"`{trace.file}`", f"`{trace.sha256}`"


def finding(rows: Rows) -> str:
    agreement, lines = taus(rows), []
    for trace in traces_of(rows):
        ranked = sorted(ROUTERS, key=of(rows, trace, "mean_s").__getitem__)
        lines.append(f"on {trace} {', '.join(ranked)} (tau-b {agreement[trace]:.2f})")
    return f"By mean TTFT at half, the paper has lmetric = llm-d, linear = dynamo = preble, vllm. Here it is {'; '.join(lines)}."


MEASURES = (
    ("mean_s", "Mean TTFT (s)", ".3f", min),
    ("p99_s", "p99 TTFT (s)", ".2f", min),
    ("tpot_s", "Mean TPOT (ms)", ".2f", min),
    ("p99_tpot_s", "p99 TPOT (ms)", ".2f", min),
    ("hit_rate", "Hit rate", ".3f", max),
)
MS = ("tpot_s", "p99_tpot_s")
"""Measures in seconds that are shown in milliseconds."""


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    traces = traces_of(rows)
    rates = ", ".join(f"{rows[Cell(trace, WHOLE, 'vllm')].requests_per_s:.1f} of {trace}" for trace in traces)
    text = [
        f"Qwen3 30B-A3B on {ENGINES} H20 with vLLM's rules; the first {options.limit:,} requests of each trace. In a second, the",
        f"engines can serve {rates}; loads are shares of that. Made by",
        "`python experiments/lmetric/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    picture = "Mean TTFT and TPOT of each router, as multiples of vllm's, by trace and load"
    yield from opening("LMetric's order of routers", text, picture, claims(rows), finding(rows))
    heads = [f"{trace}, {load:g}" for trace, load in places_of(rows)]
    yield from section("Beside the paper", ("", "paper", *heads), beside(rows), *BESIDE)
    yield from ("", "## Why they differ", "", *why(rows))
    for measure, title, form, best in MEASURES:
        scale = 1000 if measure in MS else 1
        columns = [[scale * value for value in of(rows, trace, measure, load).values()] for trace, load in places_of(rows)]
        shown = [bold(column, best(column), form) for column in columns]
        yield from section(title, ("router", *heads), zip(ROUTERS, *shown, strict=True))
    if lacking := list(missing(traces)):
        head = ("trace", "fetched by", "file", "sha256")
        yield from section("The paper's traces that were not played", head, lacking, *FETCH)


BESIDE = ("The paper's numbers are those that the text prints in sections 4.2, 6.1 and 6.2, of its own traces.",)
FETCH = (
    "Once they are in the folder of `kvsim trace fetch`, or in that of `--published`, the same command plays them, too. The",
    "artifact calls its Coder trace `anony-qwen3-coder-20251118-14-16.jsonl`; what was published is taken for it. Its ToolAgent",
    "trace is Mooncake's with other arrival times.",
)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield ("trace", "load", "router", *(field.name for field in fields(Row)))
    for cell, row in rows.items():
        yield (cell.trace, cell.load, cell.router, *astuple(row))


COLOURS = ("#0a9e74", "#3d8fd1", "#e69f00", "#cc79a7", "#8c6d31", "#888888")


def figure(rows: Rows) -> go.Figure:
    titles = ("mean TTFT / vllm's", "mean TPOT / vllm's")
    chart = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.07)
    labels = [f"{trace}<br>load {load:g}" for trace, load in places_of(rows)]
    for column, measure in enumerate(("mean_s", "tpot_s"), 1):
        values = [of(rows, trace, measure, load) for trace, load in places_of(rows)]
        for name, colour in zip(ROUTERS, COLOURS, strict=True):
            shares = [one[name] / one["vllm"] for one in values]
            chart.add_scatter(
                x=labels, y=shares, name=name, mode="markers", marker={"size": 12, "color": colour, "opacity": 0.8},
                showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    chart.update_yaxes(type="log", tickvals=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20))
    return chart.update_layout(
        template="plotly_white",
        width=1300,
        height=480,
        scattermode="group",
        scattergap=0.3,
        legend={"orientation": "h", "y": 1.18},
    )


class WithPublished(Study[Cell, Row]):
    """A study that also plays published traces, where they have been fetched."""

    def options(self) -> Namespace:
        parser = option_parser(self.file, self.question, self.traces)
        parser.add_argument(
            "--limit", type=int, default=self.limit, help="requests of each trace; the claims are about the default"
        )
        text = "folder of the paper's traces, by default that of `kvsim trace fetch`"
        parser.add_argument("--published", type=Path, default=cache_folder(), help=text)
        return parser.parse_args()

    def play(self, options: Namespace) -> Rows:
        names = (*AT_HAND, *found(options.published))
        played = replace(self, cells=lambda: cells(names))
        return Study.play(played, options)


STUDY = WithPublished(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION}, limit=6_000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
