"""Which settings are right for a small cache and wrong for a large one?

Replays the Mooncake conversation trace in pages of 512 tokens, one request at a time, at many GPU and CPU capacities, with

write filter   vLLM's offloading tier, which stores a page at its 1st, 2nd or 3rd offer   (preset=vllm_offload, placement.k)
write policy   SGLang's HiCache with each of its three write policies                     (preset=sglang_hicache, placement)
eviction       LRU, ARC, S3-FIFO or MQ in both tiers, written back; and Belady's bound

Claims: the effects of four choices at two capacities are those of the engines' own code, each a row of the first table; and in
each of the three groups the default loses somewhere. Rates are hit pages per full prompt page, both tiers together. Exits with
1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import CONVERSATION, Claim, Study, bold, highest, markdown, section, verdict
from kvsim.trace.base import Trace

GPU_PAGES = (1_000, 3_000, 6_000, 12_000, 30_000)
CPU_PAGES = (0, 3_000, 12_000, 30_000, 60_000)


@dataclass(frozen=True)
class Knob:
    """A group of choices, the default first, with the overrides of each."""

    name: str
    choices: dict[str, tuple[str, ...]]
    needs_cpu: bool = False

    @property
    def default(self) -> str:
        return next(iter(self.choices))


WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
KNOBS = (
    Knob("write filter", {f"k={k}": ("preset=vllm_offload", f"placement.k={k}") for k in (0, 2, 3)}, needs_cpu=True),
    Knob("write policy", {name: ("preset=sglang_hicache", f"placement={name}") for name in WRITE_POLICIES}, needs_cpu=True),
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


Rates = dict[Cell, float]


def cells() -> Iterator[Cell]:
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


def run(options: Namespace, cell: Cell) -> float:
    """The page hit rate of a cell."""
    return kvsim.replay(load(options.trace, options.limit), *cell.overrides()).page_hit_rate


@dataclass(frozen=True)
class Known:
    """A rate, or a difference of two rates, and what the engines' own code gives."""

    what: str
    measured: float
    expected: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.expected) <= self.tolerance


def known(rates: Rates) -> list[Known]:
    def gain(knob: str, choice: str, over: str, gpu: int, cpu: int) -> float:
        return rates[Cell(knob, choice, gpu, cpu)] - rates[Cell(knob, over, gpu, cpu)]

    def write_back(cpu: int) -> float:
        return gain("write policy", "write_back", "write_through", 6_000, cpu)

    def one_tier(choice: str, gpu: int) -> float:
        return rates[Cell("eviction", choice, gpu, 0)]

    return [
        Known("k=2 over k=0, 6,000 + 12,000 pages", gain("write filter", "k=2", "k=0", 6_000, 12_000), 0.020, 0.001),
        Known("k=2 over k=0, 6,000 + 60,000 pages", gain("write filter", "k=2", "k=0", 6_000, 60_000), -0.106, 0.001),
        Known("write-back over write-through, 6,000 + 3,000", write_back(3_000), 0.051, 0.001),
        Known("write-back over write-through, 6,000 + 60,000", write_back(60_000), 0.001, 0.001),
        Known("S3-FIFO over LRU, 6,000 pages", gain("eviction", "s3_fifo", "lru", 6_000, 0), 0.019, 0.005),
        Known("S3-FIFO over LRU, 30,000 pages", gain("eviction", "s3_fifo", "lru", 30_000, 0), -0.076, 0.010),
        Known("Belady, 6,000 pages", one_tier(BOUND, 6_000), 0.370, 0.002),
        Known("Belady, 30,000 pages", one_tier(BOUND, 30_000), 0.382, 0.002),
        Known("LRU, 6,000 pages", one_tier("lru", 6_000), 0.150, 0.002),
        Known("LRU, 30,000 pages", one_tier("lru", 30_000), 0.345, 0.002),
    ]


@dataclass(frozen=True)
class Default:
    """At how many places the default of a knob is not the best choice, and where it loses most."""

    knob: Knob
    places: int
    wrong: int
    worst: Cell
    """The best choice at the place where the default loses most."""
    loss: float

    def __str__(self) -> str:
        name, default, worst = self.knob.name, self.knob.default, self.worst
        if not self.wrong:
            return f"{name}: the default, {default}, is best at all {self.places} places."
        return (
            f"{name}: the default, {default}, loses 0.1 points or more at {self.wrong} of {self.places} places, "
            f"most at {worst.gpu:,} + {worst.cpu:,} pages, where {worst.choice} hits {self.loss * 100:.1f} points more."
        )


