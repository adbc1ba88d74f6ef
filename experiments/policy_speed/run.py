"""Does any eviction policy cost so much more than LRU that one would not try it? And does Belady bound them all?

Claims, for every choice in conf/eviction by its defaults, and for a few of their settings:

one tier     no bundled eviction policy is slower than LRU by more than 3x in compiled replay at 10,000 pages (belady and tuned
             flop_aware: 8x); kvsim in pure Python is held to the same. On Mooncake conversation, 512 tokens a page; policies that
             need sessions, kinds or priorities, which conversation lacks, are compared with LRU on the synthetic trace. Process
             time of the whole replay, without reading the trace: the least of several runs, policy and LRU in turn in one process
three tiers  WEKA, all sessions, 64-token pages, 20,000 + 60,000 + 300,000 pages, write_back and write_through: any policy but
             belady reads and replays it in less than 20 s of process time and 1 GB
belady       hits at least as many pages as any policy, within .001, at five capacities on conversation and three on WEKA

The first line says whether kvsim is compiled; results in pure Python go to files whose names end in _pure. Exits with 1 if a
claim fails. With --limit only the first requests of each trace are played, to see that it works; the claims are about whole
traces.
"""

import argparse
import multiprocessing
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import kvsim.conf
from kvsim import run
from kvsim.api import load_trace
from kvsim.build import build_run
from kvsim.compiled import build_name
from kvsim.configuration import compose
from kvsim.errors import UsageError
from kvsim.plan import Plan
from kvsim.policies.eviction.base import BypassEviction
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
TRACES = HERE.parents[2] / "shared" / "traces"

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
"""How many times as long as LRU a policy may take."""
OTHER_LIMITS: dict[tuple[str, ...], float] = {("belady",): 8.0, ("flop_aware",): 8.0}
"""That of choices which do more: one looks ahead, and the other tunes itself unless its alpha is given."""
LIMIT_S, LIMIT_BYTES = 20.0, 1e9
SLACK = 0.001
CONVERSATION_PAGES = (1_000, 5_000, 10_000, 30_000, 50_000)
WEKA_PAGES = (20_000, 80_000, 300_000)
REPEATS = 5
PRIORITIES = 3


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    cells: tuple[str, ...]
    holds: bool


@dataclass(frozen=True)
class Table:
    """What was measured for one claim."""

    title: str
    head: tuple[str, ...]
    rows: list[Row]


def plan_of(trace: Trace, choice: Sequence[str], *overrides: str) -> Plan:
    """The plan of a replay under a policy and its settings."""
    name, *settings = choice
    origin = (*trace.origin, f"page_tokens={trace.page_tokens}", f"eviction={name}", *settings, *overrides)
    return build_run(compose(list(origin)), command="replay", overrides=overrides)


def accepts(trace: Trace, choice: Sequence[str]) -> bool:
    """Whether the trace says what the policy needs to know."""
    try:
        run.build_tiers(plan_of(trace, choice, "tiers.gpu.capacity=1000pages", *ONE_TIER), trace.requests)
    except UsageError:
        return False
    return True


def with_priorities(trace: Trace) -> Trace:
    """The same requests; those of a session have one of a few priorities."""
    trace.requests[:] = [replace(request, priority=request.session % PRIORITIES) for request in trace.requests]
    return trace


def replay_s(trace: Trace, choice: Sequence[str], *overrides: str) -> float:
    plan = plan_of(trace, choice, *overrides)
    began = process_time()
    run.replay(plan, trace.requests)
    return process_time() - began


def ratios(conversation: Trace, synthetic: Trace) -> Iterator[Row]:
    """Each policy's time over LRU's."""
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
    """Replay in a process of its own, which has the trace in its memory; say its process time and its peak memory."""
    seconds = replay_s(trace, choice, *THREE_TIERS, f"placement={placement}")
    answer.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def three_tiers(weka: Trace, read_s: float) -> Iterator[Row]:
    """Every policy on three tiers, and reading the trace."""
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
    """Belady's page hit rate and the best one of all others, by capacity."""
    pages = sum(request.prompt_pages for request in trace.requests)
    choices = [choice for choice in POLICIES if accepts(trace, choice)]
    for capacity in capacities:
        settings = (f"tiers.gpu.capacity={capacity}pages", *ONE_TIER)
        hits: dict[str, int] = {}
        bound = 0
        for choice in choices:
            plan = plan_of(trace, choice, *settings)
            hit_pages = int(run.replay(plan, trace.requests).hit_pages.sum())
            if isinstance(plan.tiers[0].eviction, BypassEviction):
                bound = max(bound, hit_pages)
            else:
                hits[choice[0]] = hit_pages
        best = max(hits, key=hits.__getitem__)
        rates = (bound / pages, hits[best] / pages, hits["lru"] / pages)
        cells = (name, f"{capacity:,}", *(f"{rate:.4f}" for rate in rates), best, str(len(hits)))
        yield Row(cells, rates[1] <= rates[0] + SLACK)


