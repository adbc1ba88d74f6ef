"""Where should a hybrid model's recurrent states be saved, and what should be evicted when memory is short?

Replays the Mooncake conversation trace (blocks of 512 tokens) and WEKA's agent sessions (64) for Qwen3-Next 80B and Marconi's 7B
model, with 5 to 80 GiB for pages and states together and answers inferred from the prompts that continue them. Rates are hit
tokens per prompt token of the trace; a rejected prompt hits nothing. Next to the checkpoint policies, three rows without states:

KV alone, LRU      hits of the same memory if every page had a state that took no room; not a bound, as LRU is not optimal
KV alone, Belady   a bound on any eviction policy with the same number of pages (MIN over pages, the future known)
unlimited          a bound on any policy: the whole prefix shared with an earlier prompt or answer

Claims, each of which may fail:

1. Marconi (branch, flop_aware) hits more than twice as much as vLLM+ (every_page) somewhere,
2. and nowhere less than last with LRU;
3. in a simulation with states at a fixed interval and at the end of each prompt (interval), there is on both traces an interval
   beyond which the mean time to first token rises by more than 1%;
4. the same holds without the states at the ends (retention);
5. on one of the traces, a wrong split of 20 GiB between pages and states cuts the hit rate to less than a twentieth of the best
   split's.

Exits with 1 if a claim fails; with ``--requests`` the claims do not count.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import isnan, nan
from typing import ClassVar, NamedTuple

import hydra
import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.engine.columns import hit_tokens
from kvsim.model.spec import ModelSpec
from kvsim.plans.build import build_run
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.flop_aware import FlopAware
from kvsim.report.study import CONVERSATION, WEKA, Claim, Study, claim_table, highest, lowest, section
from kvsim.trace.base import Trace

READERS = {"conversation": "mooncake", "weka": "weka"}
"""By trace."""
PAGE_TOKENS = {"conversation": 512, "weka": 64}
REQUESTS = (12_031, 1_000)
SIMULATED = 3_000
"""Simulated requests of each trace, at most."""
MODELS = ("qwen3_next_80b", "marconi_7b")
TWICE_THE_MEMORY = "hardware.memory_bytes=282000000000"
"""An H200's, since the weights of the larger model do not fit on one. The simulated GPU has the rates of one."""
GIB = (5, 10, 20, 40, 80)
VLLM_PLUS, SGLANG_PLUS, MARCONI, LAST = "every_page (vLLM+)", "branch, lru (SGLang+)", "branch, flop_aware (Marconi)", "last"
POLICIES = {
    "none": ("checkpoint=none",),
    VLLM_PLUS: ("checkpoint=every_page", "eviction=lru_with_states"),
    "interval 2048": ("checkpoint=interval", "checkpoint.tokens=2048"),
    "retention 0": ("checkpoint=retention",),
    LAST: ("checkpoint=last",),
    SGLANG_PLUS: ("checkpoint=branch", "eviction=lru_with_states"),
    MARCONI: ("checkpoint=branch",),
    "branch, alpha=1": ("checkpoint=branch", "eviction=flop_aware", "eviction.alpha=1"),
}
"""Where no eviction policy is named, LRU ranks states by their own last use."""
KV_LRU, KV_BELADY, UNLIMITED = "KV alone, LRU", "KV alone, Belady", "unlimited"
WITHOUT_STATES = {KV_LRU: "lru", KV_BELADY: "belady", UNLIMITED: "lru"}
CHECKPOINTS = {"interval": "checkpoint.tokens", "retention": "checkpoint.interval_tokens"}
INTERVALS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
INTERVAL_GIB = 40
SPLITS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 0.9999)
"""Share of the memory for pages."""
SPLIT_GIB = 20
COLOURS = (
    "#bbbbbb", "#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#3d8fd1", "#0a9e74", "#8c7ae6", "#777777", "#444444", "#000000",
)  # fmt: skip


class Cell(NamedTuple):
    """One run: ``choice`` is a policy, an interval in tokens, or the share of the memory for pages."""

    trace: str
    model: str
    study: str
    choice: str
    gib: float


