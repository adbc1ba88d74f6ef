"""Do eviction policies rank by compute saved as in "When fancy eviction fails" (arXiv:2609.28870)?

Liu, Yu and Yang weigh each hit by the FLOPs that it saves: a block deep in a prompt costs several times the first one. On their
agents' trace (FreeInference), with 24 GiB of KV of Qwen3-Coder-30B, RandomCompute saves .638 of the compute, 10.4 points more
than LRU and more than Belady, which knows the future but counts hits; frequency is far behind LRU.

Their two traces are not at hand, and their figures are quoted from public readings of the paper. Played here, in
Qwen3-Coder-30B's bytes and FLOPs, without the requests of more than 262,144 tokens that the authors leave out, too:

agents         WEKA's sessions of Claude Code, the 8,000 earliest requests; pages of 64 tokens
conversation   the Mooncake conversation trace; pages of 512 tokens
generated      the synthetic trace (chats, agents, documents); pages of 16 tokens
file           whatever --file names, such as theirs (freeinference.lcp.zst) or one of the Qwen-Bailian traces

Twice: by kvsim, where a page leaves only after the pages behind it, and by the rule of the authors' simulator, where any block
may leave and one behind a hole is a hit (24 to 96 GiB; see flat_blocks.py).

Claims:

1. the model's FLOPs are what the authors print: .13 and 1.22 TFLOP per layer for 1,024 tokens at the start and after 65,536, and
   their measured cost of a block within 10%;
2. by the authors' rule RandomCompute saves at least 5 points more than LRU for agents with 24 GiB, and more than Belady;
3. by the authors' rule BeladyCompute saves over 5 points more than Belady for agents with 24 GiB, and elsewhere at most 1.1;
4. in kvsim our order and the paper's have Kendall's tau of at least .6 for agents with 24, 48 and 96 GiB;
5. frequency (lfu, w_tinylfu) saves less than LRU for agents and the generated trace with 24, 48 and 96 GiB;
6. with 1 TiB, LRU saves at most .4 points less than the best policy without foresight, on every trace;
7. LRU leaves no holes: both rules save the same with it, within .1 points, on every trace with 24, 48 and 96 GiB.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import plotly.graph_objects as go
from flat_blocks import SCORES, Numbers, replay
from plotly.subplots import make_subplots
from published_savings import (
    BLOCK_COST,
    CONVERGED,
    GAP,
    LAYER_TFLOPS,
    OTHER_GAPS,
    RANKS,
    SAVED,
    TRACES,
    kendall,
    order,
    published,
)

import kvsim
from kvsim.errors import UsageError
from kvsim.model.spec import ModelSpec
from kvsim.report.study import CONVERSATION, WEKA, Claim, Study, bold, highest, lowest, markdown, opening, section
from kvsim.trace.base import Trace

MODEL = "qwen3_coder_30b"
CODER = ModelSpec(
    layers=48, hidden_size=2048, vocabulary=151_936, heads=32, kv_heads=4, head_dim=128,
    routed_experts=128, experts_per_token=8, expert_width=768,
)  # fmt: skip
"""What ``MODEL`` is."""
CONTEXT_TOKENS = 262_144
GIB = (24, 48, 96, 1024)
HBM_GIB = GIB[:3]
"""Where the authors' rule is played."""
AGENTS, CHATS, GENERATED, FILE = "agents", "conversation", "generated", "file"
TRACE_NAMES = (AGENTS, CHATS, GENERATED)
ONLINE = ("lru", "arc", "sieve", "s3_fifo", "lfu", "w_tinylfu", "workload_aware", "random_compute")
FORESIGHT = ("belady", "belady_compute")
POLICIES = (*ONLINE, *FORESIGHT)
OURS, THEIRS = "kvsim", "authors"
MISSING = float("nan")


@dataclass(frozen=True)
class Cell:
    """One replay."""

    trace: str
    rule: str
    gib: int
    policy: str


