"""Which policy of each family should be taken where nothing else is known? Leaderboards of all policies.

``kvsim leaderboard`` with every eviction policy on Mooncake's conversations (pages of 512 tokens), WEKA's agent sessions (64) and
the synthetic trace (16), with GPU tiers of 1, 3, 10 and 30% of each trace's unique pages, one request at a time; and smaller
boards of the other families. Gains are those over the policy of a run that chooses none, with a 95% interval: what another
stretch of the same traffic would change. Times are wall times on a machine that other processes shared. What is claimed of mq had
been found with fewer policies and traces before (experiments/lru_or_not).

Claims:

1. mq is the eviction policy with the largest mean gain that is above its noise, of those that play on every trace;
2. with 1% of the unique pages of conversations and of the synthetic trace, it hits at least 2 points more than LRU;
3. with 30% no eviction policy gains half a point on any trace;
4. on agent sessions no eviction policy gains half a point with any capacity;
5. no eviction policy that does not look ahead gets half of Belady's gains, over all traces and capacities.

Exits with 1 if a claim fails.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import cache
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import plotly.graph_objects as go

import kvsim
from kvsim.installation import build_name
from kvsim.report.study import CONVERSATION, WEKA, Claim, Study, highest, lowest, markdown, opening, section
from kvsim.settings.sources import files_of
from kvsim.trace.base import Trace

SHARES = ("1%", "3%", "10%", "30%")
TRACES = {"conversation": ("mooncake", 512), "agents": ("weka", 64), "synthetic": ("synthetic", 16)}
"""The format and the tokens of a page, by name."""
KV_BYTES = 2**17
"""Of a token of Llama 3 8B, the model of a run that chooses none."""
FAVOURITE = "mq"
NO_LRU = ("tail_latency threshold=4000", "flop_aware alpha=1")
"""Policies whose defaults are LRU until they have seen enough, with settings that make them differ."""
SMALL, LARGE = SHARES[0], SHARES[-1]
NEEDS = re.compile(r"needs (?:the )?(.+?)(?: of each request)?(?:, which this trace does not have|$)")
"""What a policy that cannot play lacks, in the reason."""
MOST_SHOWN = 25
"""Points of hit rate at which the colours of the heat map end."""
DIVERGING = [[0.0, "#b2593b"], [0.25, "#dd9d84"], [0.5, "#e9ecef"], [0.75, "#7fb0d6"], [1.0, "#2f6fa7"]]


class Board(NamedTuple):
    """A leaderboard."""

    family: str
    traces: tuple[str, ...]
    capacities: tuple[str, ...]
    requests: int | None = None
    """Of each trace; None plays whole traces."""
    overrides: tuple[str, ...] = ()
    of_trace: tuple[tuple[str, Any], ...] = ()
    """Settings of the traces."""
    setting: str = ""
    """What it is about."""
    more: tuple[str, ...] = ()
    """Policies beside all of the family, with settings."""


EVICTION = Board("eviction", tuple(TRACES), SHARES, 12_500, setting="One tier, without a clock.", more=NO_LRU)
BOARDS = (
    EVICTION,
    Board(
        "placement", tuple(TRACES), ("80GiB",), 12_000, ("tiers.cpu.capacity=512GiB",),
        setting="80 GiB of GPU memory for KV above 512 GiB of CPU memory.",
    ),
    Board(
        "checkpoint", ("conversation",), ("20GiB", "80GiB"), 2_000, ("model=qwen3_next_80b",), (("answers", "inferred"),),
        setting="Qwen3-Next 80B, whose states share the memory with KV.",
    ),
    Board(
        "prefetch", ("conversation",), ("80GiB",), 3_000,
        ("tiers.cpu.capacity=128GiB", "tiers.disk.capacity=4TiB", "hardware.disk_read_bytes_per_s=5e9"), (("rate", 0.2),),
        setting="One engine at a fifth of the recorded rate, above 128 GiB of CPU memory and a disk that reads 5 GB/s.",
    ),
    Board(
        "routing", ("conversation",), ("80GiB",), 6_000, ("cluster.engines=8", "cluster.engines_per_host=4"), (("rate", 2.8),),
        setting="Eight engines on two hosts, at 0.35 times the recorded rate for each. Without a tier below the GPUs, dynamo "
        "chooses as kv_aware does.",
    ),
    Board(
        "scheduling", ("conversation",), ("80GiB",), 3_000, (), (("rate", 0.35),),
        setting="One engine at 0.35 times the recorded rate.",
    ),
)  # fmt: skip
Records = dict[Board, Mapping[str, Any]]


@cache
def load(name: str, path: str | None, limit: int | None, settings: tuple[tuple[str, Any], ...]) -> Trace:
    source, page_tokens = TRACES[name]
    place = {} if path is None else {"path": path}
    return kvsim.load_trace(source, page_tokens=page_tokens, limit=limit, **place, **dict(settings))


def run(options: Namespace, board: Board) -> Mapping[str, Any]:
    """The content of a board's ``leaderboard.json``."""
    limit = min((one for one in (options.limit, board.requests) if one), default=None)
    traces = {name: load(name, getattr(options, name, None), limit, board.of_trace) for name in board.traces}
    names = [*sorted(files_of(board.family)), *board.more]
    with TemporaryDirectory() as folder:
        return kvsim.leaderboard(
            traces, *board.overrides, family=board.family, policies=names, capacities=board.capacities, output=folder
        ).record


