"""Where should a hybrid model's recurrent states be saved, and what should leave when memory is short?

Replays the Mooncake conversation trace (blocks of 512 tokens) and WEKA's agent sessions (64) for Qwen3-Next 80B and Marconi's 7B
model, 5 to 80 GiB for pages and states together, answers inferred from the prompts that go on from them. The bound has its
states for nothing: LRU over pages alone. Rates are hit tokens per prompt token.

Claims, whichever way they fall:

1. branch with flop_aware hits more than twice as much as every_page with LRU somewhere,
2. and nowhere less than last with LRU (by more than .001);
3. simulated, there is an interval beyond which the mean time to the first token gets worse;
4. a wrong split of 20 GiB between pages and states brings the hit rate to less than a twentieth of the best split's.

Exits with 1 if the study could not be made; a claim that fails is a result.
"""

import argparse
import csv
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import kvsim
from kvsim.build import build_run
from kvsim.report.result import hit_tokens
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACES = HERE.parents[2] / "shared" / "traces"
COMMAND = "python experiments/checkpoints/run.py"

MODELS = ("qwen3_next_80b", "marconi_7b")
GIB = (5, 10, 20, 40, 80)
POLICIES = {
    "every_page, lru": ("checkpoint=every_page",),
    "interval 2048, lru": ("checkpoint=interval", "checkpoint.tokens=2048"),
    "retention 0, lru": ("checkpoint=retention",),
    "last, lru": ("checkpoint=last",),
    "branch, lru": ("checkpoint=branch",),
    "branch, flop_aware": ("checkpoint=branch", "eviction=flop_aware"),
    "branch, flop_aware alpha=1": ("checkpoint=branch", "eviction=flop_aware", "eviction.alpha=1"),
    "bound": ("checkpoint=every_page", "tiers.gpu.states=unlimited"),
}
INTERVALS = (512, 1024, 2048, 4096, 8192, 16384, 65536)
SPLITS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 0.9999)
"""Of the memory, what pages get."""
SPLIT_GIB = 20
SIMULATED = 400
"""Requests of the conversation trace that are simulated."""


@dataclass(frozen=True)
class Source:
    """A trace and how much of it is played."""

    name: str
    reader: str
    path: str
    page_tokens: int
    limit: int


@dataclass(frozen=True)
class Cell:
    """One run: of all memory, or with states in room of their own."""

    source: Source
    model: str
    study: str
    choice: str
    gib: float


@dataclass(frozen=True)
class Row:
    """What a run gave."""

    hit_rate: float
    saved_flops: float
    ttft_s: float = float("nan")


def overrides(cell: Cell) -> tuple[str, ...]:
    common = (f"model={cell.model}", "rules.cache_output=true")
    if cell.study == "policy":
        return *common, f"tiers.gpu.capacity={cell.gib}GiB", *POLICIES[cell.choice]
    if cell.study == "interval":
        interval = (f"checkpoint.tokens={cell.choice}", f"tiers.gpu.capacity={cell.gib}GiB")
        return *common, "checkpoint=interval", *interval
    pages = float(cell.choice) * cell.gib
    states = max(1, int((cell.gib - pages) * 2**30 / _model(cell.model).state_bytes))
    room = (f"tiers.gpu.states={states}states", f"tiers.gpu.capacity={round(pages * 2**30)}B")
    return *common, "checkpoint=last", *room


@cache
def load(source: Source) -> Trace:
    return kvsim.load_trace(
        source.reader, path=source.path, page_tokens=source.page_tokens, limit=source.limit, answers="inferred"
    )


def run(cell: Cell) -> Row:
    trace, settings = load(cell.source), overrides(cell)
    result = (kvsim.simulate if cell.study == "interval" else kvsim.replay)(trace, *settings)
    model = _model(cell.model)
    saved = sum(model.prefill_flops(int(tokens), 0) for tokens in hit_tokens(result.outcome).sum(axis=1))
    return Row(result.hit_rate, saved, result.record["ttft_s"]["mean"] or float("nan"))


