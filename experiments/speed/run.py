"""Is kvsim exact, as fast at any page size, and faster than the simulators people use today?

Claims, each a row of the table this prints, on the Mooncake conversation trace unless another is named:

exact hits   LRU page hit rates at six capacities to six digits, and hit tokens of the second half as integers
page sizes   one tier replays at least 100,000 requests a second at pages of 512, 64, 16 and 1 tokens, all within 1.3x
three tiers  with write-back, at least 40,000 requests a second at each of them
simulation   three tiers on a virtual clock: at least 5,000 requests a second in less than 600 MB
agents       WEKA, 710 sessions: read and replayed in less than 5 s and 500 MB; ten times the requests, at most 11x the time
peers        as they are shipped, slower than kvsim at 512-token pages and more than 5x slower at 16. What libcachesim does
             with a hash table fitted to the capacity stands beside it, with no claim: at 512 tokens it may be the faster
sweep        200 replays by two workers of joblib's: at most 1.3x half the sum of the replays' times, and 90 ms for each job of
             a worker; reading the trace, starting, composing, writing, bounds, table and page are in it

Every figure of kvsim is one that its command line reports, from a process of its own. Requests a second leave out the
reading of the trace and are the best of three runs, as is the sweep; memory is the worst of the three. Exits with 1 if a
claim fails or could not be measured.
"""

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure import REPEATS, Run, RunFailed, Sweep, run_kvsim, run_kvsim_repeatedly, run_process, run_sweep
from peers import PEERS, PeerTiming
from results import Row, draw_bars, print_rows, write_table
from rich.console import Console

HERE = Path(__file__).resolve().parent
TRACES = HERE.parents[2] / "shared" / "traces"

PAGE_SIZES = (512, 64, 16, 1)
PEER_PAGE_SIZES = (512, 16)
CAPACITY_TOKENS = 10_000 * 512

PAGE_HIT_RATES = {
    "1000pages": ".044530",
    "5859pages": ".136076",
    "10000pages": ".211598",
    "30000pages": ".325747",
    "50000pages": ".354558",
    "unlimited": ".366412",
}
"""Prefix-LRU hit rate by capacity, in pages of 512 tokens with the partial last one."""

SECOND_HALF_HIT_TOKENS = {
    "1000pages": 3_173_822,
    "5859pages": 9_286_131,
    "10000pages": 14_910_149,
    "30000pages": 23_347_784,
    "50000pages": 25_582_964,
}
"""Hit tokens of all but the first 6,015 requests, as kvcache-simulator counts them."""

FLAT_LRU_HITS = {512: 60_921}
"""Page hits of LRU that ignores prefixes (.211165 of 288,500), which is what libcachesim must count."""

SWEEP_CAPACITIES = tuple(range(1_000, 51_000, 1_000))
SWEEP_POLICIES = ("lru", "fifo", "lfu", "slru")
WORKERS = 2

PAGE_BY_PAGE = ("eviction=lru", "rules.recompute_last_token=false", "replay.in_flight=1", "replay.hold_output=false")
"""One request after another, prompt pages only: what the peers do."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The two traces measured."""

    conversation: Path
    agents: Path


def one_tier(gpu: str) -> tuple[str, ...]:
    return f"tiers.gpu.capacity={gpu}", "tiers.cpu.capacity=0", "tiers.disk.capacity=0"


def three_tiers() -> tuple[str, ...]:
    """6,000, 12,000 and 60,000 pages of 512 tokens, whatever the page size of the run."""
    blocks = {"gpu": 6_000, "cpu": 12_000, "disk": 60_000}
    return *(f"tiers.{tier}.capacity={count * 512}tokens" for tier, count in blocks.items()), "placement=write_back"


def conversation(traces: Traces, page_tokens: int) -> tuple[str, ...]:
    return "trace=mooncake", f"trace.path={traces.conversation}", "trace.tail=all", f"page_tokens={page_tokens}"


def agents(path: Path, capacity_pages: int) -> tuple[str, ...]:
    return "trace=weka", f"trace.path={path}", "page_tokens=64", "eviction=lru", *one_tier(f"{capacity_pages}pages")