def command(board: Board) -> str:
    """The command that plays a board on one's own copies of the traces."""
    texts = []
    for name in board.traces:
        source, page_tokens = TRACES[name]
        words = [f"{name}.jsonl.gz" if source != "synthetic" else source, f"page_tokens={page_tokens}"]
        words += [f"limit={board.requests}"] if board.requests else []
        texts.append(" ".join([*words, *(f"{key}={value}" for key, value in board.of_trace)]))
    family = [] if board.family == "eviction" else [f"leaderboard.family={board.family}"]
    traces = ",".join(f'"{text}"' for text in texts)
    lists = [f"'leaderboard.traces=[{traces}]'", f"'leaderboard.capacities=[{','.join(board.capacities)}]'"]
    return " \\\n    ".join([" ".join(["kvsim leaderboard", *family, *board.overrides]), *lists])


def gains(records: Records, board: Board) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    """The cells of a board by trace, capacity in pages or bytes, and policy."""
    return {(cell["trace"], cell["capacity"], cell["policy"]): cell for cell in records[board]["cells"]}


def places(records: Records, board: Board) -> list[tuple[str, str]]:
    """Traces and capacities."""
    return [(trace["name"], capacity) for trace in records[board]["traces"] for capacity in trace["capacities"]]


def deployable(records: Records, board: Board) -> list[str]:
    """The policies that do not look ahead, best first."""
    ahead = records[board]["look_ahead"]
    return [one["policy"] for one in records[board]["standings"] if one["policy"] not in ahead]


def best_at(records: Records, board: Board, place: tuple[str, str]) -> Mapping[str, Any]:
    """The cell of the policy that gains most somewhere, of those that do not look ahead; the default's if none gains anything."""
    cells = gains(records, board)
    own = [cells[(*place, name)] for name in deployable(records, board)]
    base = cells[(*place, records[board]["baseline"])]
    return max((base, *own), key=lambda cell: -1.0 if cell["gain"] is None else cell["gain"])


