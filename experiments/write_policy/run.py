"""Which write policy is best over GPU and CPU memory, and where does the clock overturn the hit rate?

Llama 3 8B on one H200, the Mooncake conversation trace at half its rate: 1.7 requests per second, which the GPU can serve with
all sizes here. The hit rate is that of a replay, one request at a time; the time to first token (TTFT) that of a simulation,
once with the H200's host link, 55.4 GB/s each way, and once with a link of 8 GB/s. The trace's timestamps advance in steps of
3 s, 6 s at this rate, and ten requests share one: half of the mean TTFT is spent waiting for other requests of the same burst.

Claims:

1. in the replay write_back hits most at every place;
2. with the fast link the policy that hits most also has the lowest mean TTFT at every place, within 2%;
3. with the slow link it does not: somewhere its mean TTFT is more than 2% above that of another policy;
4. simulated hit rates are within one point of the replay's everywhere.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import kvsim
from kvsim.report.study import CONVERSATION, Claim, Study, bold, capacities, highest, lowest, opening, section
from kvsim.trace.base import Trace

POLICIES = ("write_through", "write_through_selective", "write_back")
COLOURS = ("#3d8fd1", "#0a9e74", "#d55e00")
GPU_GIB = (40, 60, 100)
CPU_GIB = (100, 400, 1600)
LINKS = {"fast": 55.4, "slow": 8.0}
"""GB/s of the host link, each way; both ways together carry 1.82 times as much, as measured on the H200."""
RATE = 0.5
MARGIN = 1.02
"""Mean TTFTs whose ratio is smaller count as equal."""


@dataclass(frozen=True)
class Place:
    """Sizes of the tiers."""

    gpu: int
    cpu: int

    def __str__(self) -> str:
        return f"{self.gpu} + {self.cpu:,} GiB"


@dataclass(frozen=True)
class Cell:
    """One policy at one place."""

    place: Place
    policy: str

    def overrides(self) -> tuple[str, ...]:
        return *capacities(gpu=self.place.gpu, cpu=self.place.cpu), f"placement={self.policy}"


@dataclass(frozen=True)
class Row:
    """Results of a cell: the replayed hit rate, and by link those of the simulations."""

    replayed: float
    hit_rate: dict[str, float]
    ttft_s: dict[str, float]
    p99_s: dict[str, float]
    written_gb: dict[str, float]

    @property
    def apart(self) -> float:
        """Largest difference between a simulated hit rate and the replayed one."""
        return max(abs(rate - self.replayed) for rate in self.hit_rate.values())


Rows = dict[Cell, Row]


def places() -> list[Place]:
    return [Place(gpu, cpu) for gpu in GPU_GIB for cpu in CPU_GIB]


def cells() -> list[Cell]:
    return [Cell(place, policy) for place in places() for policy in POLICIES]


@cache
def load(path: str, limit: int | None) -> Trace:
    return kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit, rate=RATE)


def run(options: Namespace, cell: Cell) -> Row:
    trace = load(options.trace, options.limit)
    row = Row(kvsim.replay(trace, *cell.overrides()).hit_rate, {}, {}, {}, {})
    for link, gb_per_s in LINKS.items():
        speed = [f"hardware.{way}_bytes_per_s={gb_per_s}e9" for way in ("host_to_device", "device_to_host")]
        both = f"hardware.both_directions_bytes_per_s={1.82 * gb_per_s}e9"
        result = kvsim.simulate(trace, *cell.overrides(), *speed, both)
        record = result.record
        row.hit_rate[link] = result.hit_rate
        row.ttft_s[link], row.p99_s[link] = record["ttft_s"]["mean"], record["ttft_s"]["p99"]
        row.written_gb[link] = record["links"].get("gpu-cpu", {"bytes": 0})["bytes"] / 1e9
    return row


@dataclass(frozen=True)
class Contest:
    """At one place and link, the policy that hits most in the replay and the one with the lowest mean TTFT."""

    place: Place
    most_hits: str
    soonest: str
    loss: float
    """How much slower the first is than the second; 0.3 is 30%."""

    @property
    def is_overturned(self) -> bool:
        return 1 + self.loss > MARGIN


def contests(rows: Rows, link: str) -> list[Contest]:
    found = []
    for place in places():
        here = {policy: rows[Cell(place, policy)] for policy in POLICIES}
        most = max(POLICIES, key=lambda policy: here[policy].replayed)
        soonest = min(POLICIES, key=lambda policy: here[policy].ttft_s[link])
        found.append(Contest(place, most, soonest, here[most].ttft_s[link] / here[soonest].ttft_s[link] - 1))
    return found


def claims(rows: Rows) -> list[Claim]:
    fast, slow = contests(rows, "fast"), contests(rows, "slow")
    place, lead = lowest({place: write_back_lead(rows, place) for place in places()})
    furthest, apart = highest({cell: row.apart for cell, row in rows.items()})
    return [
        Claim(
            "in the replay write_back hits most at every place",
            f"it leads by at least {100 * lead:+.2f} points ({place})",
            all(contest.most_hits == "write_back" for contest in fast),
        ),
        Claim(
            f"at {LINKS['fast']:g} GB/s the policy that hits most has the lowest mean TTFT at every place",
            overturned(fast),
            not any(contest.is_overturned for contest in fast),
        ),
        Claim(
            f"at {LINKS['slow']:g} GB/s it does not at every place",
            overturned(slow),
            any(contest.is_overturned for contest in slow),
        ),
        Claim(
            "simulated hit rates are within one point of the replay's",
            f"at most {100 * apart:.2f} points apart ({furthest.policy}, {furthest.place})",
            apart <= 0.01,
        ),
    ]


def write_back_lead(rows: Rows, place: Place) -> float:
    others = max(rows[Cell(place, policy)].replayed for policy in POLICIES if policy != "write_back")
    return rows[Cell(place, "write_back")].replayed - others


def overturned(found: list[Contest]) -> str:
    count = sum(contest.is_overturned for contest in found)
    worst = max(found, key=lambda contest: contest.loss)
    return (
        f"overturned at {count} of {len(found)} places; it is at most {worst.loss:.2%} slower "
        f"({worst.most_hits} against {worst.soonest}, {worst.place})"
    )


def finding(rows: Rows) -> str:
    fast, slow = contests(rows, "fast"), contests(rows, "slow")
    slowest = max(slow, key=lambda contest: contest.loss)
    behind = rows[Cell(slowest.place, slowest.most_hits)]
    ahead = rows[Cell(slowest.place, slowest.soonest)]
    wins = {policy: sum(contest.soonest == policy for contest in slow) for policy in POLICIES}
    named = ", ".join(f"{policy} at {count} places" for policy, count in wins.items() if count)
    return (
        f"At {LINKS['fast']:g} GB/s the policy that hits most in the replay has the lowest mean TTFT, within {MARGIN - 1:.0%}, "
        f"at {sum(not contest.is_overturned for contest in fast)} of {len(fast)} places. "
        f"At {LINKS['slow']:g} GB/s it does at {sum(not contest.is_overturned for contest in slow)} places; the lowest is that "
        f"of {named}. "
        f"The clock overturns most at {slowest.place}: {slowest.most_hits} hits {behind.replayed:.2%} against "
        f"{ahead.replayed:.2%} of {slowest.soonest}, but answers after {behind.ttft_s['slow']:.2f} s against "
        f"{ahead.ttft_s['slow']:.2f} s, since a request waits until the pages evicted for it are written out."
    )


def page(_: Namespace, rows: Rows) -> Iterator[str]:
    text = [
        "Llama 3 8B on one H200, the Mooncake conversation trace at half its rate, pages of 512 tokens; hit tokens per prompt",
        "token. Made by `python experiments/write_policy/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    picture = "Hit rate and mean TTFT by policy, GPU and CPU memory, and link"
    yield from opening("Write policies: hit rate and time to first token", text, picture, claims(rows), finding(rows))
    head = ("GPU + CPU", *POLICIES)
    yield from section("Hit rate, replayed", head, by_policy(rows, lambda row: row.replayed, max, ".4f"))
    for link, gb_per_s in LINKS.items():
        lines = by_policy(rows, lambda row: row.ttft_s[link], min, ".3f")  # noqa: B023
        yield from section(f"Mean TTFT (s), {gb_per_s:g} GB/s", head, lines)


def by_policy(rows: Rows, value: Callable[[Row], float], best: Callable[[Iterable[float]], float], form: str) -> list[list[str]]:
    """A line per place, the best value in bold."""
    lines = []
    for place in places():
        values = [value(rows[Cell(place, policy)]) for policy in POLICIES]
        lines.append([str(place), *bold(values, best(values), form)])
    return lines


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    rates, times = ("replayed_hit_rate", "hit_rate"), ("ttft_mean_s", "ttft_p99_s")
    yield "gpu_gib", "cpu_gib", "policy", "link_gb_per_s", *rates, *times, "written_gb"
    for cell, row in rows.items():
        for link, gb_per_s in LINKS.items():
            rates = f"{row.replayed:.6f}", f"{row.hit_rate[link]:.6f}"
            times = f"{row.ttft_s[link]:.4f}", f"{row.p99_s[link]:.4f}"
            yield cell.place.gpu, cell.place.cpu, cell.policy, gb_per_s, *rates, *times, f"{row.written_gb[link]:.1f}"


def figure(rows: Rows) -> go.Figure:
    names = ["hit rate, replayed", *(f"mean TTFT (s), {gb_per_s:g} GB/s" for gb_per_s in LINKS.values())]
    titles = [f"{name}, GPU {gpu} GiB" for name in names for gpu in GPU_GIB]
    figure = make_subplots(rows=len(names), cols=len(GPU_GIB), subplot_titles=titles, shared_yaxes="rows", vertical_spacing=0.1)
    for column, gpu in enumerate(GPU_GIB, 1):
        for policy, colour in zip(POLICIES, COLOURS, strict=True):
            here = [rows[Cell(Place(gpu, cpu), policy)] for cpu in CPU_GIB]
            for at, values in enumerate(
                ([row.replayed for row in here], *([row.ttft_s[link] for row in here] for link in LINKS)), 1
            ):
                figure.add_scatter(
                    x=[f"{cpu:,}" for cpu in CPU_GIB], y=values, name=policy, legendgroup=policy, mode="lines+markers",
                    showlegend=column == 1 and at == 1, line={"color": colour, "width": 2}, row=at, col=column,
                )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="CPU memory (GiB)", row=len(names))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(tickformat=".0%", row=1)
    return figure.update_layout(
        template="plotly_white", width=1100, height=900, legend={"orientation": "h", "y": 1.08}, margin={"t": 120},
        title="Write policies: the policy that hits most, and the one that answers first",
    )  # fmt: skip


STUDY = Study(
    file=__file__, question=__doc__, traces={"trace": CONVERSATION},
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