class Row(NamedTuple):
    """Results of a run."""

    hit_rate: float
    saved_flops: float
    rejected: int
    ttft_s: float
    alpha: float
    """Marconi's; nan if none was chosen by the end, so that 0 was in use."""


Rows = dict[Cell, Row]


@dataclass(kw_only=True, eq=False)
class Watched(FlopAware):
    """``flop_aware`` that keeps its last object, to read its alpha after a run."""

    last: ClassVar[FlopAware]

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        Watched.last = self


def overrides(cell: Cell) -> tuple[str, ...]:
    model, memory = load_model(cell.model), round(cell.gib * 2**30)
    if cell.choice in WITHOUT_STATES:
        pages = memory // model.page_bytes(PAGE_TOKENS[cell.trace])
        room = "unlimited" if cell.choice == UNLIMITED else f"{pages}pages"
        return "rules.cache_output=true", f"tiers.gpu.capacity={room}", f"eviction={WITHOUT_STATES[cell.choice]}"
    common = (f"model={cell.model}", "rules.cache_output=true")
    if cell.study == "policy":
        return *common, f"tiers.gpu.capacity={memory}B", *POLICIES[cell.choice]
    if cell.study in CHECKPOINTS:
        interval = f"{CHECKPOINTS[cell.study]}={cell.choice}"
        return *common, TWICE_THE_MEMORY, f"tiers.gpu.capacity={memory}B", f"checkpoint={cell.study}", interval
    pages = round(float(cell.choice) * memory)
    states = max(1, (memory - pages) // model.state_bytes)
    return *common, "checkpoint=last", f"tiers.gpu.capacity={pages}B", f"tiers.gpu.states={states}states"


@cache
def load_model(name: str) -> ModelSpec:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=[f"model={name}", "output=outputs"])
    return build_run(cfg, command="replay").model


@cache
def load(name: str, path: str, limit: int) -> Trace:
    return kvsim.load_trace(READERS[name], path=path, page_tokens=PAGE_TOKENS[name], limit=limit, answers="inferred")


def run(options: Namespace, cell: Cell) -> Row:
    limit = dict(zip(READERS, options.limit, strict=True))[cell.trace]
    is_simulated = cell.study in CHECKPOINTS
    trace = load(cell.trace, getattr(options, cell.trace), min(SIMULATED, limit) if is_simulated else limit)
    play = kvsim.simulate if is_simulated else kvsim.replay
    result = play(trace, *overrides(cell), eviction=Watched() if cell.choice == MARCONI else None)
    hits = hit_tokens(result.outcome).sum(axis=1)
    model = load_model(cell.model)
    ttft_s, alpha = result.record["ttft_s"]["mean"], Watched.last.chosen_alpha if cell.choice == MARCONI else None
    return Row(
        hit_rate=float(hits.sum()) / sum(request.prompt_tokens for request in trace.requests),
        saved_flops=sum(model.prefill_flops(int(tokens), 0) for tokens in hits),
        rejected=result.record["rejected"],
        ttft_s=nan if ttft_s is None else ttft_s,
        alpha=nan if alpha is None else alpha,
    )


def cells() -> Iterator[Cell]:
    for trace in READERS:
        for model in MODELS:
            for gib in GIB:
                yield from (Cell(trace, model, "policy", choice, gib) for choice in (*POLICIES, *WITHOUT_STATES))
    for trace in READERS:
        for checkpoint in CHECKPOINTS:
            yield from (Cell(trace, MODELS[0], checkpoint, str(tokens), INTERVAL_GIB) for tokens in INTERVALS)
    for trace in READERS:
        yield from (Cell(trace, MODELS[0], "split", str(share), SPLIT_GIB) for share in SPLITS)


def results(rows: Rows, study: str, trace: str) -> dict[str, Row]:
    """The rows of one study on one trace, by choice."""
    return {cell.choice: row for cell, row in rows.items() if (cell.study, cell.trace) == (study, trace)}