def claims(records: Records) -> list[Claim]:
    record, cells = records[EVICTION], gains(records, EVICTION)
    ends = {trace["name"]: (trace["capacities"][0], trace["capacities"][-1]) for trace in record["traces"]}
    small = {name: 100 * cells[name, ends[name][0], FAVOURITE]["gain"] for name in ("conversation", "synthetic")}
    large = {name: 100 * best_at(records, EVICTION, (name, ends[name][1]))["gain"] for name in ends}
    own = [place for place in places(records, EVICTION) if place[0] == "agents"]
    agents = {share_of_pages(records, EVICTION, place): 100 * best_at(records, EVICTION, place)["gain"] for place in own}
    shares = {one["policy"]: one["headroom"] for one in record["standings"] if one["policy"] not in record["look_ahead"]}
    share_of, share = highest({name: value for name, value in shares.items() if value is not None})
    (least_at, least), (most_at, most), (agents_at, gain) = lowest(small), highest(large), highest(agents)
    return [
        Claim(f"{FAVOURITE} has the largest mean gain that is above its noise", record["verdict"], record["best"] == FAVOURITE),
        Claim(
            f"with {SMALL} of the pages of conversations and of the synthetic trace, it hits at least 2 points more than lru",
            f"at least {least:+.2f} points ({least_at})",
            least >= 2,
        ),
        Claim(f"with {LARGE} no policy gains half a point", f"at most {most:+.2f} points ({most_at})", most < 0.5),
        Claim("on agent sessions no policy gains half a point", f"at most {gain:+.2f} points ({agents_at})", gain < 0.5),
        Claim(
            "no policy that does not look ahead gets half of Belady's gains",
            f"at most {share:.0%} ({share_of})",
            share < 0.5,
        ),
    ]


def shown(value: float | None, form: str = "+z.2f", scale: float = 100) -> str:
    """A number of a board, or a dash."""
    return "-" if value is None else f"{scale * value:{form}}"


def memory(records: Records, board: Board, place: tuple[str, str]) -> str:
    """A capacity in pages and in GiB of KV of Llama 3 8B."""
    if not place[1].endswith("pages"):
        return place[1]
    pages = int(place[1].removesuffix("pages"))
    return f"{pages:,} pages, {pages * TRACES[place[0]][1] * KV_BYTES / 2**30:,.0f} GiB"


def share_of_pages(records: Records, board: Board, place: tuple[str, str]) -> str:
    """Which capacity of a trace it is: the share that was asked for, if all shares differ."""
    capacities = next(trace["capacities"] for trace in records[board]["traces"] if trace["name"] == place[0])
    at = capacities.index(place[1])
    return board.capacities[at] if len(capacities) == len(board.capacities) else place[1].removesuffix("pages")


def is_real(cell: Mapping[str, Any]) -> bool:
    """Whether a gain is above its noise."""
    return bool(cell["gain"] is not None and cell["gain"] > (cell["noise"] or 0.0))


def situations(records: Records) -> Iterator[tuple[str, ...]]:
    """By trace and capacity: what LRU hits, the best policy, the default choice, and the bound."""
    cells = gains(records, EVICTION)
    for place in places(records, EVICTION):
        best, base, bound = best_at(records, EVICTION, place), cells[(*place, "lru")], cells.get((*place, "belady"))
        favourite = cells[(*place, FAVOURITE)]
        yield (
            place[0], f"{share_of_pages(records, EVICTION, place)} ({memory(records, EVICTION, place)})", f"{base['value']:.1%}",
            f"{shown(favourite['gain'])} ± {shown(favourite['noise'], '.2f')}",
            f"{best['policy']} {shown(best['gain'])} ± {shown(best['noise'], '.2f')}" if is_real(best) else "none",
            "-" if bound is None else shown(bound["gain"]),
        )  # fmt: skip


def order(records: Records, board: Board) -> list[str]:
    """The lines of a board's table, best policy first."""
    record = records[board]
    times = record["measure"] == "ttft_s"
    scale, unit, form = (1000, "ms", "+z,.0f") if times else (100, "points", "+z.2f")
    cells = gains(records, board)
    took: dict[str, list[float]] = {one["policy"]: [] for one in record["standings"]}
    for cell in record["cells"]:
        if cell["us_per_request"] is not None and cell["policy"] in took:
            took[cell["policy"]].append(cell["us_per_request"])
    head = [
        "",
        "policy",
        f"gain ({unit})",
        *(f"{place[0]} {share_of_pages(records, board, place)}" for place in places(records, board)),
    ]
    head += [*(["of Belady's gain"] if record["bound"] else []), "us per request", "time"]
    rows = []
    for number, one in enumerate(record["standings"], 1):
        is_base = one["policy"] == record["baseline"]
        noise = "" if one["noise"] is None or is_base else f" ± {shown(one['noise'], form.lstrip('+'), scale)}"
        rows.append((
            str(number), f"`{one['policy']}`" + (" (looks ahead)" if one["policy"] in record["look_ahead"] else ""),
            shown(one["gain"], form, scale) + noise if one["gain"] is not None else "-",
            *(shown(cells[(*place, one["policy"])]["gain"], form, scale) for place in places(records, board)),
            *(["-" if one["headroom"] is None else f"{one['headroom']:.0%}"] if record["bound"] else []),
            shown(fmean(took[one["policy"]]) if took[one["policy"]] else None, ",.0f", 1),
            "-" if one["cost"] is None else f"{one['cost']:.1f}x",
        ))  # fmt: skip
    return markdown(head, rows)


