"""Is any eviction policy too slow to try, compared with LRU? And does Belady bound them all?

Claims, for every choice in conf/eviction with its defaults, and for some with other settings:

one tier     no bundled eviction policy is more than 3x slower than LRU in a compiled replay with 10,000 pages (belady and a
             flop_aware that tunes itself: 8x); pure Python is held to the same limits. Mooncake conversation, 512 tokens per
             page; policies that need sessions, kinds or priorities, which it lacks, run on the synthetic trace. Measured is the
             process time of the whole replay without reading the trace: the lowest of several runs, policy and LRU in turn
three tiers  WEKA, all sessions, 64-token pages, 20,000 + 60,000 + 300,000 pages, write_back and write_through: every policy but
             belady reads and replays the trace in less than 20 s of process time and 1 GB
belady       hits at least as many pages as any policy, within .001, at five capacities on conversation and three on WEKA

The first line of output says whether kvsim is compiled; results in pure Python go to files ending in _pure. Exits with 1 if a
claim fails. ``--limit`` plays fewer requests as a quick check; the claims are about whole traces.
"""

import multiprocessing
import platform
import resource
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import kvsim.conf
from kvsim.api import load_trace
from kvsim.core.request import Request, RetentionRange
from kvsim.errors import UsageError
from kvsim.installation import build_name
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.base import BypassEviction
from kvsim.report.study import CONVERSATION, WEKA, option_parser, section, verdict
from kvsim.run import play
from kvsim.settings.configuration import compose
from kvsim.trace.base import Trace

POLICIES = tuple((path.stem,) for path in sorted((Path(kvsim.conf.__file__).parent / "eviction").glob("*.yaml")))
SETTINGS = (
    ("flop_aware", "eviction.alpha=1"),
    ("slru", "eviction.segments=sized"),
    ("ttl", "eviction.ttl_s=learned"),
    ("tail_latency", "eviction.threshold=4000"),
)
LRU = ("lru",)
ONE_TIER = ("tiers.cpu.capacity=0", "tiers.disk.capacity=0", "replay.in_flight=1", "replay.hold_output=false")
THREE_TIERS = (
    "tiers.gpu.capacity=20000pages", "tiers.cpu.capacity=60000pages", "tiers.disk.capacity=300000pages",
    "replay.in_flight=1", "replay.hold_output=false",
)  # fmt: skip
PLACEMENTS = ("write_back", "write_through")
LIMIT = 3.0
"""Largest ratio of a policy's time to LRU's."""
OTHER_LIMITS: dict[tuple[str, ...], float] = {("belady",): 8.0, ("flop_aware",): 8.0}
"""Limits of choices that do more work: belady looks ahead, and flop_aware without a given alpha tunes itself."""
LIMIT_S, LIMIT_BYTES = 20.0, 1e9
SLACK = 0.001
CONVERSATION_PAGES = (1_000, 5_000, 10_000, 30_000, 50_000)
WEKA_PAGES = (20_000, 80_000, 300_000)
REPEATS = 5
PRIORITIES = 3
KEPT_TOKENS, KEPT_S = 256, 60.0
"""The tokens of a prompt that its request asks to keep, and for how long."""


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    cells: tuple[str, ...]
    holds: bool


@dataclass(frozen=True)
class Table:
    """The measurements for one claim."""

    title: str
    head: tuple[str, ...]
    rows: list[Row]


def plan_of(trace: Trace, choice: Sequence[str], *overrides: str) -> Plan:
    """The plan of a replay with a policy and its settings."""
    name, *settings = choice
    origin = (*trace.origin, f"page_tokens={trace.page_tokens}", f"eviction={name}", *settings, *overrides)
    return build_run(compose(list(origin)), command="replay", overrides=overrides)


def accepts(trace: Trace, choice: Sequence[str]) -> bool:
    """Whether the trace has what the policy needs."""
    try:
        play.build_tiers(plan_of(trace, choice, "tiers.gpu.capacity=1000pages", *ONE_TIER), trace.requests)
    except UsageError:
        return False
    return True