def exact_hits(traces: Traces) -> Iterator[Row]:
    """LRU on one tier against rates and counts that do not come from kvsim."""
    for capacity, expected in PAGE_HIT_RATES.items():
        run = run_kvsim("replay", *conversation(traces, 512), *one_tier(capacity), *PAGE_BY_PAGE)
        rate = f"{run.result['page_hit_rate']:.6f}".lstrip("0")
        yield Row(what=f"page hit rate, {capacity}", measured=rate, claim=f"= {expected}", holds=rate == expected)
    for capacity, tokens in SECOND_HALF_HIT_TOKENS.items():
        found = second_half_hit_tokens(traces, 512, capacity)
        what = f"hit tokens with warmup=0.5, {capacity}"
        yield Row(what=what, measured=f"{found:,}", claim=f"= {tokens:,}", holds=found == tokens)


def second_half_hit_tokens(traces: Traces, page_tokens: int, capacity: str) -> int:
    settings = (*conversation(traces, page_tokens), *one_tier(capacity), *PAGE_BY_PAGE, "warmup=0.5")
    return run_kvsim("replay", *settings).hit_tokens


def page_sizes(traces: Traces) -> Iterator[Row]:
    """One tier of the same capacity in tokens at every page size: the same hits, as fast."""
    best: dict[int, Run] = {}
    for size in PAGE_SIZES:
        settings = (*conversation(traces, size), *one_tier(f"{CAPACITY_TOKENS}tokens"), *PAGE_BY_PAGE)
        best[size] = run_kvsim_repeatedly("replay", *settings)[0]
        yield at_least(f"one tier, {size}-token pages", best[size], 100_000, bar=("kvsim, one tier", size))
    speeds = [run.requests_per_s for run in best.values()]
    spread = max(speeds) / min(speeds)
    yield Row(what="fastest over slowest page size", measured=f"{spread:.2f}x", claim="<= 1.3x", holds=spread <= 1.3)
    yield same_hit_tokens(best)


def same_hit_tokens(best: dict[int, Run]) -> Row:
    """Page sizes may differ by the tokens that rounding a prompt up to whole pages of the largest size adds."""
    largest = best[max(best)].result
    rounding = largest["prompt_pages"] * max(best) / largest["prompt_tokens"] - 1
    tokens = [run.hit_tokens for run in best.values()]
    difference = max(tokens) / min(tokens) - 1
    return Row(
        what="largest over smallest number of hit tokens, less one",
        measured=f"{difference:.2%} ({min(tokens):,} to {max(tokens):,})",
        claim=f"<= {rounding:.2%}, the share that rounding to pages adds",
        holds=difference <= rounding,
    )


def tiers(traces: Traces) -> Iterator[Row]:
    """Three tiers with write-back at every page size."""
    for size in PAGE_SIZES:
        run = run_kvsim_repeatedly("replay", *conversation(traces, size), *three_tiers(), *PAGE_BY_PAGE)[0]
        yield at_least(f"three tiers, write-back, {size}-token pages", run, 40_000, bar=("kvsim, three tiers", size))


def simulation(traces: Traces) -> Iterator[Row]:
    """Three tiers with all transfers, chunked prefill and decode on a virtual clock."""
    for size in PEER_PAGE_SIZES:
        settings = (*conversation(traces, size), *three_tiers(), "eviction=lru", "prefetch=threshold")
        runs = run_kvsim_repeatedly("simulate", *settings)
        yield at_least(f"simulate, three tiers, {size}-token pages", runs[0], 5_000)
        yield less_memory(f"its peak memory, {size}-token pages", runs, 600)


def agent_sessions(traces: Traces) -> Iterator[Row]:
    """All WEKA sessions on one tier, then ten copies of each on a tier ten times as large, so that hits stay alike."""
    runs = run_kvsim_repeatedly("replay", *agents(traces.agents, 100_000))
    once = min(run.read_and_replay_s for run in runs)
    what = f"read and replay {runs[0].result['requests']:,} requests, one tier"
    yield Row(what=what, measured=f"{once:.2f} s", claim="< 5 s", holds=once < 5)
    yield less_memory("its peak memory", runs, 500)
    with tempfile.TemporaryDirectory() as folder:
        repeated = Path(folder) / "sessions.jsonl.gz"
        repeat_sessions(traces.agents, repeated, copies=10)
        many = run_kvsim_repeatedly("replay", *agents(repeated, 1_000_000))
    longer = min(run.read_and_replay_s for run in many)
    growth = longer / once
    what = f"the same for {many[0].result['requests']:,} requests, and how much longer"
    yield Row(what=what, measured=f"{longer:.2f} s, {growth:.2f}x", claim="<= 11x", holds=growth <= 11)