def default(knob: Knob, rates: Rates) -> Default:
    losses = {}
    places = [cell for cell in rates if cell.knob == knob.name and cell.choice == knob.default]
    for place in places:
        best = max((Cell(knob.name, choice, place.gpu, place.cpu) for choice in knob.choices), key=rates.__getitem__)
        losses[best] = rates[best] - rates[place]
    return Default(knob, len(places), sum(loss >= 0.001 for loss in losses.values()), *highest(losses))


def claims(rates: Rates) -> list[Claim]:
    loses = [(default(knob, rates), knob.name) for knob in KNOBS]
    return [
        *(Claim(one.what, f"{one.measured:+.4f}", one.holds) for one in known(rates)),
        *(Claim(f"the default {name} loses somewhere", str(found), found.wrong > 0) for found, name in loses),
    ]


def page(_: Namespace, rates: Rates) -> Iterator[str]:
    figures = [
        (one.what, f"{one.measured:+.4f}", f"{one.expected:+.3f} ± {one.tolerance:.3f}", verdict(one.holds))
        for one in known(rates)
    ]
    yield from [
        "# Knobs that flip",
        "",
        "Hit pages per full prompt page on the Mooncake conversation trace, pages of 512 tokens, one request at a time. Made by",
        "`python experiments/knobs_flip/run.py`; all numbers are in [results.csv](results.csv).",
        "",
        "![Points of hit rate that each choice gains over its default, by GPU and CPU capacity](results.png)",
        "",
        "## Known figures",
        "",
        *markdown(("", "measured", "from the engines' own code", ""), figures),
        "",
        "## Where the defaults are wrong",
        "",
        *(f"- {default(knob, rates)}" for knob in KNOBS),
    ]
    for knob in KNOBS:
        head = ("GPU + CPU pages", "no cache", *knob.choices, BOUND, UNLIMITED)
        yield from section(knob.name.capitalize(), head, places(knob, rates))


def places(knob: Knob, rates: Rates) -> Iterator[list[str]]:
    """A line per place, the best choice in bold, between no cache and the bounds."""
    for gpu in GPU_PAGES:
        for cpu in CPU_PAGES:
            if cpu or not knob.needs_cpu:
                values = [rates[Cell(knob.name, choice, gpu, cpu)] for choice in knob.choices]
                bounds = rates[Cell("eviction", BOUND, gpu, cpu)], rates[Cell("eviction", UNLIMITED, 0, 0)]
                yield [f"{gpu:,} + {cpu:,}", "0", *bold(values, max(values)), *bold(bounds, None)]


def table(rates: Rates) -> Iterator[tuple[object, ...]]:
    yield "knob", "choice", "gpu_pages", "cpu_pages", "page_hit_rate"
    yield from ((cell.knob, cell.choice, cell.gpu, cell.cpu, f"{rate:.6f}") for cell, rate in rates.items())


def figure(rates: Rates) -> go.Figure:
    """A map per choice: the points of hit rate that it gains over its knob's default."""
    maps = [(knob, choice) for knob in KNOBS for choice in knob.choices if choice != knob.default]
    maps.append((KNOBS[-1], BOUND))
    titles = [f"{knob.name}: {choice} over {knob.default}" for knob, choice in maps]
    columns = 2
    figure = make_subplots(rows=-(-len(maps) // columns), cols=columns, subplot_titles=titles, vertical_spacing=0.09)
    for at, (knob, choice) in enumerate(maps):
        points = [[points_gained(rates, knob, choice, gpu, cpu) for gpu in GPU_PAGES] for cpu in CPU_PAGES]
        figure.add_heatmap(
            z=points,
            x=[f"{gpu:,}" for gpu in GPU_PAGES],
            y=[f"{cpu:,}" for cpu in CPU_PAGES],
            text=[["" if value is None else f"{value:+.1f}" for value in row] for row in points],
            texttemplate="%{text}",
            coloraxis="coloraxis",
            row=at // columns + 1,
            col=at % columns + 1,
        )
    figure.update_xaxes(title_text="GPU pages", type="category")
    figure.update_yaxes(title_text="CPU pages", type="category")
    return figure.update_layout(
        title="Points of hit rate gained over the default (red: the default is wrong there; blue: it is right)",
        coloraxis={"colorscale": "RdBu_r", "cmid": 0, "colorbar": {"title": "points"}},
        height=330 * -(-len(maps) // columns),
        width=1100,
    )


def points_gained(rates: Rates, knob: Knob, choice: str, gpu: int, cpu: int) -> float | None:
    chosen, default = (rates.get(Cell(knob.name, name, gpu, cpu)) for name in (choice, knob.default))
    return None if chosen is None or default is None else 100 * (chosen - default)


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": CONVERSATION},
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