@dataclass(frozen=True)
class Row:
    """What was saved; nan where the trace lacks what the policy needs, or no file was given."""

    saved: float = MISSING
    hit_rate: float = MISSING
    requests: int = 0
    rejected: int = 0

    @property
    def is_measured(self) -> bool:
        return self.saved == self.saved


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    ours = [Cell(trace, OURS, gib, policy) for trace in (*TRACE_NAMES, FILE) for gib in GIB for policy in POLICIES]
    return [*ours, *(Cell(trace, THEIRS, gib, policy) for trace in TRACE_NAMES for gib in HBM_GIB for policy in SCORES)]


@cache
def load(trace: str, path: str | None, limit: int | None) -> Trace:
    if trace == GENERATED:
        return kvsim.load_trace("synthetic", page_tokens=16, limit=limit)
    if trace == FILE:
        return without_long(kvsim.load_trace(path=path, page_tokens=16, limit=limit))
    source, page_tokens = ("weka", 64) if trace == AGENTS else ("mooncake", 512)
    return without_long(kvsim.load_trace(source, path=path, page_tokens=page_tokens, limit=limit))


def without_long(trace: Trace) -> Trace:
    """Return the trace without requests of more tokens than the model's context, in the same order."""
    short = [request for request in trace.requests if request.prompt_tokens + request.output_tokens <= CONTEXT_TOKENS]
    if len(short) == len(trace.requests):
        return trace
    requests = [replace(request, index=at, after=-1, joins=()) for at, request in enumerate(short)]
    return replace(trace, requests=requests, origin=(), source=None)


def run(options: Namespace, cell: Cell) -> Row:
    """Play a cell; a file that is not given, and a policy that the trace does not suit, are not measured."""
    paths = {AGENTS: options.weka, CHATS: options.conversation, GENERATED: None, FILE: options.file}
    if cell.trace == FILE and options.file is None:
        return Row()
    is_part = cell.trace == AGENTS or options.limit != STUDY.limit
    trace = load(cell.trace, paths[cell.trace], options.limit if is_part else None)
    return by_kvsim(trace, cell) if cell.rule == OURS else by_authors(trace, cell)


def by_kvsim(trace: Trace, cell: Cell) -> Row:
    overrides = (f"model={MODEL}", f"eviction={cell.policy}", f"tiers.gpu.capacity={cell.gib}GiB", "replay.hold_output=false")
    try:
        outcome = kvsim.replay(trace, *overrides, seed=1).outcome
    except UsageError:
        return Row(requests=len(trace.requests))
    served = np.asarray(outcome.columns["status"]) == 0
    prompts = np.array([request.prompt_tokens for request in trace.requests])[served]
    hits = np.minimum(np.asarray(outcome.hit_pages)[served, 0] * trace.page_tokens, prompts)
    saved, total = flops(hits).sum(), flops(prompts).sum()
    return Row(float(saved / total), float(hits.sum() / prompts.sum()), len(trace.requests), int(np.count_nonzero(~served)))


