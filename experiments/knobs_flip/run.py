"""Which settings are right for a small cache and wrong for a large one?

Replays the Mooncake conversation trace in pages of 512 tokens over GPU and CPU capacities, one request at a time, with

write filter   vLLM's offloading tier, a page stored at its 1st, 2nd or 3rd offer   (preset=vllm_offload, placement.k)
write policy   SGLang's HiCache with its three write policies                       (preset=sglang_hicache, placement)
eviction       LRU, ARC, S3-FIFO, MQ in both tiers, written back, and Belady's bound

Claims, each a row of the first table: four choices whose effect at two capacities is known from the engines' own code, and
that in each of the three groups the default loses somewhere. Rates are hit pages per full prompt page, both tiers together.
Exits with 1 if a claim fails.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import kvsim
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACE = HERE.parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"

GPU_PAGES = (1_000, 3_000, 6_000, 12_000, 30_000)
CPU_PAGES = (0, 3_000, 12_000, 30_000, 60_000)


@dataclass(frozen=True)
class Knob:
    """A group of choices, the default first, and the overrides that make each."""

    name: str
    choices: dict[str, tuple[str, ...]]
    needs_cpu: bool = False

    @property
    def default(self) -> str:
        return next(iter(self.choices))


def _offload(k: int) -> tuple[str, ...]:
    return "preset=vllm_offload", f"placement.k={k}"


KNOBS = (
    Knob("write filter", {f"k={k}": _offload(k) for k in (0, 2, 3)}, needs_cpu=True),
    Knob(
        "write policy",
        {
            name: ("preset=sglang_hicache", f"placement={name}")
            for name in ("write_through", "write_through_selective", "write_back")
        },
        needs_cpu=True,
    ),
    Knob("eviction", {name: (f"eviction={name}",) for name in ("lru", "arc", "s3_fifo", "mq")}),
)
BOUND = "belady"
UNLIMITED = "unlimited"


@dataclass(frozen=True)
class Cell:
    """One replay."""

    knob: str
    choice: str
    gpu: int
    cpu: int

    def overrides(self) -> tuple[str, ...]:
        if self.choice == UNLIMITED:
            return ("tiers.gpu.capacity=unlimited",)
        if self.choice == BOUND:
            return f"eviction={BOUND}", f"tiers.gpu.capacity={self.gpu + self.cpu}pages", "replay.hold_output=false"
        chosen = next(knob for knob in KNOBS if knob.name == self.knob).choices[self.choice]
        written_back = ("placement=write_back",) if self.cpu and self.knob == "eviction" else ()
        cpu = (f"tiers.cpu.capacity={self.cpu}pages",) if self.cpu else ()
        return *chosen, *written_back, f"tiers.gpu.capacity={self.gpu}pages", *cpu


@dataclass(frozen=True)
class Claim:
    """A rate, or a difference of two, that is known beforehand."""

    what: str
    measured: float
    expected: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.expected) <= self.tolerance


def cells() -> Iterator[Cell]:
    """All replays of the experiment."""
    yield Cell("eviction", UNLIMITED, 0, 0)
    for gpu in GPU_PAGES:
        for cpu in CPU_PAGES:
            for knob in KNOBS:
                if cpu or not knob.needs_cpu:
                    yield from (Cell(knob.name, choice, gpu, cpu) for choice in knob.choices)
            yield Cell("eviction", BOUND, gpu, cpu)


@cache
def load(path: str, limit: int | None) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit)


def rate(path: str, limit: int | None, cell: Cell) -> float:
    return kvsim.replay(load(path, limit), *cell.overrides()).page_hit_rate


def measure(path: str, limit: int | None) -> dict[Cell, float]:
    """The page hit rate of every cell, two processes at a time."""
    every = list(cells())
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        rates = pool.map(rate, [path] * len(every), [limit] * len(every), every)
        return dict(zip(every, rates, strict=True))


def claims(rates: dict[Cell, float]) -> list[Claim]:
    """What the engines' own code gives, and what the replays gave."""

    def gain(knob: str, choice: str, over: str, gpu: int, cpu: int) -> float:
        return rates[Cell(knob, choice, gpu, cpu)] - rates[Cell(knob, over, gpu, cpu)]

    def of_eviction(choice: str, gpu: int) -> float:
        return rates[Cell("eviction", choice, gpu, 0)]

    return [
        Claim("k=2 over k=0, 6,000 + 12,000 pages", gain("write filter", "k=2", "k=0", 6_000, 12_000), 0.020, 0.001),
        Claim("k=2 over k=0, 6,000 + 60,000 pages", gain("write filter", "k=2", "k=0", 6_000, 60_000), -0.106, 0.001),
        Claim(
            "write-back over write-through, 6,000 + 3,000",
            gain("write policy", "write_back", "write_through", 6_000, 3_000),
            0.051,
            0.001,
        ),
        Claim(
            "write-back over write-through, 6,000 + 60,000",
            gain("write policy", "write_back", "write_through", 6_000, 60_000),
            0.001,
            0.001,
        ),
        Claim("S3-FIFO over LRU, 6,000 pages", gain("eviction", "s3_fifo", "lru", 6_000, 0), 0.019, 0.005),
        Claim("S3-FIFO over LRU, 30,000 pages", gain("eviction", "s3_fifo", "lru", 30_000, 0), -0.076, 0.010),
        Claim("Belady, 6,000 pages", of_eviction(BOUND, 6_000), 0.370, 0.002),
        Claim("Belady, 30,000 pages", of_eviction(BOUND, 30_000), 0.382, 0.002),
        Claim("LRU, 6,000 pages", of_eviction("lru", 6_000), 0.150, 0.002),
        Claim("LRU, 30,000 pages", of_eviction("lru", 30_000), 0.345, 0.002),
    ]