def repeat_sessions(source: Path, target: Path, *, copies: int) -> None:
    """Write every session ``copies`` times under names of their own, compressed like the source."""
    with gzip.open(source, "rt") as sessions, gzip.open(target, "wt", compresslevel=6) as repeated:
        for line in sessions:
            session = json.loads(line)
            for copy in range(copies):
                repeated.write(json.dumps(session | {"id": f"{session['id']}.{copy}"}) + "\n")


def peers(traces: Traces) -> Iterator[Row]:
    """The published simulators at the same capacity in tokens; ratios are kvsim's requests a second over theirs."""
    for size in PEER_PAGE_SIZES:
        settings = (*conversation(traces, size), *one_tier(f"{CAPACITY_TOKENS}tokens"), *PAGE_BY_PAGE)
        ours = run_kvsim_repeatedly("replay", *settings)[0].requests_per_s
        counted = second_half_hit_tokens(traces, size, f"{CAPACITY_TOKENS}tokens")
        yield Row(what=f"kvsim, {size}-token pages", measured=f"{ours:,.0f} requests/s")
        for peer in PEERS:
            yield from or_why_not(compare(peer, traces.conversation, size, ours, counted))


def compare(peer: str, trace: Path, page_tokens: int, ours: float, counted: int) -> Iterator[Row]:
    timings = time_peer(peer, trace, page_tokens)
    yield from (ratio(ours, timing) for timing in timings)
    yield from same_hits(counted, timings[0])


def time_peer(peer: str, trace: Path, page_tokens: int) -> list[PeerTiming]:
    """Measure one peer in a process of its own; raise RunFailed with the reason if it cannot be."""
    options = ["--page-tokens", str(page_tokens), "--capacity-tokens", str(CAPACITY_TOKENS)]
    printed, _ = run_process([sys.executable, str(HERE / "peers.py"), peer, str(trace), *options])
    answer = json.loads(printed.strip().splitlines()[-1])
    if "unavailable" in answer:
        raise RunFailed(answer["unavailable"])
    return [PeerTiming(**timing) for timing in answer["timings"]]


def ratio(ours: float, timing: PeerTiming) -> Row:
    """Kvsim against one peer; settings fitted to this very trace are shown without a claim."""
    times = ours / timing.requests_per_s
    least = 1 if timing.page_tokens == 512 else 5
    return Row(
        what=f"{timing.peer}, {timing.setting}, {timing.page_tokens}-token pages",
        measured=f"{timing.requests_per_s:,.0f} requests/s; kvsim {times:.2f}x",
        claim=f"> {least}x" if timing.as_shipped else "none: not as shipped",
        holds=times > least if timing.as_shipped else None,
        bar=(f"{timing.peer}, {timing.setting.split(',')[0]}", timing.page_tokens, timing.requests_per_s),
    )


def same_hits(counted: int, timing: PeerTiming) -> Iterator[Row]:
    """A peer's hits against kvsim's if both know prefixes, or else against the known count of flat LRU."""
    expected = counted if timing.hit_unit == "tokens" else FLAT_LRU_HITS.get(timing.page_tokens)
    if expected is not None:
        whose = "as kvsim counts" if timing.hit_unit == "tokens" else "as flat LRU must"
        what = f"hit {timing.hit_unit} of {timing.peer}, {timing.page_tokens}-token pages"
        yield Row(what=what, measured=f"{timing.hits:,}", claim=f"= {expected:,}, {whose}", holds=timing.hits == expected)


