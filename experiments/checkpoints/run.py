"""Where should a hybrid model's recurrent states be saved, and what should leave when memory is short?

Replays the Mooncake conversation trace (blocks of 512 tokens) and WEKA's agent sessions (64) for Qwen3-Next 80B and Marconi's 7B
model, 5 to 80 GiB for pages and states together, answers inferred from the prompts that go on from them. Rates are hit tokens
per prompt token of the trace; a rejected prompt hits nothing. Beside every checkpoint policy stand three rows without states:

KV alone, LRU      what the same memory hits if states take no room and are after every page: not a bound, LRU errs too
KV alone, Belady   at most what any eviction hits of as many pages (MIN over pages, the future known): a hit needs the pages
unlimited          at most what any policies hit: all that some prompt before began with

Claims, each of which may fail:

1. Marconi (branch, flop_aware) hits more than twice as much as vLLM+ (every_page) somewhere,
2. and nowhere less than last with LRU;
3. simulated with a state every so many tokens and at the end of each prompt (interval), there is on both traces an interval
   beyond which the mean time to the first token gets worse by more than 1%;
4. the same without the states at the ends (retention);
5. on one of the traces, a wrong split of 20 GiB between pages and states brings the hit rate to less than a twentieth of the
   best split's.

Exits with 1 if a claim fails. With ``--requests`` fewer are played, and the exit code says nothing of the claims.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import isnan, nan
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import ClassVar, NamedTuple

import hydra

import kvsim
from kvsim.build import build_run
from kvsim.model import ModelSpec
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.flop_aware import FlopAware
from kvsim.report.result import hit_tokens
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACES = HERE.parents[2] / "shared" / "traces"
COMMAND = "python experiments/checkpoints/run.py"

MODELS = ("qwen3_next_80b", "marconi_7b")
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
"""With LRU that ranks states by their own last use, where no eviction is named."""
KV_LRU, KV_BELADY, UNLIMITED = "KV alone, LRU", "KV alone, Belady", "unlimited"
WITHOUT_STATES = {KV_LRU: "lru", KV_BELADY: "belady", UNLIMITED: "lru"}
CHECKPOINTS = {"interval": "checkpoint.tokens", "retention": "checkpoint.interval_tokens"}
INTERVALS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
INTERVAL_GIB = 40
SPLITS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 0.9999)
"""Of the memory, what pages get."""
SPLIT_GIB = 20
REQUESTS = (12_031, 1_000)
SIMULATED = 3_000
"""Requests of each trace that are simulated, at most."""


class Source(NamedTuple):
    """A trace and how much of it is played."""

    name: str
    reader: str
    path: str
    page_tokens: int
    limit: int


class Cell(NamedTuple):
    """One run: ``choice`` is a policy, an interval, or the share of the memory that pages get."""

    source: Source
    model: str
    study: str
    choice: str
    gib: float


class Row(NamedTuple):
    """What a run gave."""

    hit_rate: float
    saved_flops: float
    rejected: int
    ttft_s: float
    alpha: float
    """Of Marconi: nan if it has not been chosen by the end, and 0 was in use."""
    cpu_s: float


@dataclass(kw_only=True, eq=False)
class Watched(FlopAware):
    """``flop_aware`` whose last object can be asked for its alpha after a run."""

    last: ClassVar[FlopAware]

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        Watched.last = self


def overrides(cell: Cell) -> tuple[str, ...]:
    model, memory = _model(cell.model), round(cell.gib * 2**30)
    if cell.choice in WITHOUT_STATES:
        pages = memory // model.page_bytes(cell.source.page_tokens)
        room = "unlimited" if cell.choice == UNLIMITED else f"{pages}pages"
        return "rules.cache_output=true", f"tiers.gpu.capacity={room}", f"eviction={WITHOUT_STATES[cell.choice]}"
    common = (f"model={cell.model}", "rules.cache_output=true")
    if cell.study == "policy":
        return *common, f"tiers.gpu.capacity={memory}B", *POLICIES[cell.choice]
    if cell.study in CHECKPOINTS:
        interval = f"{CHECKPOINTS[cell.study]}={cell.choice}"
        return *common, f"tiers.gpu.capacity={memory}B", f"checkpoint={cell.study}", interval
    pages = round(float(cell.choice) * memory)
    states = max(1, (memory - pages) // model.state_bytes)
    return *common, "checkpoint=last", f"tiers.gpu.capacity={pages}B", f"tiers.gpu.states={states}states"


@cache
def load(source: Source) -> Trace:
    return kvsim.load_trace(
        source.reader, path=source.path, page_tokens=source.page_tokens, limit=source.limit, answers="inferred"
    )


def run(cell: Cell) -> Row:
    trace, settings, began = load(cell.source), overrides(cell), process_time()
    play = kvsim.simulate if cell.study in CHECKPOINTS else kvsim.replay
    result = play(trace, *settings, eviction=Watched() if cell.choice == MARCONI else None)
    hits = hit_tokens(result.outcome).sum(axis=1)
    model = _model(cell.model)
    ttft_s, alpha = result.record["ttft_s"]["mean"], Watched.last.chosen_alpha if cell.choice == MARCONI else None
    return Row(
        hit_rate=float(hits.sum()) / sum(request.prompt_tokens for request in trace.requests),
        saved_flops=sum(model.prefill_flops(int(tokens), 0) for tokens in hits),
        rejected=result.record["rejected"],
        ttft_s=nan if ttft_s is None else ttft_s,
        alpha=nan if alpha is None else alpha,
        cpu_s=process_time() - began,
    )


@cache
def _model(name: str) -> ModelSpec:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=[f"model={name}", "output=outputs"])
    return build_run(cfg, command="replay").model


def cells(sources: list[Source]) -> Iterator[Cell]:
    for source in sources:
        for model in MODELS:
            for gib in GIB:
                for choice in (*POLICIES, *WITHOUT_STATES):
                    yield Cell(source, model, "policy", choice, gib)
    for source in sources:
        for checkpoint in CHECKPOINTS:
            for tokens in INTERVALS:
                short = source._replace(limit=min(SIMULATED, source.limit))
                yield Cell(short, MODELS[0], checkpoint, str(tokens), INTERVAL_GIB)
    for source in sources:
        for share in SPLITS:
            yield Cell(source, MODELS[0], "split", str(share), SPLIT_GIB)


def measure(sources: list[Source]) -> dict[Cell, Row]:
    """All runs, side by side on all cores."""
    todo = list(cells(sources))
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        return dict(zip(todo, pool.map(run, todo), strict=True))


class Claim(NamedTuple):
    text: str
    measured: str
    holds: bool


def claims(rows: dict[Cell, Row]) -> list[Claim]:
    places: dict[tuple[str, str, float], dict[str, float]] = {}
    for cell, row in rows.items():
        if cell.study == "policy":
            places.setdefault((cell.source.name, cell.model, cell.gib), {})[cell.choice] = row.hit_rate
    ratios = {place: rates[MARCONI] / rates[VLLM_PLUS] for place, rates in places.items() if rates[VLLM_PLUS]}
    margins = {place: rates[MARCONI] - rates[LAST] for place, rates in places.items()}
    best, worst = max(ratios, key=ratios.__getitem__, default=None), min(margins, key=margins.__getitem__)
    lost = sum(margin < 0 for margin in margins.values())
    return [
        Claim(
            f"{MARCONI} hits more than twice what {VLLM_PLUS} hits, somewhere",
            f"at most {ratios[best]:.2f} times, {_place(best)}" if best else "no hits",
            best is not None and ratios[best] > 2,
        ),
        Claim(
            f"{MARCONI} nowhere hits less than {LAST}, lru",
            f"less in {lost} of {len(margins)} places; at worst {100 * margins[worst]:+.2f} points, {_place(worst)}",
            margins[worst] >= 0,
        ),
        *(_interval_claim(rows, checkpoint) for checkpoint in CHECKPOINTS),
        _split_claim(rows),
    ]


def _interval_claim(rows: dict[Cell, Row], checkpoint: str) -> Claim:
    times_s: dict[str, dict[int, float]] = {}
    for cell, row in rows.items():
        if cell.study == checkpoint:
            times_s.setdefault(cell.source.name, {})[int(cell.choice)] = row.ttft_s
    texts, worse = [], []
    for name, ttft_s in times_s.items():
        fastest, longest = min(ttft_s, key=ttft_s.__getitem__), max(ttft_s)
        texts.append(f"{name}: {ttft_s[fastest]:.3f} s with {fastest:,} tokens, {ttft_s[longest]:.3f} s with {longest:,}")
        worse.append(ttft_s[longest] > 1.01 * ttft_s[fastest])
    return Claim(
        f"with {checkpoint} there is an interval beyond which TTFT gets worse, on both traces", "; ".join(texts), all(worse)
    )


def _split_claim(rows: dict[Cell, Row]) -> Claim:
    rates: dict[str, dict[float, float]] = {}
    for cell, row in rows.items():
        if cell.study == "split":
            rates.setdefault(cell.source.name, {})[float(cell.choice)] = row.hit_rate
    texts = []
    for name, split in rates.items():
        right, wrong = max(split, key=split.__getitem__), min(split, key=split.__getitem__)
        texts.append(f"{name}: {split[wrong]:.4f} with {wrong:.2%} for pages, {split[right]:.4f} with {right:.2%}")
    return Claim(
        f"a wrong split of {SPLIT_GIB} GiB brings the hit rate to less than a twentieth",
        "; ".join(texts),
        any(min(split.values()) < max(split.values()) / 20 for split in rates.values()),
    )


def _place(place: tuple[str, str, float]) -> str:
    return f"{place[0]}, {place[1]}, {place[2]:g} GiB"


def write_markdown(path: Path, rows: dict[Cell, Row], sources: list[Source]) -> None:
    lines = [
        "# Checkpoints of hybrid models: the tables",
        "",
        f"Made by `{COMMAND}`. Hit tokens per prompt token of the trace.",
        "",
    ]
    lines += [f"- {source.name}: {source.limit:,} requests, pages of {source.page_tokens} tokens" for source in sources]
    lines += ["", "| claim | measured | |", "|---|---|---|"]
    lines += [f"| {claim.text} | {claim.measured} | {'holds' if claim.holds else 'FAILS'} |" for claim in claims(rows)]
    lines += [
        "",
        "In brackets: the FLOPs saved, of those that unlimited memory would save, and Marconi's alpha (none: 0 was in use to the",
        "end, as too few requests came to choose one).",
    ]
    for source in sources:
        for model in MODELS:
            lines += ["", f"## {source.name}, {model}", ""]
            lines += _table(
                ["GiB", "rejected", *POLICIES, *WITHOUT_STATES], (_policy_row(rows, source, model, gib) for gib in GIB)
            )
    for study in CHECKPOINTS:
        lines += ["", f"## {study}: the interval, simulated with {INTERVAL_GIB} GiB", ""]
        some = [(cell, row) for cell, row in rows.items() if cell.study == study]
        texts = (
            [c.source.name, f"{int(c.choice):,}", f"{r.hit_rate:.4f}", f"{r.ttft_s:.4f}", f"{r.rejected:,}"] for c, r in some
        )
        lines += _table(["trace", "tokens", "hit rate", "mean TTFT (s)", "rejected"], texts)
    lines += ["", f"## Split of {SPLIT_GIB} GiB between pages and states, {MODELS[0]}, last", ""]
    split = ((cell, row) for cell, row in rows.items() if cell.study == "split")
    parts = ([c.source.name, f"{float(c.choice):.2%}", f"{r.hit_rate:.4f}", f"{r.rejected:,}"] for c, r in split)
    lines += _table(["trace", "for pages", "hit rate", "rejected"], parts)
    path.write_text("\n".join(lines) + "\n")


def _table(head: list[str], texts: Iterator[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in texts)]


def _policy_row(rows: dict[Cell, Row], source: Source, model: str, gib: float) -> list[str]:
    some = {choice: rows[Cell(source, model, "policy", choice, gib)] for choice in (*POLICIES, *WITHOUT_STATES)}
    most = some[UNLIMITED].saved_flops or 1.0
    counts = sorted({row.rejected for choice, row in some.items() if choice != UNLIMITED})
    texts = [f"{gib:g}", " to ".join(f"{count:,}" for count in (counts[:1] + counts[1:][-1:]))]
    for choice, row in some.items():
        alpha = ("" if choice != MARCONI else ", alpha none") if isnan(row.alpha) else f", alpha {row.alpha:g}"
        texts.append(f"{row.hit_rate:.4f} ({row.saved_flops / most:.0%}{alpha})")
    return texts


def write_csv(path: Path, rows: dict[Cell, Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("trace", "model", "study", "choice", "gib", "hit_rate", "saved_flops", "rejected", "mean_ttft_s", "alpha")
        )
        for cell, row in rows.items():
            numbers = (f"{row.hit_rate:.6f}", f"{row.saved_flops:.6g}", row.rejected)
            rest = ("" if isnan(row.ttft_s) else f"{row.ttft_s:.6f}", "" if isnan(row.alpha) else row.alpha)
            writer.writerow((cell.source.name, cell.model, cell.study, cell.choice, cell.gib, *numbers, *rest))


COLOURS = (
    "#bbbbbb",
    "#d55e00",
    "#e69f00",
    "#cc79a7",
    "#56b4e9",
    "#3d8fd1",
    "#0a9e74",
    "#8c7ae6",
    "#777777",
    "#444444",
    "#000000",
)


def draw(folder: Path, rows: dict[Cell, Row], sources: list[Source]) -> None:
    """``results.html``, and ``results.png`` from it where there is a Chromium."""
    from plotly.subplots import make_subplots

    places = [(source, model) for source in sources for model in MODELS]
    height = -(-len(places) // 2) + 1
    titles = [f"{source.name}, {model}" for source, model in places] + [""] * (len(places) % 2)
    titles += [f"a state every so many tokens, {INTERVAL_GIB} GiB, simulated", f"split of {SPLIT_GIB} GiB, last"]
    dashes = dict(zip((source.name for source in sources), ("solid", "dash"), strict=True))
    figure = make_subplots(rows=height, cols=2, subplot_titles=titles, vertical_spacing=0.09)
    for at, (source, model) in enumerate(places):
        where = {"row": at // 2 + 1, "col": at % 2 + 1}
        for choice, colour in zip((*POLICIES, *WITHOUT_STATES), COLOURS, strict=True):
            rates = [rows[Cell(source, model, "policy", choice, gib)].hit_rate for gib in GIB]
            line = {"color": colour, "width": 2, "dash": "dot" if choice in WITHOUT_STATES else "solid"}
            figure.add_scatter(x=GIB, y=rates, name=choice, legendgroup=choice, showlegend=not at, line=line, **where)
        figure.update_xaxes(type="log", tickvals=GIB, title="memory for pages and states (GiB)", **where)
        figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="hit tokens / prompt tokens", **where)
    for study, colour in zip(CHECKPOINTS, COLOURS[2:], strict=False):
        for name, dash in dashes.items():
            some = [(int(c.choice), r.ttft_s) for c, r in rows.items() if (c.study, c.source.name) == (study, name)]
            line = {"color": colour, "dash": dash}
            figure.add_scatter(
                x=[x for x, _ in some], y=[y for _, y in some], name=f"{study}, {name}", line=line, row=height, col=1
            )
    figure.update_xaxes(type="log", tickvals=INTERVALS, title="tokens", row=height, col=1)
    figure.update_yaxes(type="log", title="mean TTFT (s)", row=height, col=1)
    for name, dash in dashes.items():
        part = [(float(c.choice), r.hit_rate) for c, r in rows.items() if (c.study, c.source.name) == ("split", name)]
        line = {"color": COLOURS[4], "dash": dash}
        figure.add_scatter(x=[x for x, _ in part], y=[y for _, y in part], name=f"split, {name}", line=line, row=height, col=2)
    figure.update_xaxes(tickformat=".0%", title="of the memory for pages", row=height, col=2)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="hit tokens / prompt tokens", row=height, col=2)
    figure.update_layout(template="plotly_white", width=1200, height=420 * height + 80, legend={"orientation": "h", "y": 1.12})
    page = folder / "results.html"
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(page, folder / "results.png", width=1216, height=420 * height + 96)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path, default=TRACES / "mooncake_conversation_trace.jsonl.gz")
    parser.add_argument("--weka", type=Path, default=TRACES / "weka_claude_code_traces_rle.jsonl.gz")
    parser.add_argument(
        "--requests", type=int, nargs=2, help="of each trace, play so many only; the claims are about the default"
    )
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the results")
    arguments = parser.parse_args()
    for path in (arguments.conversation, arguments.weka):
        if not path.exists():
            parser.error(f"no trace at {path}: name it with --conversation or --weka")
    limits = arguments.requests or REQUESTS
    sources = [
        Source("conversation", "mooncake", str(arguments.conversation.resolve()), 512, limits[0]),
        Source("weka", "weka", str(arguments.weka.resolve()), 64, limits[1]),
    ]
    rows = measure(sources)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.output / "results.csv", rows)
    write_markdown(arguments.output / "results.md", rows, sources)
    draw(arguments.output, rows, sources)
    print((arguments.output / "results.md").read_text())
    print(f"{len(rows)} runs took {sum(row.cpu_s for row in rows.values()):,.0f} s of one core, reading the traces not included")
    return 0 if arguments.requests or all(claim.holds for claim in claims(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