def claims(rows: Rows) -> list[Claim]:
    places: dict[tuple[str, str, float], dict[str, float]] = {}
    for cell, row in rows.items():
        if cell.study == "policy":
            places.setdefault((cell.trace, cell.model, cell.gib), {})[cell.choice] = row.hit_rate
    ratios = {place: rates[MARCONI] / rates[VLLM_PLUS] for place, rates in places.items() if rates[VLLM_PLUS]}
    margins = {place: rates[MARCONI] - rates[LAST] for place, rates in places.items()}
    best, ratio = highest(ratios) if ratios else (None, 0.0)
    worst, margin = lowest(margins)
    lost = sum(margin < 0 for margin in margins.values())
    return [
        Claim(
            f"{MARCONI} hits more than twice as much as {VLLM_PLUS} somewhere",
            f"at most {ratio:.2f} times ({name(best)})" if best else "no hits",
            ratio > 2,
        ),
        Claim(
            f"{MARCONI} nowhere hits less than {LAST}, lru",
            f"less at {lost} of {len(margins)} places, at worst {100 * margin:+.2f} points ({name(worst)})",
            margin >= 0,
        ),
        *(interval_claim(rows, checkpoint) for checkpoint in CHECKPOINTS),
        split_claim(rows),
    ]


def name(place: tuple[str, str, float]) -> str:
    return f"{place[0]}, {place[1]}, {place[2]:g} GiB"


def interval_claim(rows: Rows, checkpoint: str) -> Claim:
    texts, worse = [], []
    for trace in READERS:
        ttft_s = {int(choice): row.ttft_s for choice, row in results(rows, checkpoint, trace).items()}
        (fastest, least_s), longest = lowest(ttft_s), max(ttft_s)
        texts.append(f"{trace}: {least_s:.3f} s with {fastest:,} tokens, {ttft_s[longest]:.3f} s with {longest:,}")
        worse.append(ttft_s[longest] > 1.01 * least_s)
    return Claim(f"with {checkpoint} there is an interval beyond which TTFT rises, on both traces", "; ".join(texts), all(worse))


def split_claim(rows: Rows) -> Claim:
    texts, falls = [], []
    for trace in READERS:
        rates = {float(choice): row.hit_rate for choice, row in results(rows, "split", trace).items()}
        (right, most), (wrong, least) = highest(rates), lowest(rates)
        texts.append(f"{trace}: {least:.4f} with {wrong:.2%} for pages, {most:.4f} with {right:.2%}")
        falls.append(least < most / 20)
    claim = f"a wrong split of {SPLIT_GIB} GiB cuts the hit rate to less than a twentieth"
    return Claim(claim, "; ".join(texts), any(falls))


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    limits = zip(READERS, options.limit, strict=True)
    yield from [
        "# Checkpoints of hybrid models: the tables",
        "",
        "Made by `python experiments/checkpoints/run.py`. Hit tokens per prompt token of the trace.",
        "",
        *(f"- {trace}: {limit:,} requests, pages of {PAGE_TOKENS[trace]} tokens" for trace, limit in limits),
        "",
        *claim_table(claims(rows)),
        "",
        "In brackets: the FLOPs saved, as a share of those that unlimited memory saves, and Marconi's alpha (none: 0 was in use",
        "to the end, as there were too few requests to choose one).",
    ]
    for trace in READERS:
        for model in MODELS:
            lines = [policy_line(rows, trace, model, gib) for gib in GIB]
            yield from section(f"{trace}, {model}", ("GiB", "rejected", *POLICIES, *WITHOUT_STATES), lines)
    for study in CHECKPOINTS:
        lines = [
            (trace, f"{int(choice):,}", f"{row.hit_rate:.4f}", f"{row.ttft_s:.4f}", f"{row.rejected:,}")
            for trace in READERS
            for choice, row in results(rows, study, trace).items()
        ]
        head = ("trace", "tokens", "hit rate", "mean TTFT (s)", "rejected")
        yield from section(f"{study}: the interval, simulated with {INTERVAL_GIB} GiB", head, lines)
    splits = [
        (trace, f"{float(choice):.2%}", f"{row.hit_rate:.4f}", f"{row.rejected:,}")
        for trace in READERS
        for choice, row in results(rows, "split", trace).items()
    ]
    title = f"Split of {SPLIT_GIB} GiB between pages and states, {MODELS[0]}, last"
    yield from section(title, ("trace", "for pages", "hit rate", "rejected"), splits)