@cache
def _model(name: str):  # type: ignore[no-untyped-def]
    import hydra

    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=[f"model={name}", "output=outputs"])
    return build_run(cfg, command="replay").model


def cells(sources: list[Source]) -> list[Cell]:
    found = [
        Cell(source, model, "policy", choice, gib) for source in sources for model in MODELS for gib in GIB for choice in POLICIES
    ]
    first = sources[0]
    short = Source(first.name, first.reader, first.path, first.page_tokens, min(SIMULATED, first.limit))
    found += [Cell(short, MODELS[0], "interval", str(tokens), 40) for tokens in INTERVALS]
    found += [Cell(first, MODELS[0], "split", str(share), SPLIT_GIB) for share in SPLITS]
    return found


def measure(sources: list[Source]) -> dict[Cell, Row]:
    """All runs, side by side on all cores."""
    todo = cells(sources)
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        return dict(zip(todo, pool.map(run, todo), strict=True))


def claims(rows: dict[Cell, Row]) -> list[tuple[str, str, bool]]:
    """(claim, what was measured, whether it holds)."""
    by_place: dict[tuple[str, str, float], dict[str, float]] = {}
    for cell, row in rows.items():
        if cell.study == "policy":
            by_place.setdefault((cell.source.name, cell.model, cell.gib), {})[cell.choice] = row.hit_rate
    best = max(by_place, key=lambda place: _ratio(by_place[place]))
    worst = min(by_place, key=lambda place: _margin(by_place[place]))
    ttft = {int(cell.choice): row.ttft_s for cell, row in rows.items() if cell.study == "interval"}
    fastest = min(ttft, key=lambda tokens: ttft[tokens])
    longest = max(ttft)
    split = {float(cell.choice): row.hit_rate for cell, row in rows.items() if cell.study == "split"}
    right, wrong = max(split, key=lambda share: split[share]), min(split, key=lambda share: split[share])
    return [
        (
            "branch + flop_aware hits more than twice what every_page + LRU hits, somewhere",
            f"at most {_ratio(by_place[best]):.2f} times, {_place(best)}",
            _ratio(by_place[best]) > 2,
        ),
        (
            "branch + flop_aware never hits less than last + LRU",
            f"at worst {100 * _margin(by_place[worst]):+.2f} points, {_place(worst)}",
            _margin(by_place[worst]) >= -0.001,
        ),
        (
            "there is an interval beyond which TTFT gets worse",
            f"mean TTFT {ttft[fastest]:.3f} s with {fastest:,} tokens, {ttft[longest]:.3f} s with {longest:,}",
            ttft[longest] > 1.01 * ttft[fastest],
        ),
        (
            "a wrong split brings the hit rate to less than a twentieth",
            f"{split[wrong]:.4f} with {wrong:.2%} for pages, {split[right]:.4f} with {right:.2%}",
            split[wrong] < split[right] / 20,
        ),
    ]


def _ratio(rates: dict[str, float]) -> float:
    return rates["branch, flop_aware"] / rates["every_page, lru"] if rates["every_page, lru"] else 0.0


def _margin(rates: dict[str, float]) -> float:
    return rates["branch, flop_aware"] - rates["last, lru"]


def _place(place: tuple[str, str, float]) -> str:
    return f"{place[0]}, {place[1]}, {place[2]:g} GiB"


