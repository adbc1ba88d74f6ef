"""Does tail-optimised LRU shorten the tail as its paper prints (arXiv:2510.15152)?

Zhang, Li, Moallemi and Peng evict first what a conversation can lose and still answer its next prompt within a TTFT threshold. On
WildChat they print a P90 up to 27.5% and a P95 up to 23.9% shorter than LRU's, and up to 38.9% fewer requests over 200 ms than
with threshold LRU, with caches of 1,000 to 10,000 tokens of Vicuna-7B on an A100; on ShareGPT up to 10.0% and 6.9%.

Neither data set is at hand (--wildchat and --sharegpt take their files). Conversations are drawn from the paper's stochastic
model instead: 1,500 turns, as in the paper 1,000 to 2,000, and eight samples. What the paper states is taken from it: 3.5 turns
and prompts of 100 tokens in ShareGPT, one new conversation and three turns of each per unit of time; prompts of 200 tokens in
WildChat, 2.5 turns from its own paper. The rest is fitted to what the paper prints: lengths of answers, spreads, and .1 ms per
computed token, to which the TTFT is proportional, to LRU's median, P90, P95 and P99 with 1,000 tokens. WildChat's pauses were
chosen among a few distributions with the paper's tables of T-LRU in view, since those percentiles hardly depend on them: so the
comparison for WildChat is one of shape, not an independent reproduction. The file itself (--wildchat) would make it one. The
thresholds of the claims were set after first runs.

1. the paper's algorithm (conversation_cache.py), where a turn in service takes no room;
2. kvsim's eviction=tail_latency, whose requests do: ten times as many conversations and as large caches;
3. kvsim's on the Mooncake conversation trace, where 11 to 16% of the requests take over 2 s.

Claims:

1. LRU with 1,000 tokens has the printed percentiles within 20%, on both data sets;
2. half of T-LRU's printed changes of P90 and P95 differ by at most 3 points from ours for WildChat, 1 point for ShareGPT;
3. for WildChat with 10,000 tokens the best threshold shortens the P90 and the P95 by at least 10%, and makes at least 20% fewer
   requests take over 200 ms;
4. a threshold far above the tail harms: for WildChat 500 ms lengthens the P90 and the P95 at every capacity;
5. what exceeds the threshold, summed, is never more than under LRU by over 1%, at any capacity and threshold;
6. kvsim's policy and the paper's algorithm agree: P90 and P95 within 2%, requests over 200 ms within 2%;
7. on Mooncake's conversations, with 2,048,000 tokens, some threshold shortens both the P90 and the P95 by at least 5%.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from statistics import fmean, median

import plotly.graph_objects as go
from drawn_conversations import draw, read
from plotly.subplots import make_subplots
from published_tails import (
    CAPACITIES,
    FEWER_VIOLATIONS,
    FEWER_VIOLATIONS_OF_THRESHOLD_LRU,
    GAP_CLOSED,
    LRU_MS,
    PERCENTILES,
    SHAREGPT,
    SHORTER_P90,
    SHORTER_P95,
    SLO_MS,
    THRESHOLDS_MS,
    WILDCHAT,
)
from tail_runs import (
    CHAT_MS,
    CHAT_PAGE_TOKENS,
    CHAT_PAGES,
    CHAT_SLO_MS,
    CHATS,
    KINDS,
    LRU,
    MS_PER_TOKEN,
    TENFOLD,
    TENFOLD_CAPACITIES,
    TENFOLD_MS,
    THRESHOLD_LRU,
    Row,
    Tail,
    by_kvsim,
    load,
    of_mooncake,
    of_paper,
    of_ten_times,
    optimum,
    t_lru,
)

from kvsim.report.study import CONVERSATION, Claim, Study, bold, highest, lowest, opening, section

SAMPLES = 8


@dataclass(frozen=True)
class Cell:
    """One sample of conversations, or one trace."""

    part: str
    sample: int = 0


Rows = dict[Cell, Row]


def cells() -> list[Cell]:
    return [*(Cell(part, sample) for part in KINDS for sample in range(SAMPLES)), Cell(TENFOLD), Cell(CHATS)]


def run(options: Namespace, cell: Cell) -> Row:
    """Play a cell; a file is one sample."""
    if cell.part == CHATS:
        return of_mooncake(load(options.conversation, None if options.limit == STUDY.limit else options.limit))
    if cell.part == TENFOLD:
        return of_ten_times(draw(KINDS[WILDCHAT], SAMPLES, 10 * options.limit, rate=10.0))
    path = {WILDCHAT: options.wildchat, SHAREGPT: options.sharegpt}[cell.part]
    if path and cell.sample:
        return {}
    turns = read(path, 0, options.limit) if path else draw(KINDS[cell.part], cell.sample, options.limit)
    return of_paper(turns, cell.part)


def mean(rows: Rows, part: str, capacity: int, name: str, measure: str) -> float:
    """The mean of a measure over all samples."""
    return fmean(of_samples(rows, part, capacity, name, measure))


def of_samples(rows: Rows, part: str, capacity: int, name: str, measure: str) -> list[float]:
    return [getattr(row[capacity, name], measure) for cell, row in rows.items() if cell.part == part and row]


def less(rows: Rows, part: str, capacity: int, name: str, measure: str, than: str = LRU) -> float:
    """By how many per cent a policy's measure is below another one's; 0 if both are 0."""
    mine, other = (mean(rows, part, capacity, which, measure) for which in (name, than))
    return 100 * (1 - mine / other) if other else 0.0


PRINTED = {"p90": SHORTER_P90, "p95": SHORTER_P95, "violations": FEWER_VIOLATIONS}
Place = tuple[int, int]
"""Threshold in ms and capacity."""


def printed_and_ours(rows: Rows, part: str, measure: str) -> dict[Place, tuple[float, float]]:
    return {
        (ms, capacity): (printed, less(rows, part, capacity, t_lru(ms), measure))
        for ms, column in PRINTED[measure][part].items()
        for capacity, printed in zip(CAPACITIES, column, strict=True)
    }


def claims(rows: Rows) -> list[Claim]:
    return [
        levels_claim(rows),
        table_claim(rows),
        best_claim(rows),
        far_claim(rows),
        excess_claim(rows),
        same_claim(rows),
        chat_claim(rows),
    ]


def levels(rows: Rows) -> dict[str, float]:
    """LRU's percentiles with 1,000 tokens, over the printed ones."""
    return {
        f"{part}, P{percentile}": mean(rows, part, CAPACITIES[0], LRU, f"p{percentile}") / printed
        for part in KINDS
        for percentile, printed in zip(PERCENTILES, LRU_MS[part], strict=True)
    }


