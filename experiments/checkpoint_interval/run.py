"""How often should a hybrid model's recurrent state be saved along a prompt?

Qwen3-Next 80B on two H200, whose 282 GB hold 160 GB of weights. A state takes 77 MB, as much as the KV of 3,144 tokens, and
shares the memory of the KV: short intervals lose few tokens at a miss but fill the memory with states, long intervals do the
opposite. States are saved every ``tokens`` tokens and at the end of each prompt (checkpoint=interval); LRU evicts them like KV.
The first 2,500 requests of WEKA's agent sessions, 24 sessions at a time in a closed loop, and of the Mooncake conversation trace
at twice its rate, 6.8 requests per second, both with inferred answers; two GPUs can serve either. Saving a state takes memory
here, but no time.

Claims:

1. everywhere some interval between the shortest and the longest hits more than both (by more than .001);
2. everywhere the interval with the most hits has the lowest mean TTFT, within 2%;
3. on WEKA's sessions an interval of 512 tokens hits less than one of 65,536 everywhere: KV makes better use of the memory than
   states in the middle of prompts;
4. the best interval shrinks or stays the same as memory grows.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import CONVERSATION, WEKA, Claim, Study, bold, capacities, highest, opening, section
from kvsim.trace.base import Trace

AGENTS, CHATS = "agents (WEKA)", "conversation"
INTERVALS = (512, 1024, 2048, 4096, 8192, 16384, 65536)
GIB = (20, 40, 80, 110)
COLOURS = ("#d55e00", "#e69f00", "#0a9e74", "#3d8fd1")
MODEL = (
    "model=qwen3_next_80b",
    "hardware.gpus=2",
    "hardware.allreduce_bytes_per_s=null",
    "rules.cache_output=true",
    "checkpoint=interval",
)
EQUAL = 1.02
"""Mean TTFTs whose ratio is smaller count as equal."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    trace: str
    gib: int
    tokens: int


@dataclass(frozen=True)
class Row:
    """Results of a run."""

    hit_rate: float
    ttft_s: float
    p99_s: float
    state_share: float
    """Share of states in the bytes inserted into the cache."""
    states: int
    lost_share: float
    """Share of prompt tokens whose KV was cached, but after the last state."""


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    return [Cell(trace, gib, tokens) for trace in (AGENTS, CHATS) for gib in GIB for tokens in INTERVALS]


@cache
def load_agents(path: str, limit: int) -> Trace:
    sessions = {"arrivals": "closed_loop", "concurrent_sessions": 24}
    return kvsim.load_trace("weka", path=path, page_tokens=64, limit=limit, answers="inferred", **sessions)


@cache
def load_chats(path: str, limit: int) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=64, limit=limit, answers="inferred", rate=2.0)


def run(options: Namespace, cell: Cell) -> Row:
    limit = options.limit
    trace = load_agents(options.weka, limit) if cell.trace == AGENTS else load_chats(options.conversation, limit)
    result = kvsim.simulate(trace, *MODEL, *capacities(gpu=cell.gib), f"checkpoint.tokens={cell.tokens}")
    record, states = result.record, result.record["checkpoints"]
    inserted_bytes = record["tiers"]["gpu"]["inserted_pages"] * record["page_bytes"]
    return Row(
        result.hit_rate,
        record["ttft_s"]["mean"],
        record["ttft_s"]["p99"],
        states["bytes"] / inserted_bytes if inserted_bytes else 0.0,
        states["saved"],
        states["tokens_lost_to_missing_state"] / record["prompt_tokens"],
    )


@dataclass(frozen=True)
class Series:
    """All intervals on one trace with one memory size."""

    trace: str
    gib: int
    rows: dict[int, Row]

    @property
    def best(self) -> int:
        """The interval with the most hits; of equal ones the longest."""
        return max(self.rows, key=lambda tokens: (self.rows[tokens].hit_rate, tokens))

    @property
    def soonest(self) -> int:
        """The interval with the lowest mean TTFT."""
        return min(self.rows, key=lambda tokens: self.rows[tokens].ttft_s)

    @property
    def inner_gain(self) -> float:
        """Hit rate of the best interval minus that of the better of the shortest and the longest."""
        ends = max(self.rows[INTERVALS[0]].hit_rate, self.rows[INTERVALS[-1]].hit_rate)
        return self.rows[self.best].hit_rate - ends

    @property
    def delay(self) -> float:
        """How much slower the interval with the most hits is than the soonest one; 0.1 is 10%."""
        return self.rows[self.best].ttft_s / self.rows[self.soonest].ttft_s - 1

    def __str__(self) -> str:
        return f"{self.trace}, {self.gib} GiB"


def series(rows: Rows, trace: str) -> list[Series]:
    return [Series(trace, gib, {tokens: rows[Cell(trace, gib, tokens)] for tokens in INTERVALS}) for gib in GIB]