def collect(title: str, head: tuple[str, ...], rows: Iterator[Row]) -> Table:
    """Print rows as they come, and keep them."""
    print(f"\n{title}\n  {' | '.join(head)}", flush=True)
    kept = []
    for row in rows:
        print(f"  {' | '.join(row.cells)}{'' if row.holds else '   FAILS'}", flush=True)
        kept.append(row)
    return Table(title, head, kept)


def write(folder: Path, name: str, tables: Sequence[Table], limit: dict[str, int]) -> None:
    """Write what one claim's tables say, and how to get them, to a file of its own."""
    limited = "".join(f" --{option} {value}" for option, value in limit.items())
    lines = [
        f"# The price of a policy: {name}",
        "",
        f"Measured on {platform.system()} {platform.machine()}, Python {platform.python_version()}, kvsim {build_name()},",
        f"by `python experiments/policy_speed/run.py --only {name}{limited}`.",
        f"Times are process time, so that other programs do not count; ratios are of the least of {REPEATS} runs.",
    ]
    for table in tables:
        lines += ["", f"## {table.title}", "", f"| {' | '.join(table.head)} | |", "|" + "---|" * (len(table.head) + 1)]
        lines += [f"| {' | '.join(row.cells)} | {'holds' if row.holds else 'FAILS'} |" for row in table.rows]
    suffix = "" if build_name() == "compiled" else "_pure"
    (folder / f"results_{name}{suffix}.md").write_text("\n".join(lines) + "\n")


def one_tier_tables(traces: "Traces") -> Iterator[Table]:
    conversation = traces.conversation()
    synthetic = with_priorities(load_trace("synthetic", page_tokens=16, **traces.limit))
    head = ("policy", "trace", "us a request", "LRU's", "ratio", "claim")
    yield collect("One tier of 10,000 pages", head, ratios(conversation, synthetic))


def three_tiers_tables(traces: "Traces") -> Iterator[Table]:
    began = process_time()
    weka = traces.weka()
    read_s = process_time() - began
    with_priorities(weka)
    title = f"Three tiers, WEKA, {len(weka.requests):,} requests; reading, {read_s:.1f} s, included"
    yield collect(title, ("policy", "placement", "s", "peak MB"), three_tiers(weka, read_s))


def belady_tables(traces: "Traces") -> Iterator[Table]:
    head = ("trace", "pages", "belady", "best other", "lru", "which", "policies")
    yield collect("Page hit rates, conversation", head, bounds(traces.conversation(), "conversation", CONVERSATION_PAGES))
    yield collect("Page hit rates, WEKA", head, bounds(with_priorities(traces.weka()), "weka", WEKA_PAGES))


@dataclass(frozen=True)
class Traces:
    """Where the traces are, and how much of them to read."""

    conversation_path: Path
    weka_path: Path
    limit: dict[str, int]

    def conversation(self) -> Trace:
        return load_trace("mooncake", page_tokens=512, path=str(self.conversation_path.resolve()), tail="all", **self.limit)

    def weka(self) -> Trace:
        return load_trace("weka", page_tokens=64, path=str(self.weka_path.resolve()), **self.limit)


TABLES = {"one_tier": one_tier_tables, "three_tiers": three_tiers_tables, "belady": belady_tables}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--conversation", type=Path, default=TRACES / "mooncake_conversation_trace.jsonl.gz", help="Mooncake trace"
    )
    parser.add_argument("--weka", type=Path, default=TRACES / "weka_claude_code_traces_rle.jsonl.gz", help="WEKA trace")
    parser.add_argument("--limit", type=int, help="play so many requests of each trace only")
    parser.add_argument("--only", choices=TABLES, help="measure for one claim only")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the results")
    arguments = parser.parse_args()
    for path in (arguments.conversation, arguments.weka):
        if not path.exists():
            parser.error(f"no trace at {path}: name one with --conversation or --weka")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    print(f"kvsim is {build_name()}.")
    limit = {} if arguments.limit is None else {"limit": arguments.limit}
    traces = Traces(arguments.conversation, arguments.weka, limit)
    failed = []
    for name in [arguments.only] if arguments.only else TABLES:
        tables = list(TABLES[name](traces))
        write(arguments.output, name, tables, limit)
        failed += [" ".join(row.cells[:2]) for table in tables for row in table.rows if not row.holds]
    print(f"\nFailed: {'; '.join(failed)}" if failed else "\nEvery claim holds.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