def with_priorities(trace: Trace) -> Trace:
    """The same trace, with one of a few priorities for the requests of each session, which also say it of their first tokens."""

    def changed(request: Request) -> Request:
        priority = request.session % PRIORITIES
        return replace(request, priority=priority, retention=(RetentionRange(0, KEPT_TOKENS, 50 + priority, KEPT_S),))

    trace.requests[:] = [changed(request) for request in trace.requests]
    return trace


def replay_s(trace: Trace, choice: Sequence[str], *overrides: str) -> float:
    plan = plan_of(trace, choice, *overrides)
    began = process_time()
    play.replay(plan, trace.requests)
    return process_time() - began


def ratios(conversation: Trace, synthetic: Trace) -> Iterator[Row]:
    """Each policy's time divided by LRU's."""
    settings = ("tiers.gpu.capacity=10000pages", *ONE_TIER)
    for choice in (*POLICIES, *SETTINGS):
        trace = conversation if accepts(conversation, choice) else synthetic
        limit = OTHER_LIMITS.get(choice, LIMIT)
        pairs = [(replay_s(trace, LRU, *settings), replay_s(trace, choice, *settings)) for _ in range(REPEATS)]
        ours, lru = min(own for _, own in pairs), min(lru for lru, _ in pairs)
        us, lru_us = (s / len(trace.requests) * 1e6 for s in (ours, lru))
        where = "conversation" if trace is conversation else "synthetic"
        cells = (" ".join(choice), where, f"{us:.1f}", f"{lru_us:.1f}", f"{ours / lru:.2f}x", f"<= {limit:g}x")
        yield Row(cells, ours <= limit * lru)


def measure_tiers(trace: Trace, choice: Sequence[str], placement: str, answer: Any) -> None:
    """Replay in a child process, which shares the trace, and put its process time and peak memory into ``answer``."""
    seconds = replay_s(trace, choice, *THREE_TIERS, f"placement={placement}")
    answer.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def three_tiers(weka: Trace, read_s: float) -> Iterator[Row]:
    """Every policy on three tiers; times include reading the trace."""
    fork = multiprocessing.get_context("fork")
    for choice in (*POLICIES, *SETTINGS):
        if isinstance(plan_of(weka, choice, "tiers.gpu.capacity=1000pages", *ONE_TIER).tiers[0].eviction, BypassEviction):
            continue
        for placement in PLACEMENTS:
            answer = fork.SimpleQueue()
            process = fork.Process(target=measure_tiers, args=(weka, choice, placement, answer))
            process.start()
            process.join()
            if process.exitcode:
                yield Row((" ".join(choice), placement, "-", "-"), holds=False)
                continue
            seconds, peak_bytes = answer.get()
            cells = (" ".join(choice), placement, f"{read_s + seconds:.1f}", f"{peak_bytes / 1e6:.0f}")
            yield Row(cells, read_s + seconds < LIMIT_S and peak_bytes < LIMIT_BYTES)


def bounds(trace: Trace, name: str, capacities: Sequence[int]) -> Iterator[Row]:
    """Belady's page hit rate and the best one of all other policies, by capacity."""
    pages = sum(request.prompt_pages for request in trace.requests)
    choices = [choice for choice in POLICIES if accepts(trace, choice)]
    for capacity in capacities:
        settings = (f"tiers.gpu.capacity={capacity}pages", *ONE_TIER)
        hits: dict[str, int] = {}
        bound = 0
        for choice in choices:
            plan = plan_of(trace, choice, *settings)
            hit_pages = int(play.replay(plan, trace.requests).hit_pages.sum())
            if isinstance(plan.tiers[0].eviction, BypassEviction):
                bound = max(bound, hit_pages)
            else:
                hits[choice[0]] = hit_pages
        best = max(hits, key=hits.__getitem__)
        rates = (bound / pages, hits[best] / pages, hits["lru"] / pages)
        cells = (name, f"{capacity:,}", *(f"{rate:.4f}" for rate in rates), best, str(len(hits)))
        yield Row(cells, rates[1] <= rates[0] + SLACK)