def policy_line(rows: Rows, trace: str, model: str, gib: float) -> list[str]:
    some = {choice: rows[Cell(trace, model, "policy", choice, gib)] for choice in (*POLICIES, *WITHOUT_STATES)}
    most = some[UNLIMITED].saved_flops or 1.0
    counts = sorted({row.rejected for choice, row in some.items() if choice != UNLIMITED})
    texts = [f"{gib:g}", " to ".join(f"{count:,}" for count in (counts[:1] + counts[1:][-1:]))]
    for choice, row in some.items():
        alpha = ("" if choice != MARCONI else ", alpha none") if isnan(row.alpha) else f", alpha {row.alpha:g}"
        texts.append(f"{row.hit_rate:.4f} ({row.saved_flops / most:.0%}{alpha})")
    return texts


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "trace", "model", "study", "choice", "gib", "hit_rate", "saved_flops", "rejected", "mean_ttft_s", "alpha"
    for cell, row in rows.items():
        rest = ("" if isnan(row.ttft_s) else f"{row.ttft_s:.6f}", "" if isnan(row.alpha) else row.alpha)
        yield *cell, f"{row.hit_rate:.6f}", f"{row.saved_flops:.6g}", row.rejected, *rest


def figure(rows: Rows) -> go.Figure:
    places = [(trace, model) for trace in READERS for model in MODELS]
    height = -(-len(places) // 2) + 1
    titles = [f"{trace}, {model}" for trace, model in places] + [""] * (len(places) % 2)
    titles += [f"states at a fixed interval, {INTERVAL_GIB} GiB, simulated", f"split of {SPLIT_GIB} GiB, last"]
    dashes = dict(zip(READERS, ("solid", "dash"), strict=True))
    figure = make_subplots(rows=height, cols=2, subplot_titles=titles, vertical_spacing=0.09)

    def add(x: Iterable[float], y: Iterable[float], name: str, line: dict[str, object], **where: object) -> None:
        figure.add_scatter(x=list(x), y=list(y), name=name, line=line, **where)

    for at, (trace, model) in enumerate(places):
        where = {"row": at // 2 + 1, "col": at % 2 + 1}
        for choice, colour in zip((*POLICIES, *WITHOUT_STATES), COLOURS, strict=True):
            rates = [rows[Cell(trace, model, "policy", choice, gib)].hit_rate for gib in GIB]
            line = {"color": colour, "width": 2, "dash": "dot" if choice in WITHOUT_STATES else "solid"}
            add(GIB, rates, choice, line, legendgroup=choice, showlegend=not at, **where)
        figure.update_xaxes(type="log", tickvals=GIB, title="memory for pages and states (GiB)", **where)
        figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="hit tokens / prompt tokens", **where)
    for trace, dash in dashes.items():
        for study, colour in zip(CHECKPOINTS, COLOURS[2:], strict=False):
            found = results(rows, study, trace)
            line = {"color": colour, "dash": dash}
            add(map(int, found), (row.ttft_s for row in found.values()), f"{study}, {trace}", line, row=height, col=1)
        found = results(rows, "split", trace)
        line = {"color": COLOURS[4], "dash": dash}
        add(map(float, found), (row.hit_rate for row in found.values()), f"split, {trace}", line, row=height, col=2)
    figure.update_xaxes(type="log", tickvals=INTERVALS, title="tokens", row=height, col=1)
    figure.update_yaxes(type="log", title="mean TTFT (s)", row=height, col=1)
    figure.update_xaxes(tickformat=".0%", title="share of the memory for pages", row=height, col=2)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="hit tokens / prompt tokens", row=height, col=2)
    size = {"width": 1200, "height": 420 * height + 80}
    return figure.update_layout(template="plotly_white", legend={"orientation": "h", "y": 1.12}, **size)


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION, "weka": WEKA}, limit=REQUESTS, processes=None,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