def write_markdown(path: Path, rows: dict[Cell, Row], sources: list[Source]) -> None:
    lines = ["# Checkpoints of hybrid models", "", f"Made by `{COMMAND}`. Hit tokens per prompt token.", ""]
    lines += [f"- {source.name}: {source.limit:,} requests, pages of {source.page_tokens} tokens" for source in sources]
    lines += ["", "| claim | measured | |", "|---|---|---|"]
    lines += [f"| {claim} | {measured} | {'holds' if holds else 'FAILS'} |" for claim, measured, holds in claims(rows)]
    lines += ["", "![Hit rate against memory](results.png)", "", "In brackets: the share of the bound's FLOPs that is saved."]
    for source in sources:
        for model in MODELS:
            lines += [
                "",
                f"## {source.name}, {model}",
                "",
                f"| GiB | {' | '.join(POLICIES)} |",
                "|---" * (len(POLICIES) + 1) + "|",
            ]
            for gib in GIB:
                some = [rows[Cell(source, model, "policy", choice, gib)] for choice in POLICIES]
                most = some[-1].saved_flops or 1.0
                texts = [f"{row.hit_rate:.4f} ({row.saved_flops / most:.0%})" for row in some]
                lines.append(f"| {gib} | {' | '.join(texts)} |")
    lines += ["", "## Interval, simulated", "", "| tokens | hit rate | mean TTFT (s) |", "|---|---|---|"]
    lines += [f"| {c.choice} | {r.hit_rate:.4f} | {r.ttft_s:.4f} |" for c, r in rows.items() if c.study == "interval"]
    lines += ["", f"## Split of {SPLIT_GIB} GiB", "", "| for pages | hit rate |", "|---|---|"]
    lines += [f"| {float(c.choice):.2%} | {r.hit_rate:.4f} |" for c, r in rows.items() if c.study == "split"]
    path.write_text("\n".join(lines) + "\n")


def write_csv(path: Path, rows: dict[Cell, Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("trace", "model", "study", "choice", "gib", "hit_rate", "saved_flops", "mean_ttft_s"))
        for cell, row in rows.items():
            ttft = "" if row.ttft_s != row.ttft_s else f"{row.ttft_s:.6f}"
            numbers = (f"{row.hit_rate:.6f}", f"{row.saved_flops:.6g}", ttft)
            writer.writerow((cell.source.name, cell.model, cell.study, cell.choice, cell.gib, *numbers))


def draw(folder: Path, rows: dict[Cell, Row], sources: list[Source]) -> None:
    """``results.html``, and ``results.png`` from it where there is a Chromium."""
    from plotly.subplots import make_subplots

    places = [(source, model) for source in sources for model in MODELS]
    figure = make_subplots(rows=len(sources), cols=2, subplot_titles=[f"{source.name}, {model}" for source, model in places])
    colours = ("#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#3d8fd1", "#0a9e74", "#8c7ae6", "#888888")
    for at, (source, model) in enumerate(places):
        for choice, colour in zip(POLICIES, colours, strict=True):
            rates = [rows[Cell(source, model, "policy", choice, gib)].hit_rate for gib in GIB]
            line = {"color": colour, "width": 2, "dash": "dot" if choice == "bound" else "solid"}
            figure.add_scatter(
                x=GIB, y=rates, name=choice, legendgroup=choice, showlegend=not at, line=line, row=at // 2 + 1, col=at % 2 + 1
            )
    figure.update_xaxes(type="log", tickvals=GIB, title="memory for pages and states (GiB)")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="hit tokens / prompt tokens")
    figure.update_layout(template="plotly_white", width=1100, height=430 * len(sources), legend={"orientation": "h", "y": 1.1})
    page = folder / "results.html"
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(page, folder / "results.png", width=1116, height=430 * len(sources) + 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path, default=TRACES / "mooncake_conversation_trace.jsonl.gz")
    parser.add_argument("--weka", type=Path, default=TRACES / "weka_claude_code_traces_rle.jsonl.gz")
    parser.add_argument("--requests", type=int, nargs=2, default=(1200, 250), help="of each trace, so many are played")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the results")
    arguments = parser.parse_args()
    for path in (arguments.conversation, arguments.weka):
        if not path.exists():
            parser.error(f"no trace at {path}: name it with --conversation or --weka")
    sources = [
        Source("conversation", "mooncake", str(arguments.conversation.resolve()), 512, arguments.requests[0]),
        Source("weka", "weka", str(arguments.weka.resolve()), 64, arguments.requests[1]),
    ]
    rows = measure(sources)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.output / "results.csv", rows)
    write_markdown(arguments.output / "results.md", rows, sources)
    draw(arguments.output, rows, sources)
    print((arguments.output / "results.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