def levels_claim(rows: Rows) -> Claim:
    (low_at, low), (high_at, high) = lowest(levels(rows)), highest(levels(rows))
    measured = f"{low:.2f} ({low_at}) to {high:.2f} times ({high_at})"
    return Claim("LRU with 1,000 tokens has the printed percentiles within 20%", measured, low >= 0.8 and high <= 1.2)


def differences(rows: Rows, part: str) -> list[float]:
    """Points between the printed changes of P90 and P95 and ours."""
    both = [pair for measure in ("p90", "p95") for pair in printed_and_ours(rows, part, measure).values()]
    return [abs(ours - printed) for printed, ours in both]


def table_claim(rows: Rows) -> Claim:
    wild, share = (differences(rows, part) for part in (WILDCHAT, SHAREGPT))
    return Claim(
        "half of the printed changes of P90 and P95 are within 3 points of ours for WildChat, 1 point for ShareGPT",
        f"median {median(wild):.1f} and {median(share):.1f} points; at most {max(wild):.1f} and {max(share):.1f}",
        median(wild) <= 3 and median(share) <= 1,
    )


def best(rows: Rows, measure: str, capacity: int = CAPACITIES[-1]) -> tuple[int, float]:
    """The threshold that improves a measure of WildChat most, and by how many per cent."""
    return highest({ms: less(rows, WILDCHAT, capacity, t_lru(ms), measure) for ms in THRESHOLDS_MS[WILDCHAT]})