def flops(tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Numbers:
    """Return the FLOPs of prefills of so many tokens from the start, which cached prefixes of that length save."""
    return CODER.linear_flops_per_token * tokens + CODER.attention_flops_per_pair * tokens * (tokens + 1) / 2


def by_authors(trace: Trace, cell: Cell) -> Row:
    tokens = trace.page_tokens
    costs = np.diff(flops(np.arange(0, CONTEXT_TOKENS + tokens + 1, tokens)))
    capacity = cell.gib * 2**30 // CODER.page_bytes(tokens)
    found = replay(trace.requests, capacity, costs, SCORES[cell.policy])
    return Row(found.saved, found.hit_rate, len(trace.requests), found.skipped)


def saved(rows: Rows, trace: str, rule: str, gib: int) -> dict[str, float]:
    """The compute that each policy saved, of those that were measured."""
    names = POLICIES if rule == OURS else tuple(SCORES)
    here = {name: rows[Cell(trace, rule, gib, name)] for name in names}
    return {name: row.saved for name, row in here.items() if row.is_measured}


def more(rows: Rows, trace: str, gib: int, policy: str, other: str, rule: str = THEIRS) -> float:
    """Points that a policy saves more than another one."""
    here = saved(rows, trace, rule, gib)
    return 100 * (here[policy] - here[other])


def taus(rows: Rows, trace: str) -> dict[int, float]:
    """Kendall's tau of our order and the paper's, by capacity."""
    return {gib: kendall(saved(rows, trace, OURS, gib), RANKS) for gib in HBM_GIB}


def layer_tflops(before: int) -> float:
    return CODER.prefill_flops(1024, before) / CODER.layers / 1e12


def block_cost(before: int) -> float:
    """The cost of a block of 16 tokens after so many others, in the authors' unit."""
    return BLOCK_COST[0] * CODER.prefill_flops(16, 16 * before) / CODER.prefill_flops(16, 0)


def claims(rows: Rows) -> list[Claim]:
    agents, least = HBM_GIB[0], 5.0
    above_lru = more(rows, AGENTS, agents, "random_compute", "lru")
    above_belady = more(rows, AGENTS, agents, "random_compute", "belady")
    gaps = {trace: more(rows, trace, agents, "belady_compute", "belady") for trace in TRACE_NAMES}
    elsewhere, most = highest({trace: gaps[trace] for trace in (CHATS, GENERATED)})
    tau_at, tau = lowest(taus(rows, AGENTS))
    behind = {
        f"{trace}, {gib} GiB, {name}": more(rows, trace, gib, "lru", name, OURS)
        for trace in (AGENTS, GENERATED)
        for gib in HBM_GIB
        for name in ("lfu", "w_tinylfu")
    }
    near_at, near = lowest(behind)
    late_at, late = highest({trace: behind_best(rows, trace) for trace in TRACE_NAMES})
    return [
        flops_claim(),
        Claim(
            f"authors' rule, agents, {agents} GiB: RandomCompute saves {least:g} points more than LRU, and more than Belady",
            f"{above_lru:+.1f} and {above_belady:+.1f} points",
            above_lru >= least and above_belady > 0,
        ),
        Claim(
            f"authors' rule, {agents} GiB: BeladyCompute saves over {least:g} points more than Belady for agents, elsewhere at "
            f"most {OTHER_GAPS:g}",
            f"{gaps[AGENTS]:+.1f}; elsewhere up to {most:+.1f} ({elsewhere})",
            gaps[AGENTS] > least and most <= OTHER_GAPS,
        ),
        Claim("kvsim, agents: Kendall's tau with the paper is at least .6", f"at least {tau:.2f} ({tau_at} GiB)", tau >= 0.6),
        Claim(
            "kvsim, agents and generated: frequency saves less than LRU",
            f"at least {near:.1f} points less ({near_at})",
            near > 0,
        ),
        Claim(
            f"kvsim, {GIB[-1]:,} GiB: LRU saves at most {CONVERGED:g} points less than the best policy without foresight",
            f"at most {late:.2f} ({late_at})",
            late <= CONVERGED,
        ),
        same_lru_claim(rows),
    ]


def same_lru_claim(rows: Rows) -> Claim:
    differences = {
        f"{trace}, {gib} GiB": 100 * abs(saved(rows, trace, OURS, gib)["lru"] - saved(rows, trace, THEIRS, gib)["lru"])
        for trace in TRACE_NAMES
        for gib in HBM_GIB
    }
    place, most = highest(differences)
    return Claim("LRU leaves no holes: both rules save the same, within .1 points", f"at most {most:.3f} ({place})", most <= 0.1)


def behind_best(rows: Rows, trace: str) -> float:
    here = saved(rows, trace, OURS, GIB[-1])
    return 100 * (max(here[name] for name in ONLINE if name in here) - here["lru"])


def flops_claim() -> Claim:
    layers = {before: layer_tflops(before) for before in LAYER_TFLOPS}
    first, each = BLOCK_COST
    far = {before: block_cost(before) / (first + each * before) - 1 for before in (1, 100, 16_000)}
    return Claim(
        "the model's FLOPs are those that the authors print",
        f"{layers[0]:.2f} and {layers[65_536]:.2f} TFLOP; blocks' costs within {max(map(abs, far.values())):.1%}",
        all(round(layers[at], 2) == printed for at, printed in LAYER_TFLOPS.items()) and max(map(abs, far.values())) <= 0.1,
    )


def finding(rows: Rows) -> str:
    gib = HBM_GIB[0]
    ours, theirs = saved(rows, AGENTS, OURS, gib), saved(rows, AGENTS, THEIRS, gib)
    gain, gap = (more(rows, AGENTS, gib, *pair) for pair in (("random_compute", "lru"), ("belady_compute", "belady")))
    return (
        f"On FreeInference the paper prints {SAVED['random_compute']:.3f} for RandomCompute with {gib} GiB, 10.4 points above "
        f"LRU, and a gap of {GAP:g} points between the two oracles. By the authors' rule WEKA's agents give "
        f"{theirs['random_compute']:.3f}, {gain:.1f} points above LRU's {theirs['lru']:.3f}, and a gap of {gap:.1f} points: "
        "another trace of agents, and the same picture. What carries it is that a block may leave from the start of a prompt "
        "while those behind the hole still count. vLLM and SGLang reuse a prompt up to its first missing page, and pages leave "
        "from its end, as in kvsim: the deep and expensive ones go first, and RandomCompute saves "
        f"{ours['random_compute']:.3f}, {more(rows, AGENTS, gib, 'random_compute', 'lru', OURS):+.1f} points. The paper's own "
        "test in vLLM needed an attention that fills holes. The conversation trace has 7.8 TiB of distinct pages, so with 1 TiB "
        "policies still differ, and its oracles are further apart than on the paper's other traces. (kvsim's `belady` may "
        "decline to insert a page, which `belady_compute` and the authors' oracles may not: with 24 GiB it saves more.) The "
        "paper's figures are those that two public readings of it quote."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        f"Share of prefill FLOPs that hits save, Qwen3-Coder-30B-A3B; {options.limit:,} requests of WEKA's agents, of which",
        f"{rows[Cell(AGENTS, OURS, GIB[0], 'lru')].requests:,} have at most {CONTEXT_TOKENS:,} tokens, the Mooncake conversation",
        "trace, and the synthetic one. Made by `python experiments/compute_savings/run.py`; all numbers, with hit rates, are in",
        "[results.csv](results.csv).",
    ]
    picture = "Compute saved by capacity, by kvsim and by the rule of the authors' simulator"
    yield from opening("Compute saved: the order of eviction policies", text, picture, claims(rows), finding(rows))
    for trace in (*TRACE_NAMES, *((FILE,) if options.file else ())):
        yield from of_trace(rows, trace)
    if options.file:
        yield from of_file(rows)
    yield from the_traces()


def of_trace(rows: Rows, trace: str) -> Iterator[str]:
    """Compute saved by kvsim and by the authors' rule; the best of each column in bold, apart from those that know the future."""
    found = {gib: saved(rows, trace, OURS, gib) for gib in GIB}
    flat = {gib: saved(rows, trace, THEIRS, gib) for gib in HBM_GIB} if trace != FILE else {}
    head = ("policy", "paper's rank", *(f"kvsim, {gib} GiB" for gib in GIB), *(f"authors' rule, {gib} GiB" for gib in flat))
    lines = []
    for name in POLICIES:
        columns = [*found.values(), *flat.values()]
        best = [max(value for other, value in column.items() if other not in FORESIGHT) for column in columns]
        shown = [bold([column[name]], top)[0] if name in column else "" for column, top in zip(columns, best, strict=True)]
        if any(shown):
            lines.append((f"`{name}`", str(RANKS.get(name, "-")), *shown))
    tau = [f"{kendall(column, RANKS):+.2f}" for column in (*found.values(), *flat.values())]
    lines.append(("Kendall's tau with the paper", "", *tau))
    yield from section(trace, head, lines)
    yield ""
    yield f"Our order with {HBM_GIB[0]} GiB: {', '.join(order(found[HBM_GIB[0]]))}."


def of_file(rows: Rows) -> Iterator[str]:
    row = rows[Cell(FILE, OURS, GIB[0], "lru")]
    known = published(row.requests)
    yield ""
    if known is None or not known.file.startswith("freeinference"):
        yield f"The file has {row.requests:,} requests of at most {CONTEXT_TOKENS:,} tokens; the paper prints no figure for it."
        return
    here = saved(rows, FILE, OURS, GIB[0])
    lines = [(f"`{name}`", f"{paper:.3f}", f"{here[name]:.3f}", f"{here[name] - paper:+.3f}") for name, paper in SAVED.items()]
    yield from markdown((f"{known.file}, {GIB[0]} GiB", "printed", "kvsim", "difference"), lines)


def the_traces() -> Iterator[str]:
    head = ("file", "MB", "requests", "block accesses", "distinct blocks")
    lines = [(trace.file, str(trace.size_mb), *(f"{number:,}" for number in trace[2:])) for trace in TRACES]
    text = (
        "As the data card of harvardMadsys/2026_prefixcache on Hugging Face has them, in blocks of 16 tokens; no checksum is",
        "published. `--file` plays one, and shows the printed figures beside ours if it is the first.",
    )
    yield from section("The paper's traces", head, lines, *text)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "trace", "rule", "gib", "policy", "saved", "hit_rate", "requests", "rejected"
    for cell, row in rows.items():
        if row.is_measured:
            rates = f"{row.saved:.6f}", f"{row.hit_rate:.6f}"
            yield cell.trace, cell.rule, cell.gib, cell.policy, *rates, row.requests, row.rejected


COLOURS = {
    "lru": "#3d8fd1", "random_compute": "#d55e00", "belady": "#888888", "belady_compute": "#222222", "arc": "#0a9e74",
    "workload_aware": "#cc79a7", "lfu": "#e69f00", "w_tinylfu": "#b8860b", "sieve": "#8fbf3f", "s3_fifo": "#7f6fbf",
}  # fmt: skip


def figure(rows: Rows) -> go.Figure:
    titles = [f"{trace}: {rule}" for rule in ("kvsim", "authors' rule") for trace in TRACE_NAMES]
    chart = make_subplots(rows=2, cols=3, subplot_titles=titles, vertical_spacing=0.14, horizontal_spacing=0.06)
    for at, (rule, capacities) in enumerate(((OURS, GIB), (THEIRS, HBM_GIB)), 1):
        for column, trace in enumerate(TRACE_NAMES, 1):
            found = {gib: saved(rows, trace, rule, gib) for gib in capacities}
            for name in POLICIES:
                here = {gib: values[name] for gib, values in found.items() if name in values}
                chart.add_scatter(
                    x=list(here), y=list(here.values()), name=name, legendgroup=name, showlegend=at == 1 and column == 1,
                    line={"color": COLOURS[name], "dash": "dash" if name in FORESIGHT else "solid"}, row=at, col=column,
                )  # fmt: skip
    chart.update_xaxes(type="log", tickvals=GIB, title="GiB of KV")
    chart.update_yaxes(tickformat=".0%", rangemode="tozero")
    return chart.update_layout(template="plotly_white", width=1400, height=850, legend={"orientation": "h", "y": 1.1})


STUDY = Study(
    file=__file__, question=__doc__, traces={"weka": WEKA, "conversation": CONVERSATION}, limit=8_000,
    files={"file": "a further trace, such as one of the paper's (freeinference.lcp.zst)"},
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