def sweep(traces: Traces) -> Iterator[Row]:
    """Policies by capacities, by as many workers as the claim has cores."""
    try:
        version("hydra-joblib-launcher")
    except PackageNotFoundError:
        raise RunFailed("joblib's launcher is not installed: pip install kvsim[joblib]") from None
    sizes = ",".join(f"{pages}pages" for pages in SWEEP_CAPACITIES)
    launcher = ("hydra/launcher=joblib", f"hydra.launcher.n_jobs={WORKERS}")
    settings = ("trace=mooncake", f"trace.path={traces.conversation}", "page_tokens=512", f"eviction={','.join(SWEEP_POLICIES)}")
    runs = [run_sweep(*launcher, *settings, f"tiers.gpu.capacity={sizes}") for _ in range(REPEATS)]
    yield from sweep_rows(min(runs, key=lambda run: run.wall_s - allowed_s(run)))


def allowed_s(run: Sweep, *, shared_by: int = WORKERS) -> float:
    """Seconds: 1.3x a worker's share of the replays, and 90 ms for each job, by so many workers at a time."""
    return 1.3 * sum(run.replays_s) / WORKERS + 0.09 * len(run.replays_s) / shared_by


def sweep_rows(run: Sweep) -> Iterator[Row]:
    """The claim: 90 ms for each job of a worker. And with the looser one, 90 ms for each job of the sweep."""
    strict, loose = allowed_s(run), allowed_s(run, shared_by=1)
    jobs, wall = len(run.replays_s), run.wall_s
    yield Row(
        what=f"a sweep of {jobs} replays by {WORKERS} workers",
        measured=f"{wall:.1f} s, {wall / strict:.2f} of it; its replays {sum(run.replays_s):.1f} s in sum",
        claim=f"<= {strict:.1f} s: 1.3x half the sum, and 90 ms for each job of a worker",
        holds=wall <= strict,
    )
    yield Row(
        what="the same, against 90 ms for each job of the sweep",
        measured=f"{wall:.1f} s, {wall / loose:.2f} of it",
        claim=f"<= {loose:.1f} s",
        holds=wall <= loose,
    )


def at_least(what: str, run: Run, least: float, *, bar: tuple[str, int] | None = None) -> Row:
    speed = run.requests_per_s
    return Row(
        what=what,
        measured=f"{speed:,.0f} requests/s",
        claim=f">= {least:,.0f}",
        holds=speed >= least,
        bar=(*bar, speed) if bar else None,
    )


def less_memory(what: str, runs: list[Run], limit_mb: int) -> Row:
    peak_mb = max(run.peak_bytes for run in runs) / 1e6
    return Row(what=what, measured=f"{peak_mb:,.0f} MB", claim=f"< {limit_mb} MB", holds=peak_mb < limit_mb)


SECTIONS: dict[str, Callable[[Traces], Iterator[Row]]] = {
    "Exact hits": exact_hits,
    "Page sizes": page_sizes,
    "Three tiers": tiers,
    "Simulation": simulation,
    "Agent sessions (WEKA)": agent_sessions,
    "Peers": peers,
    "Sweep": sweep,
}


def or_why_not(rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows; one that says why takes the place of those that could not be measured."""
    try:
        yield from rows
    except RunFailed as reason:
        yield Row(what="not measured", measured=str(reason), claim="measured", holds=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACES / "mooncake_conversation_trace.jsonl.gz", help="Mooncake trace")
    parser.add_argument("--weka", type=Path, default=TRACES / "weka_claude_code_traces_rle.jsonl.gz", help="WEKA trace")
    names = [section.__name__ for section in SECTIONS.values()]
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="print these alone, and write no table")
    arguments = parser.parse_args()
    for path in (arguments.trace, arguments.weka):
        if not path.exists():
            parser.error(f"no trace at {path}: name one with --trace or --weka")
    traces = Traces(conversation=arguments.trace.resolve(), agents=arguments.weka.resolve())

    console = Console()
    sections: dict[str, list[Row]] = {}
    for title, section in SECTIONS.items():
        if section.__name__ in arguments.only:
            sections[title] = list(or_why_not(section(traces)))
            print_rows(console, title, sections[title])
    if sections.keys() == SECTIONS.keys():
        write_table(HERE / "results.md", sections)
        draw_bars(HERE / "results.html", sections)
    failed = [row.what for rows in sections.values() for row in rows if row.holds is False]
    console.print(f"Failed: {'; '.join(failed)}" if failed else "Every claim holds.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