def best_claim(rows: Rows) -> Claim:
    found = {measure: best(rows, measure) for measure in PRINTED}
    least = {"p90": 10, "p95": 10, "violations": 20}
    return Claim(
        "WildChat, 10,000 tokens: P90 and P95 at least 10% shorter, at least 20% fewer over 200 ms, each with its best threshold",
        ", ".join(f"{name} {change:.1f}% ({ms} ms)" for name, (ms, change) in found.items()),
        all(found[measure][1] >= least[measure] for measure in PRINTED),
    )


def far_claim(rows: Rows) -> Claim:
    far = THRESHOLDS_MS[WILDCHAT][-1]
    changes = {
        f"{measure}, {capacity:,} tokens": less(rows, WILDCHAT, capacity, t_lru(far), measure)
        for measure in ("p90", "p95")
        for capacity in CAPACITIES
    }
    place, change = highest(changes)
    return Claim(f"WildChat: {far} ms lengthens P90 and P95 at every capacity", f"at least {-change:.1f}% ({place})", change < 0)


def excess_claim(rows: Rows) -> Claim:
    over = {
        f"{part}, {capacity:,} tokens, {ms} ms": -less(rows, part, capacity, t_lru(ms), "excess", f"{LRU} {ms} ms")
        for part in KINDS
        for capacity in CAPACITIES
        for ms in THRESHOLDS_MS[part]
    }
    place, most = highest(over)
    return Claim("what exceeds the threshold is at most 1% more than under LRU", f"at most {most:+.1f}% ({place})", most <= 1)


def same_claim(rows: Rows) -> Claim:
    apart = {
        f"{measure}, {capacity:,} tokens, {name}": abs(less(rows, TENFOLD, capacity, by_kvsim(name), measure, name))
        for measure in ("p90", "p95", "violations")
        for capacity in TENFOLD_CAPACITIES
        for name in (LRU, *map(t_lru, TENFOLD_MS))
    }
    place, most = highest(apart)
    return Claim("kvsim's policy and the paper's algorithm agree within 2%", f"at most {most:.1f}% ({place})", most <= 2)


def chat_claim(rows: Rows) -> Claim:
    tokens = 4_000 * CHAT_PAGE_TOKENS
    both = {ms: min(less(rows, CHATS, tokens, t_lru(ms), measure) for measure in ("p90", "p95")) for ms in CHAT_MS}
    ms, least = highest(both)
    return Claim(
        f"Mooncake, {tokens:,} tokens: some threshold shortens P90 and P95 by at least 5%",
        f"{ms} ms: at least {least:.1f}%",
        least >= 5,
    )


def closed(rows: Rows, part: str) -> list[float]:
    """How much of the distance between LRU's excess and that of the optimum T-LRU closes, in per cent."""
    found = []
    for capacity in CAPACITIES:
        for ms in THRESHOLDS_MS[part]:
            lru, ours, least = (mean(rows, part, capacity, name, "excess") for name in (f"{LRU} {ms} ms", t_lru(ms), optimum(ms)))
            if lru > least:
                found.append(100 * (lru - ours) / (lru - least))
    return found