def page(options: Namespace, records: Records) -> Iterator[str]:
    text = [
        "All policies of each family, ranked by `kvsim leaderboard`. Made by `python experiments/leaderboard/run.py`; its cells",
        "are in [results.csv](results.csv). Times per request, and as multiples of the default's, are wall times",
        f"({build_name()}) on a shared machine, good to about a third;",
        "[policy_speed](../policy_speed/results_one_tier.md) has measured those of eviction policies alone.",
    ]
    picture = "Points of hit rate that each eviction policy gains over LRU, by trace and capacity"
    yield from opening("Leaderboards", text, picture, claims(records))
    yield from ("", "## Which policy by default?", "", *advice(records))
    head = ("trace", "capacity", "LRU hits", FAVOURITE, "best that can be deployed", "belady")
    yield from section("Eviction: by situation", head, situations(records), *SITUATIONS)
    for board in BOARDS:
        about = f"{board.setting} {limited(board)}".strip()
        yield from ("", f"## {board.family.capitalize()}: all policies", "", about, "", "```bash", command(board), "```", "")
        yield from order(records, board)
        if needs := sorted({NEEDS.findall(one["reason"])[0] for one in records[board]["standings"] if one["missing"]}):
            yield from ("", f"A dash: the trace lacks what the policy needs ({', '.join(needs)}).")


def advice(records: Records) -> list[str]:
    """Which policy to take where, with the numbers that say so."""
    cells = gains(records, EVICTION)
    sizes = {trace["name"]: trace["capacities"] for trace in records[EVICTION]["traces"]}

    def points(policy: str, trace: str, at: int) -> str:
        return shown(cells[trace, sizes[trace][min(at, len(sizes[trace]) - 1)], policy]["gain"], "+z.1f")

    def spread(policy: str, trace: str) -> str:
        own = [100 * cells[trace, size, policy]["gain"] for size in sizes[trace]]
        return f"{min(own):+z.1f} to {max(own):+z.1f}"

    costs, shares = [{one["policy"]: one[name] for one in records[EVICTION]["standings"]} for name in ("cost", "headroom")]
    worst_of_slru = -min(100 * cells[(*place, "slru")]["gain"] for place in places(records, EVICTION))
    room = [shown(cells["conversation", size, "belady"]["gain"], ".0f") for size in sizes["conversation"][:2]]
    rows = [
        (
            "Nothing is known, or the tier holds a tenth or more of an hour's distinct text",
            "`lru`",
            f"With {LARGE} of the pages nothing gains half a point; with {SHARES[2]}, {FAVOURITE} "
            f"{points(FAVOURITE, 'conversation', 2)} on conversations and nothing elsewhere.",
        ),
        (
            "Chats, and a tier that holds a few per cent of it, as GPU memory alone does",
            f"`{FAVOURITE}`",
            f"{points(FAVOURITE, 'conversation', 0)} and {points(FAVOURITE, 'conversation', 1)} points on conversations with "
            f"{SMALL} and {SHARES[1]}, {points(FAVOURITE, 'synthetic', 0)} on the synthetic trace with {SMALL}, for "
            f"{costs[FAVOURITE]:.1f} times LRU's time.",
        ),
        (
            "Agents that send their whole history with each call",
            "`lru`",
            f"A session's next call comes soon. {FAVOURITE} is at {spread(FAVOURITE, 'agents')} points; none gains half a point.",
        ),
        (
            "SGLang, which offers lru, lfu, slru, fifo, mru, filo and priority",
            "`lru`",
            f"slru gains {points('slru', 'synthetic', 0)} at best and loses up to {worst_of_slru:.0f}; lfu never "
            f"forgets: {spread('lfu', 'agents')} on agents.",
        ),
        (
            "The bound is far away, and an application knows what comes",
            "tell the cache",
            f"Belady's {room[0]} and {room[1]} points on conversations with {SMALL} and {SHARES[1]} are for knowing the future; "
            f"{FAVOURITE}, by the past, gets {shares[FAVOURITE]:.0%} of all. `kv_flow`, which is told the steps of agents, gains "
            f"{points('kv_flow', 'synthetic', 0)} on the synthetic trace with {SMALL}.",
        ),
    ]
    others = [(board.family, *taken(records[board])) for board in BOARDS if board is not EVICTION]
    lines = markdown(("situation", "take", "because"), rows)
    return [*lines, "", "Of the other families, on the boards below:", "", *markdown(("family", "take", "over", "gain"), others)]