def claims(rows: Rows) -> list[Claim]:
    agents, chats = series(rows, AGENTS), series(rows, CHATS)
    flattest = min(agents + chats, key=lambda one: one.inner_gain)
    slowest = max(agents + chats, key=lambda one: one.delay)
    shortest, longest = INTERVALS[0], INTERVALS[-1]
    closest, lead = highest({one.gib: one.rows[shortest].hit_rate - one.rows[longest].hit_rate for one in agents})
    bests = {trace: [one.best for one in each] for trace, each in ((AGENTS, agents), (CHATS, chats))}
    return [
        Claim(
            "everywhere some interval in between hits more than the shortest and the longest",
            f"at least {100 * flattest.inner_gain:+.2f} points ({flattest})",
            flattest.inner_gain > 0.001,
        ),
        Claim(
            "the interval with the most hits has the lowest mean TTFT",
            f"at most {slowest.delay:.1%} slower ({slowest}: {slowest.best:,} against {slowest.soonest:,})",
            1 + slowest.delay <= EQUAL,
        ),
        Claim(
            f"on WEKA's sessions an interval of {shortest} tokens hits less than one of {longest:,}",
            f"at most {100 * lead:+.2f} points ({AGENTS}, {closest} GiB)",
            lead < 0,
        ),
        Claim(
            "the best interval shrinks or stays the same as memory grows",
            "; ".join(f"{trace}: " + ", ".join(f"{tokens:,}" for tokens in each) for trace, each in bests.items()),
            all(each == sorted(each, reverse=True) for each in bests.values()),
        ),
    ]


def finding(rows: Rows) -> str:
    agents, chats = series(rows, AGENTS), series(rows, CHATS)
    shortest, longest = INTERVALS[0], INTERVALS[-1]

    def result(one: Series, tokens: int) -> str:
        return f"{one.rows[tokens].hit_rate:.1%} and {one.rows[tokens].ttft_s:.2f} s with {tokens:,}"

    def best(one: Series) -> str:
        return f"{result(one, one.best)} tokens against {result(one, shortest)} at {one.gib} GiB"

    shares = [[one.rows[tokens].state_share for one in agents + chats] for tokens in (shortest, longest)]
    lost = [one.rows[longest].lost_share for one in agents + chats]
    return (
        "Agents continue from the ends of prompts, where every interval has a state, so the less memory there is, the fewer "
        f"states in between pay off. The best intervals give {best(agents[0])}, and {best(agents[-1])}. "
        f"Conversations short of memory reuse little but the {shortest} tokens that all prompts of the trace begin with, and "
        f"only an interval of {shortest} has a state after them: at {chats[0].gib} GiB {result(chats[0], shortest)}, whose "
        f"states leave no room for requests, and {result(chats[0], longest)}; at {chats[-1].gib} GiB "
        f"{result(chats[-1], chats[-1].best)}. "
        f"States are {min(shares[0]):.0%} to {max(shares[0]):.0%} of the inserted bytes with {shortest} tokens and "
        f"{min(shares[1]):.0%} to {max(shares[1]):.0%} with {longest:,}, where {min(lost):.1%} to {max(lost):.1%} of the prompt "
        "tokens had their KV in memory but no state to continue from."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        "Qwen3-Next 80B on two H200, pages of 64 tokens; hit tokens per prompt token. Made by",
        "`python experiments/checkpoint_interval/run.py`; all numbers are in [results.csv](results.csv).",
        "",
        *(f"- {trace}: {options.limit:,} requests" for trace in (AGENTS, CHATS)),
    ]
    picture = "Hit rate, mean TTFT and the share of states by interval and memory"
    yield from opening("Checkpoint interval of a hybrid model", text, picture, claims(rows), finding(rows))
    for trace in (AGENTS, CHATS):
        for title, name, best in (
            ("hit rate", "hit_rate", max),
            ("mean TTFT (s)", "ttft_s", min),
            ("share of states in the inserted bytes", "state_share", None),
        ):
            body = []
            for gib in GIB:
                values = [getattr(rows[Cell(trace, gib, tokens)], name) for tokens in INTERVALS]
                body.append([str(gib), *bold(values, best(values) if best else None)])
            yield from section(f"{trace}: {title}", ("GiB", *(f"{tokens:,}" for tokens in INTERVALS)), body)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield "trace", "gib", "interval_tokens", "hit_rate", "ttft_mean_s", "ttft_p99_s", "state_share", "states", "lost_share"
    for cell, row in rows.items():
        numbers = (row.hit_rate, row.ttft_s, row.p99_s, row.state_share, row.states, row.lost_share)
        yield cell.trace, cell.gib, cell.tokens, *(f"{number:.6g}" for number in numbers)


def figure(rows: Rows) -> go.Figure:
    measures = (("hit_rate", "hit rate"), ("ttft_s", "mean TTFT (s)"), ("state_share", "share of states"))
    titles = [f"{trace}: {name}" for trace in (AGENTS, CHATS) for _, name in measures]
    figure = make_subplots(rows=2, cols=len(measures), subplot_titles=titles, vertical_spacing=0.14)
    for row, trace in enumerate((AGENTS, CHATS), 1):
        for column, (name, _) in enumerate(measures, 1):
            for gib, colour in zip(GIB, COLOURS, strict=False):
                figure.add_scatter(
                    x=list(INTERVALS), y=[getattr(rows[Cell(trace, gib, tokens)], name) for tokens in INTERVALS],
                    name=f"{gib} GiB", legendgroup=str(gib), mode="lines+markers", showlegend=row == column == 1,
                    line={"color": colour, "width": 2}, row=row, col=column,
                )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=[512, 2048, 8192, 65536], ticktext=["512", "2,048", "8,192", "65,536"])
    figure.update_xaxes(title="tokens between two states", row=2)
    figure.update_yaxes(rangemode="tozero")
    for column in (1, 3):
        figure.update_yaxes(tickformat=".0%", col=column)
    return figure.update_layout(template="plotly_white", width=1150, height=760, legend={"orientation": "h", "y": 1.12})


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION, "weka": WEKA}, limit=2_500,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