@dataclass(frozen=True)
class Verdict:
    """Where the default of a knob is not the best choice, and where that costs most."""

    knob: Knob
    places: int
    wrong: int
    worst: Cell
    """The best choice at the place where the default loses most."""
    loss: float


def verdicts(rates: dict[Cell, float]) -> list[Verdict]:
    found = []
    for knob in KNOBS:
        losses = {}
        places = [cell for cell in rates if cell.knob == knob.name and cell.choice == knob.default]
        for place in places:
            best = max((Cell(knob.name, choice, place.gpu, place.cpu) for choice in knob.choices), key=lambda cell: rates[cell])
            losses[best] = rates[best] - rates[place]
        worst = max(losses, key=lambda cell: losses[cell])
        wrong = sum(loss >= 0.001 for loss in losses.values())
        found.append(Verdict(knob, len(places), wrong, worst, losses[worst]))
    return found


def write_markdown(path: Path, rates: dict[Cell, float]) -> None:
    lines = [
        "# Knobs that flip",
        "",
        "Hit pages per full prompt page on the Mooncake conversation trace, pages of 512 tokens, one request at a time; made by",
        "`python experiments/knobs_flip/run.py`. All figures are in [results.csv](results.csv).",
        "",
        "![points of hit rate that each choice gains over its default, by GPU and CPU capacity](results.png)",
        "",
        "## Known figures",
        "",
        "| | measured | from the engines' own code | |",
        "|---|---|---|---|",
    ]
    for claim in claims(rates):
        verdict = "holds" if claim.holds else "FAILS"
        lines.append(f"| {claim.what} | {claim.measured:+.4f} | {claim.expected:+.3f} ± {claim.tolerance:.3f} | {verdict} |")
    lines += ["", "## Where the defaults are wrong", ""]
    lines += [f"- {sentence(verdict)}" for verdict in verdicts(rates)]
    for knob in KNOBS:
        lines += ["", f"## {knob.name.capitalize()}", "", *table(knob, rates)]
    path.write_text("\n".join(lines) + "\n")


def sentence(verdict: Verdict) -> str:
    knob, worst = verdict.knob, verdict.worst
    if not verdict.wrong:
        return f"{knob.name}: the default, {knob.default}, is best at all {verdict.places} places."
    return (
        f"{knob.name}: the default, {knob.default}, loses 0.1 points or more at {verdict.wrong} of {verdict.places} places, "
        f"most at {worst.gpu:,} + {worst.cpu:,} pages, where {worst.choice} hits {verdict.loss * 100:.1f} points more."
    )