def taken(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """The policy that a board says to take, with those whose gain looks the same, the default, and what is gained over that."""
    best = next(one for one in record["standings"] if one["policy"] == record["best"])
    if best["policy"] == record["baseline"]:
        return f"`{best['policy']}`", "it is the default", "none gains more than its noise"
    scale, unit, form = (1000, "ms of mean TTFT", ",.0f") if record["measure"] == "ttft_s" else (100, "points of hit rate", ".2f")
    gain, noise = shown(best["gain"], f"+{form}", scale), shown(best["noise"], form, scale)
    alike = [one["policy"] for one in record["standings"] if shown(one["gain"], f"+{form}", scale) == gain]
    return ", ".join(f"`{name}`" for name in alike), f"`{record['baseline']}`", f"{gain} ± {noise} {unit}"


def limited(board: Board) -> str:
    """Which requests are played."""
    return f"The first {board.requests:,} requests of each trace." if board.requests else "All requests."


SITUATIONS = (
    "Points of hit rate over LRU; the best policy only where its gain is above its noise. GiB are of the KV of Llama 3 8B.",
    "The model of `learned` was trained on sessions of the synthetic trace.",
)


def table(records: Records) -> Iterator[tuple[object, ...]]:
    columns = ("policy", "trace", "capacity", "value", "gain", "noise", "headroom", "us_per_request", "cost", "reason")
    yield ("family", *columns)
    for board, record in records.items():
        for cell in record["cells"]:
            yield (board.family, *("" if cell[name] is None else cell[name] for name in columns))


def figure(records: Records) -> go.Figure:
    cells, columns = gains(records, EVICTION), places(records, EVICTION)
    names = [*(one["policy"] for one in records[EVICTION]["standings"]), "belady"]
    rows = [[cells[(*place, name)]["gain"] if (*place, name) in cells else None for place in columns] for name in names]
    points = [[None if gain is None else 100 * gain for gain in row] for row in rows]
    chart = go.Figure(
        go.Heatmap(
            x=[f"{place[0]}<br>{share_of_pages(records, EVICTION, place)}" for place in columns], y=names, z=points,
            colorscale=DIVERGING, zmin=-MOST_SHOWN, zmax=MOST_SHOWN, xgap=1, ygap=1, texttemplate="%{text}",
            text=[["" if value is None else f"{value:+z.1f}" for value in row] for row in points],
            colorbar={"title": {"text": "points over LRU", "side": "right"}, "thickness": 12},
        )
    )  # fmt: skip
    chart.update_yaxes(autorange="reversed", type="category")
    chart.update_xaxes(type="category", side="top")
    return chart.update_layout(template="plotly_white", width=1300, height=130 + 22 * len(names), margin={"l": 220})


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION, "agents": WEKA},
    cells=lambda: BOARDS, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