def finding(rows: Rows) -> str:
    ms, _ = best(rows, "p90")
    mine, lru = (of_samples(rows, WILDCHAT, CAPACITIES[-1], name, "p90") for name in (t_lru(ms), LRU))
    single = [100 * (1 - this / that) for this, that in zip(mine, lru, strict=True)]
    against = {
        limit: max(less(rows, WILDCHAT, capacity, t_lru(limit), "violations", THRESHOLD_LRU) for capacity in CAPACITIES)
        for limit in (150, SLO_MS)
    }
    shares = [share for part in KINDS for share in closed(rows, part)]
    return (
        "The tables have the paper's shape throughout: gains grow with the capacity, are largest where the threshold is at the "
        "percentile in question, and turn into losses above it; ShareGPT's are small because its conversations are many times "
        "as long as the cache. Up to 4,000 tokens WildChat's agree within a few points. With 8,000 and 10,000 the paper's are "
        f"up to {max(differences(rows, WILDCHAT)):.0f} points larger: there real pauses count, of which its percentiles with "
        "1,000 tokens say little. The paper plays one sample; of our eight, the change of P90 that is largest on average ranges "
        f"from {min(single):.0f} to {max(single):.0f}%. Against threshold LRU, requests over 200 ms are up to "
        f"{against[SLO_MS]:.1f}% fewer with a threshold of 200 ms (printed: {FEWER_VIOLATIONS_OF_THRESHOLD_LRU[SLO_MS]}%), with "
        f"150 ms {against[150]:.1f}% (printed: {FEWER_VIOLATIONS_OF_THRESHOLD_LRU[150]}%): a threshold equal to the "
        "SLO leaves no room for prompts longer than the estimate. T-LRU closes "
        f"{min(shares):.0f} to {max(shares):.0f}% of the distance to the optimum with foresight, in what exceeds the threshold "
        f"(printed: {GAP_CLOSED[0]} to {GAP_CLOSED[1]}%, without saying of what). The paper gives ShareGPT's next prompt as 150 "
        "tokens in section 5.2 and as 100 in G.2; here it is 100."
    )


def page(options: Namespace, rows: Rows) -> Iterator[str]:
    drawn = [part for part, path in ((WILDCHAT, options.wildchat), (SHAREGPT, options.sharegpt)) if not path]
    text = [
        f"{options.limit:,} turns a sample; drawn: {' and '.join(drawn) or 'none'}, {SAMPLES} samples each. TTFT in ms,",
        f"{MS_PER_TOKEN:g} ms per computed token. Made by `python experiments/tail_latency/run.py`; all numbers are in",
        "[results.csv](results.csv).",
    ]
    picture = "What T-LRU changes against LRU by capacity and threshold, as printed and here"
    yield from opening("Tail-optimised LRU: its tail, printed and here", text, picture, claims(rows), finding(rows))
    yield from levels_table(rows)
    titles = {"p90": "P90 shorter than LRU's", "p95": "P95 shorter than LRU's", "violations": f"Fewer requests over {SLO_MS} ms"}
    for part in KINDS:
        for measure, title in titles.items():
            yield from changes_table(rows, part, measure, title)
    yield from same_table(rows)
    yield from chat_table(rows)


def levels_table(rows: Rows) -> Iterator[str]:
    lines = []
    for part in KINDS:
        for percentile, printed in zip(PERCENTILES, LRU_MS[part], strict=True):
            single = of_samples(rows, part, CAPACITIES[0], LRU, f"p{percentile}")
            lines.append(
                (f"{part}, P{percentile}", f"{printed}", f"{fmean(single):.0f}", f"{min(single):.0f} to {max(single):.0f}")
            )
    yield from section(
        "LRU with 1,000 tokens (ms)",
        ("", "printed", "here", "samples"),
        lines,
        "Answers, spreads and the time of a token are fitted to these.",
    )


def changes_table(rows: Rows, part: str, measure: str, title: str) -> Iterator[str]:
    cells_of = printed_and_ours(rows, part, measure)
    thresholds = list(PRINTED[measure][part])
    lines = [
        (f"{capacity:,}", *("{:.1f} / {:.1f}".format(*cells_of[ms, capacity]) for ms in thresholds)) for capacity in CAPACITIES
    ]
    head = ("tokens", *(f"{ms} ms" for ms in thresholds))
    yield from section(f"{part}: {title} (%), printed / here", head, lines)


