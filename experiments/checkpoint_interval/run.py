"""How often should a hybrid model's recurrent state be saved along a prompt?

Qwen3-Next 80B on two H200, whose 282 GB hold 160 GB of weights. A state is 77 MB, as much as the KV of 3,144 tokens, and lies
among the KV: short intervals lose few tokens at a miss and fill the memory with states, long ones the other way round. States are
saved every ``tokens`` and at the end of each prompt (checkpoint=interval), evicted by LRU like the KV. The first 2,500 requests
of WEKA's agent sessions, 24 at a time in a closed loop, and of the Mooncake conversation trace at twice its rate, 6.8 a second,
both with answers inferred; two GPUs serve either. Saving a state takes no time here, only room.

Claims:

1. everywhere some interval between the shortest and the longest hits more than both (by more than .001);
2. the interval with the most hits has the least mean TTFT everywhere, within 2%;
3. on WEKA's sessions 512 tokens hit less than 65,536 do everywhere: room for KV is worth more than states in between;
4. the best interval falls, or stays, as memory grows.

Exits with 1 if a claim fails.
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
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACES = HERE.parents[2] / "shared" / "traces"
COMMAND = "python experiments/checkpoint_interval/run.py"

REQUESTS = 2_500
INTERVALS = (512, 1024, 2048, 4096, 8192, 16384, 65536)
GIB = (20, 40, 80, 110)
COLOURS = ("#d55e00", "#e69f00", "#0a9e74", "#3d8fd1")
ROOM = ("model=qwen3_next_80b", "hardware.gpus=2", "rules.cache_output=true", "checkpoint=interval")
EQUAL = 1.02
"""Means of TTFT that differ by less count as equal."""


@dataclass(frozen=True)
class Source:
    """A trace, how it is read and how much of it is played."""

    name: str
    reader: str
    path: str
    limit: int

    @property
    def settings(self) -> dict[str, object]:
        return {"weka": {"arrivals": "closed_loop", "concurrent_sessions": 24}, "mooncake": {"rate": 2.0}}[self.reader]


@dataclass(frozen=True)
class Cell:
    """One run."""

    source: Source
    gib: int
    tokens: int

    def overrides(self) -> tuple[str, ...]:
        return *ROOM, f"tiers.gpu.capacity={self.gib}GiB", f"checkpoint.tokens={self.tokens}"


@dataclass(frozen=True)
class Row:
    """What a run gave."""

    hit_rate: float
    ttft_s: float
    p99_s: float
    state_share: float
    """Of the bytes that entered the cache, what states were."""
    states: int
    lost_share: float
    """Of the prompt tokens, those whose KV was there, but after the last state."""


Rows = dict[Cell, Row]


@cache
def load(source: Source) -> Trace:
    return kvsim.load_trace(
        source.reader, path=source.path, page_tokens=64, limit=source.limit, answers="inferred", **source.settings
    )


def run(cell: Cell) -> Row:
    result = kvsim.simulate(load(cell.source), *cell.overrides())
    record, states = result.record, result.record["checkpoints"]
    entered = record["tiers"]["gpu"]["inserted_pages"] * record["page_bytes"]
    return Row(
        result.hit_rate,
        record["ttft_s"]["mean"],
        record["ttft_s"]["p99"],
        states["bytes"] / entered if entered else 0.0,
        states["saved"],
        states["tokens_lost_to_missing_state"] / record["prompt_tokens"],
    )


def measure(sources: list[Source]) -> Rows:
    """All runs, two processes at a time."""
    every = [Cell(source, gib, tokens) for source in sources for gib in GIB for tokens in INTERVALS]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        return dict(zip(every, pool.map(run, every), strict=True))


@dataclass(frozen=True)
class Series:
    """All intervals at one place."""

    source: Source
    gib: int
    rows: dict[int, Row]

    @property
    def best(self) -> int:
        """The interval that hits most; of equal ones the longest."""
        return max(self.rows, key=lambda tokens: (self.rows[tokens].hit_rate, tokens))

    @property
    def soonest(self) -> int:
        return min(self.rows, key=lambda tokens: self.rows[tokens].ttft_s)

    @property
    def inner_gain(self) -> float:
        """What the best hits more than the shortest and the longest interval."""
        ends = max(self.rows[INTERVALS[0]].hit_rate, self.rows[INTERVALS[-1]].hit_rate)
        return self.rows[self.best].hit_rate - ends

    @property
    def delay(self) -> float:
        """How much slower the interval with the most hits is than the soonest one; 0.1 is 10%."""
        return self.rows[self.best].ttft_s / self.rows[self.soonest].ttft_s - 1

    def __str__(self) -> str:
        return f"{self.source.name}, {self.gib} GiB"


def series(rows: Rows) -> list[Series]:
    found: dict[tuple[Source, int], dict[int, Row]] = {}
    for cell, row in rows.items():
        found.setdefault((cell.source, cell.gib), {})[cell.tokens] = row
    return [Series(source, gib, each) for (source, gib), each in found.items()]


def claims(rows: Rows) -> list[tuple[str, str, bool]]:
    """(claim, what was measured, whether it holds)."""
    every = series(rows)
    flattest = min(every, key=lambda one: one.inner_gain)
    slowest = max(every, key=lambda one: one.delay)
    weka = [one for one in every if one.source.reader == "weka"]
    short = {str(one): one.rows[INTERVALS[0]].hit_rate - one.rows[INTERVALS[-1]].hit_rate for one in weka}
    closest = max(short, key=lambda place: short[place])
    names = {one.source.name for one in every}
    bests = {name: [one.best for one in every if one.source.name == name] for name in sorted(names)}
    return [
        (
            "some interval in between hits more than the shortest and the longest, everywhere",
            f"{100 * flattest.inner_gain:+.2f} points at least, {flattest}",
            flattest.inner_gain > 0.001,
        ),
        (
            "the interval with the most hits has the least mean TTFT",
            f"{slowest.delay:.1%} slower at most, {slowest}: {slowest.best:,} after {slowest.soonest:,}",
            1 + slowest.delay <= EQUAL,
        ),
        (
            f"on WEKA's sessions {INTERVALS[0]} tokens hit less than {INTERVALS[-1]:,}",
            f"{100 * short[closest]:+.2f} points at most, {closest}",
            short[closest] < 0,
        ),
        (
            "the best interval falls, or stays, as memory grows",
            "; ".join(f"{name}: " + ", ".join(f"{tokens:,}" for tokens in each) for name, each in bests.items()),
            all(each == sorted(each, reverse=True) for each in bests.values()),
        ),
    ]


def finding(rows: Rows) -> str:
    """Three sentences, their figures from the runs."""
    every = series(rows)
    agents = [one for one in every if one.source.reader == "weka"]
    chats = [one for one in every if one.source.reader == "mooncake"]
    shortest, longest = INTERVALS[0], INTERVALS[-1]

    def told(one: Series, tokens: int) -> str:
        return f"{one.rows[tokens].hit_rate:.1%} and {one.rows[tokens].ttft_s:.2f} s with {tokens:,}"

    def best(one: Series) -> str:
        return f"{told(one, one.best)} tokens against {told(one, shortest)} at {one.gib} GiB"

    shares = [one.rows[shortest].state_share for one in every], [one.rows[longest].state_share for one in every]
    lost = [one.rows[longest].lost_share for one in every]
    return (
        "Agents go on from the ends of prompts, where every interval has a state, so the less memory, the fewer states in "
        f"between pay: most is hit, {best(agents[0])}, and {best(agents[-1])}. "
        f"Conversations short of memory reuse little but the {shortest} tokens that all prompts of the trace begin with, after "
        f"which only an interval of {shortest} has a state: at {chats[0].gib} GiB {told(chats[0], shortest)}, whose states leave "
        f"no room for requests, and {told(chats[0], longest)}; at {chats[-1].gib} GiB {told(chats[-1], chats[-1].best)}. "
        f"States are {min(shares[0]):.0%} to {max(shares[0]):.0%} of the bytes that enter with {shortest} tokens and "
        f"{min(shares[1]):.0%} to {max(shares[1]):.0%} with {longest:,}, where {min(lost):.1%} to {max(lost):.1%} of the prompt "
        "tokens had their KV in memory and no state to go on from."
    )


def write_markdown(path: Path, rows: Rows, sources: list[Source]) -> None:
    lines = [
        "# Checkpoint interval of a hybrid model",
        "",
        f"Qwen3-Next 80B on two H200, pages of 64 tokens; made by `{COMMAND}`. Hit tokens per prompt token; all figures",
        "are in [results.csv](results.csv).",
        "",
        *(f"- {source.name}: {source.limit:,} requests" for source in sources),
        "",
        "![Hit rate, mean TTFT and the share of states by interval and memory](results.png)",
        "",
        "| claim | measured | |",
        "|---|---|---|",
        *(f"| {claim} | {measured} | {'holds' if holds else 'FAILS'} |" for claim, measured, holds in claims(rows)),
        "",
        finding(rows),
    ]
    for source in sources:
        for title, value, best in (
            ("hit rate", lambda row: row.hit_rate, max),
            ("mean TTFT (s)", lambda row: row.ttft_s, min),
            ("share of states in the bytes that enter", lambda row: row.state_share, None),
        ):
            lines += ["", f"## {source.name}: {title}", ""]
            lines += [f"| GiB | {' | '.join(f'{tokens:,}' for tokens in INTERVALS)} |", "|---" * (len(INTERVALS) + 1) + "|"]
            for gib in GIB:
                values = [value(rows[Cell(source, gib, tokens)]) for tokens in INTERVALS]
                texts = [f"**{one:.4f}**" if best and one == best(values) else f"{one:.4f}" for one in values]
                lines.append(f"| {gib} | {' | '.join(texts)} |")
    path.write_text("\n".join(lines) + "\n")


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("trace", "gib", "interval_tokens", "hit_rate", "ttft_mean_s", "ttft_p99_s", "state_share", "states", "lost_share")
        )
        for cell, row in rows.items():
            numbers = (row.hit_rate, row.ttft_s, row.p99_s, row.state_share, row.states, row.lost_share)
            writer.writerow((cell.source.name, cell.gib, cell.tokens, *(f"{number:.6g}" for number in numbers)))


def draw(folder: Path, rows: Rows, sources: list[Source]) -> None:
    """``results.html``, and ``results.png`` from it where there is a Chromium."""
    from plotly.subplots import make_subplots

    measures = (("hit_rate", "hit rate"), ("ttft_s", "mean TTFT (s)"), ("state_share", "states in what enters"))
    titles = [f"{source.name}: {name}" for source in sources for _, name in measures]
    figure = make_subplots(rows=len(sources), cols=len(measures), subplot_titles=titles, vertical_spacing=0.14)
    for row, source in enumerate(sources, 1):
        for column, (name, _) in enumerate(measures, 1):
            for gib, colour in zip(GIB, COLOURS, strict=False):
                figure.add_scatter(
                    x=list(INTERVALS), y=[getattr(rows[Cell(source, gib, tokens)], name) for tokens in INTERVALS],
                    name=f"{gib} GiB", legendgroup=str(gib), mode="lines+markers", showlegend=row == column == 1,
                    line={"color": colour, "width": 2}, row=row, col=column,
                )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=[512, 2048, 8192, 65536], ticktext=["512", "2,048", "8,192", "65,536"])
    figure.update_xaxes(title="tokens between two states", row=len(sources))
    figure.update_yaxes(rangemode="tozero")
    for column in (1, 3):
        figure.update_yaxes(tickformat=".0%", col=column)
    figure.update_layout(template="plotly_white", width=1150, height=760, legend={"orientation": "h", "y": 1.12})
    page = folder / "results.html"
    figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(page, folder / "results.png", width=1166, height=776)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path, default=TRACES / "mooncake_conversation_trace.jsonl.gz")
    parser.add_argument("--weka", type=Path, default=TRACES / "weka_claude_code_traces_rle.jsonl.gz")
    parser.add_argument("--limit", type=int, default=REQUESTS, help="requests of each trace; the claims are about the default")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the results")
    arguments = parser.parse_args()
    for path in (arguments.conversation, arguments.weka):
        if not path.exists():
            parser.error(f"no trace at {path}: name it with --conversation or --weka")
    sources = [
        Source("agents (WEKA)", "weka", str(arguments.weka.resolve()), arguments.limit),
        Source("conversation", "mooncake", str(arguments.conversation.resolve()), arguments.limit),
    ]
    rows = measure(sources)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.output / "results.csv", rows)
    write_markdown(arguments.output / "results.md", rows, sources)
    draw(arguments.output, rows, sources)
    print((arguments.output / "results.md").read_text())
    return 0 if arguments.limit != REQUESTS or all(holds for _, _, holds in claims(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