def collect(title: str, head: tuple[str, ...], rows: Iterator[Row]) -> Table:
    """Print rows as they arrive and return their table."""
    print(f"\n{title}\n  {' | '.join(head)}", flush=True)
    kept = []
    for row in rows:
        print(f"  {' | '.join(row.cells)}{'' if row.holds else '   FAILS'}", flush=True)
        kept.append(row)
    return Table(title, head, kept)


def write(folder: Path, name: str, tables: Sequence[Table], limit: dict[str, int]) -> None:
    """Write the tables of one claim, with the command that made them."""
    limited = "".join(f" --{option} {value}" for option, value in limit.items())
    lines = [
        f"# The price of a policy: {name}",
        "",
        f"Measured on {platform.system()} {platform.machine()}, Python {platform.python_version()}, kvsim {build_name()},",
        f"by `python experiments/policy_speed/run.py --only {name}{limited}`. Times are process time, so other programs do not",
        f"count; ratios compare the lowest of {REPEATS} runs.",
    ]
    for table in tables:
        rows = [(*row.cells, verdict(row.holds)) for row in table.rows]
        lines += section(table.title, (*table.head, ""), rows)
    suffix = "" if build_name() == "compiled" else "_pure"
    (folder / f"results_{name}{suffix}.md").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Traces:
    """Paths of the traces, and how many requests to read from each."""

    conversation_path: str
    weka_path: str
    limit: dict[str, int]

    def conversation(self) -> Trace:
        return load_trace("mooncake", page_tokens=512, path=self.conversation_path, tail="all", **self.limit)

    def weka(self) -> Trace:
        return load_trace("weka", page_tokens=64, path=self.weka_path, **self.limit)


def one_tier_tables(traces: Traces) -> Iterator[Table]:
    conversation = traces.conversation()
    synthetic = with_priorities(load_trace("synthetic", page_tokens=16, **traces.limit))
    head = ("policy", "trace", "us per request", "LRU's", "ratio", "claim")
    yield collect("One tier of 10,000 pages", head, ratios(conversation, synthetic))


def three_tiers_tables(traces: Traces) -> Iterator[Table]:
    began = process_time()
    weka = traces.weka()
    read_s = process_time() - began
    with_priorities(weka)
    title = f"Three tiers, WEKA, {len(weka.requests):,} requests; reading, {read_s:.1f} s, included"
    yield collect(title, ("policy", "placement", "s", "peak MB"), three_tiers(weka, read_s))


def belady_tables(traces: Traces) -> Iterator[Table]:
    head = ("trace", "pages", "belady", "best other", "lru", "which", "policies")
    yield collect("Page hit rates, conversation", head, bounds(traces.conversation(), "conversation", CONVERSATION_PAGES))
    yield collect("Page hit rates, WEKA", head, bounds(with_priorities(traces.weka()), "weka", WEKA_PAGES))


TABLES = {"one_tier": one_tier_tables, "three_tiers": three_tiers_tables, "belady": belady_tables}


def read_options() -> Namespace:
    parser = option_parser(__file__, __doc__, {"conversation": CONVERSATION, "weka": WEKA})
    parser.add_argument("--limit", type=int, help="requests to play from each trace; the claims are about all of them")
    parser.add_argument("--only", choices=TABLES, help="measure for one claim only")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    print(f"kvsim is {build_name()}.")
    limit = {} if options.limit is None else {"limit": options.limit}
    traces = Traces(options.conversation, options.weka, limit)
    failed = []
    for name in [options.only] if options.only else TABLES:
        tables = list(TABLES[name](traces))
        write(options.output, name, tables, limit)
        failed += [" ".join(row.cells[:2]) for table in tables for row in table.rows if not row.holds]
    print(f"\nFailed: {'; '.join(failed)}" if failed else "\nEvery claim holds.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