def same_table(rows: Rows) -> Iterator[str]:
    row, measures = rows[Cell(TENFOLD)], ("p50", "p90", "p95")
    lines = []
    for capacity in TENFOLD_CAPACITIES:
        for name in (LRU, *map(t_lru, TENFOLD_MS)):
            both = row[capacity, name], row[capacity, by_kvsim(name)]
            times = [f"{getattr(found, measure):.0f}" for measure in measures for found in both]
            lines.append((f"{capacity:,}, {name}", *times, *(f"{found.violations:.2%}" for found in both)))
    head = ("tokens, policy", *(f"{name}, {whose}" for name in (*measures, "over") for whose in ("paper", "kvsim")))
    text = "The paper's algorithm and `eviction=tail_latency`, ten times as many conversations (ms, and requests over 200 ms)."
    yield from section("The same policy in kvsim", head, lines, text)


def chat_table(rows: Rows) -> Iterator[str]:
    row = rows[Cell(CHATS)]
    names = (LRU, *map(t_lru, CHAT_MS))
    for title, measure, form in (
        ("P90 (ms)", "p90", ".0f"), ("P95 (ms)", "p95", ".0f"), (f"share over {CHAT_SLO_MS:,} ms", "violations", ".4f"),
    ):  # fmt: skip
        lines = []
        for pages in CHAT_PAGES:
            values = [getattr(row[pages * CHAT_PAGE_TOKENS, name], measure) for name in names]
            lines.append((f"{pages * CHAT_PAGE_TOKENS:,}", *bold(values, min(values), form)))
        yield from section(f"Mooncake's conversations: {title}", ("tokens", *names), lines)


def table(rows: Rows) -> Iterator[tuple[object, ...]]:
    yield ("part", "sample", "capacity_tokens", "policy", *(field.name for field in fields(Tail)))
    for cell, row in rows.items():
        for (capacity, name), found in row.items():
            yield (cell.part, cell.sample, capacity, name, *(f"{value:.5g}" for value in astuple(found)))


COLOURS = {50: "#0a9e74", 100: "#3d8fd1", 150: "#e69f00", 200: "#d55e00", 300: "#cc79a7", 500: "#222222"}
"""By threshold in ms."""


def figure(rows: Rows) -> go.Figure:
    titles = {"p90": "P90 shorter (%)", "p95": "P95 shorter (%)", "violations": f"fewer over {SLO_MS} ms (%)"}
    names = [f"{part}: {title}" for part in KINDS for title in titles.values()]
    chart = make_subplots(rows=2, cols=3, subplot_titles=names, vertical_spacing=0.14, horizontal_spacing=0.06)
    shown: set[int] = set()
    for at, part in enumerate(KINDS, 1):
        for column, measure in enumerate(titles, 1):
            cells_of = printed_and_ours(rows, part, measure)
            for ms in PRINTED[measure][part]:
                for which, dash in enumerate(("dot", "solid")):
                    chart.add_scatter(
                        x=CAPACITIES, y=[cells_of[ms, capacity][which] for capacity in CAPACITIES], mode="lines+markers",
                        name=f"{ms} ms", legendgroup=ms, line={"color": COLOURS[ms], "dash": dash},
                        showlegend=dash == "solid" and ms not in shown, row=at, col=column,
                    )  # fmt: skip
                shown.add(ms)
    chart.update_xaxes(title="tokens cached")
    title = "What T-LRU changes against LRU, by threshold: solid here, dotted as printed"
    return chart.update_layout(template="plotly_white", width=1500, height=850, title=title)


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION}, limit=1_500,
    files={
        "wildchat": "conversations of WildChat as JSON Lines (allenai/WildChat-1M, each row with its conversation)",
        "sharegpt": "conversations of ShareGPT as JSON (RyokoAI/ShareGPT52K)",
    },
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