def table(knob: Knob, rates: dict[Cell, float]) -> list[str]:
    """One row a place, the best choice in bold, between no cache and the bounds."""
    lines = [
        f"| GPU + CPU pages | no cache | {' | '.join(knob.choices)} | {BOUND} | {UNLIMITED} |",
        "|---" * (len(knob.choices) + 4) + "|",
    ]
    for gpu in GPU_PAGES:
        for cpu in CPU_PAGES:
            row = [rates.get(Cell(knob.name, choice, gpu, cpu)) for choice in knob.choices]
            known = [value for value in row if value is not None]
            if not known:
                continue
            texts = [f"**{value:.4f}**" if value == max(known) else f"{value:.4f}" for value in known]
            bounds = f"{rates[Cell('eviction', BOUND, gpu, cpu)]:.4f} | {rates[Cell('eviction', UNLIMITED, 0, 0)]:.4f}"
            lines.append(f"| {gpu:,} + {cpu:,} | 0 | {' | '.join(texts)} | {bounds} |")
    return lines


def write_csv(path: Path, rates: dict[Cell, float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("knob", "choice", "gpu_pages", "cpu_pages", "page_hit_rate"))
        writer.writerows((c.knob, c.choice, c.gpu, c.cpu, f"{value:.6f}") for c, value in rates.items())


def draw(folder: Path, rates: dict[Cell, float]) -> None:
    """``results.html`` and its picture: a map for each choice with the points of hit rate it gains over its knob's default."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    maps = [(knob, choice) for knob in KNOBS for choice in knob.choices if choice != knob.default]
    maps.append((KNOBS[-1], BOUND))
    titles = [f"{knob.name}: {choice} over {knob.default}" for knob, choice in maps]
    columns = 2
    figure = make_subplots(rows=-(-len(maps) // columns), cols=columns, subplot_titles=titles, vertical_spacing=0.09)
    for at, (knob, choice) in enumerate(maps):
        points = [[_gain(rates, knob, choice, gpu, cpu) for gpu in GPU_PAGES] for cpu in CPU_PAGES]
        figure.add_trace(
            go.Heatmap(
                z=points,
                x=[f"{gpu:,}" for gpu in GPU_PAGES],
                y=[f"{cpu:,}" for cpu in CPU_PAGES],
                text=[["" if value is None else f"{value:+.1f}" for value in row] for row in points],
                texttemplate="%{text}",
                coloraxis="coloraxis",
            ),
            row=at // columns + 1,
            col=at % columns + 1,
        )
    figure.update_xaxes(title_text="GPU pages", type="category")
    figure.update_yaxes(title_text="CPU pages", type="category")
    figure.update_layout(
        title="Points of hit rate gained over the default (red: the default is wrong there; blue: it is right)",
        coloraxis={"colorscale": "RdBu_r", "cmid": 0, "colorbar": {"title": "points"}},
        height=330 * -(-len(maps) // columns),
        width=1100,
    )
    figure.write_html(folder / "results.html", include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(folder / "results.html", folder / "results.png", width=1120, height=1380)


def _gain(rates: dict[Cell, float], knob: Knob, choice: str, gpu: int, cpu: int) -> float | None:
    chosen, default = (rates.get(Cell(knob.name, name, gpu, cpu)) for name in (choice, knob.default))
    return None if chosen is None or default is None else 100 * (chosen - default)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="the Mooncake conversation trace")
    parser.add_argument("--limit", type=int, help="play this many requests only; the claims are about all of them")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the results")
    arguments = parser.parse_args()
    if not arguments.trace.exists():
        parser.error(f"no trace at {arguments.trace}: name it with --trace")
    rates = measure(str(arguments.trace.resolve()), arguments.limit)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.output / "results.csv", rates)
    write_markdown(arguments.output / "results.md", rates)
    draw(arguments.output, rates)
    print((arguments.output / "results.md").read_text())
    every_default_loses = all(verdict.wrong for verdict in verdicts(rates))
    return 0 if arguments.limit or (every_default_loses and all(claim.holds for claim in claims(rates))) else 1


if __name__ == "__main__":
    sys.exit(main())
