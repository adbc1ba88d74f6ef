"""Is kvsim exact, equally fast at any page size, and how fast next to a plain LRU replay and the simulators people use today?

A rate is a multiple of the rate of a yardstick measured in the same run: sixty lines of pure Python that replay runs of pages
through LRU on one tier of 10,000 pages. Claims, each a row of the printed tables, on the Mooncake conversation trace unless
another is named; of two numbers the first is for kvsim in pure Python, the second for kvsim compiled:

exact hits   LRU page hit rates at six capacities to six digits, and hit tokens of the second half as integers; like the replays
             next to peers, without the pages of answers, which peers do not count
page sizes   one tier, LRU: replays at .18 or .5 of the yardstick's rate with pages of 512, 64, 16 and 1 tokens, all within 1.3x
three tiers  with write_back: at .03 or .12
             In both, answers take room, as by default
simulation   three tiers on a virtual clock: at .010 or .03 with pages of 512 tokens, .007 or .02 with 16, in less than 300 MB
engines      sixteen engines with a GPU tier each, compiled: over 9,800 requests per second on one core with each of two
             routers. NVIDIA states so many for DynoSim: 23,608 requests of Mooncake in 2.41 s, eight engines, on an M4
agents       WEKA, 710 sessions: read and replayed in less than 5 s and 500 MB; ten times the requests take at most 11x the time
peers        as shipped, slower than kvsim with 512-token pages and more than 5x slower with 16. libcachesim with a hash table
             fitted to the capacity is listed without a claim; with 512 tokens it may be faster. A peer that cannot be measured
             is listed with its latest recorded rate, without a claim
sweep        200 replays by two joblib workers: at most 1.3x half the sum of the replays' times plus 90 ms for each job of a
             worker; this includes reading the trace, start-up, composing, writing, bounds, table and page

The aims shown next to the floors of compiled kvsim are not claims. Every number of kvsim comes from its command line, run in a
process of its own. Rates exclude reading the trace and are the best of five rounds; the yardstick runs in each round, and its
best counts too. The spread of its runs is printed, since it shows how steady the machine was. The best run counts for the sweep,
the worst for memory. Exits with 1 if a claim fails or cannot be measured. New measurements replace those of the same build in
results.json; results.md shows both builds.
"""

import gzip
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure import REPEATS, Beside, Run, RunFailed, Sweep, Yardstick, run_beside, run_kvsim, run_process, run_sweep
from peers import BLOCK_TOKENS, OTHERS, PEERS, PeerTiming
from results import Row, Section, draw_bars, machine, print_rows, read_results, write_results, write_table
from rich.console import Console

from kvsim.installation import build_name
from kvsim.report.study import CONVERSATION, WEKA, option_parser

HERE = Path(__file__).resolve().parent
YARDSTICK = HERE.parents[2] / "shared" / "tools" / "yardstick.py"

PAGE_SIZES = (512, 64, 16, 1)
TIER_PAGE_SIZES = (512, 16)
CAPACITY_TOKENS = 10_000 * 512

PAGE_HIT_RATES = {
    "1000pages": ".044530",
    "5859pages": ".136076",
    "10000pages": ".211598",
    "30000pages": ".325747",
    "50000pages": ".354558",
    "unlimited": ".366412",
}
"""Prefix-LRU hit rate by capacity, in pages of 512 tokens including the partial last one."""

SECOND_HALF_HIT_TOKENS = {
    "1000pages": 3_173_822,
    "5859pages": 9_286_131,
    "10000pages": 14_910_149,
    "30000pages": 23_347_784,
    "50000pages": 25_582_964,
}
"""Hit tokens of all but the first 6,015 requests, as counted by kvcache-simulator."""

FLAT_LRU_HITS = {512: 60_921}
"""Page hits of an LRU that ignores prefixes (.211165 of 288,500), which libcachesim must count."""

SIMULATION_MB = 300
"""Peak memory of a simulation of three tiers."""

CLUSTER_ROUTING = ("round_robin", "kv_aware")
CLUSTER_RATE = 9_800
"""Requests per second that NVIDIA states for DynoSim on one core."""

SWEEP_CAPACITIES = tuple(range(1_000, 51_000, 1_000))
SWEEP_POLICIES = ("lru", "fifo", "lfu", "slru")
WORKERS = 2

WHOLE_PROMPTS = ("eviction=lru", "rules.recompute_last_token=false", "replay.in_flight=1")
"""One request after another. As by default, the pages of an answer take room until its request finishes."""
PROMPTS_ONLY = (*WHOLE_PROMPTS, "replay.hold_output=false")
"""The same without the pages of answers, as the peers do."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The lowest claimed multiple of the yardstick's rate in each build, and the multiple aimed at."""

    pure: float
    compiled: float
    aim: float

    def judge(self, what: str, beside: Beside, *, bar: tuple[str, int] | None = None) -> Row:
        """The row of a rate, judged by the floor of the running build."""
        compiled = build_name() == "compiled"
        least = self.compiled if compiled else self.pure
        return Row(
            what=what,
            measured=f"{beside.times:.3f}x ({beside.best.requests_per_s:,.0f})",
            claim=f">= {least:g}x; aim {self.aim:g}x" if compiled else f">= {least:g}x",
            holds=beside.times >= least,
            bar=(f"{bar[0]}, {build_name()}", bar[1], beside.times) if bar else None,
        )


ONE_TIER = Floor(pure=0.18, compiled=0.5, aim=1.0)
THREE_TIERS = Floor(pure=0.03, compiled=0.12, aim=0.25)
SIMULATION = {512: Floor(pure=0.010, compiled=0.03, aim=0.05), 16: Floor(pure=0.007, compiled=0.02, aim=0.04)}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The traces, the yardstick, the number of rounds and the interpreter that has the peers."""

    conversation: Path
    agents: Path
    yardstick: Yardstick
    repeats: int
    peers_python: Path

    def measure(self, command: str, settings: dict[int, tuple[str, ...]]) -> dict[int, Beside]:
        """Run the yardstick and a command with several page sizes in turn."""
        return run_beside(self.yardstick, self.repeats, command, settings)


def one_tier(gpu: str) -> tuple[str, ...]:
    return f"tiers.gpu.capacity={gpu}", "tiers.cpu.capacity=0", "tiers.disk.capacity=0"


def three_tiers() -> tuple[str, ...]:
    """6,000, 12,000 and 60,000 pages of 512 tokens, whatever the page size of the run."""
    blocks = {"gpu": 6_000, "cpu": 12_000, "disk": 60_000}
    return *(f"tiers.{tier}.capacity={count * 512}tokens" for tier, count in blocks.items()), "placement=write_back"


def conversation(setup: Setup, page_tokens: int) -> tuple[str, ...]:
    return "trace=mooncake", f"trace.path={setup.conversation}", "trace.tail=all", f"page_tokens={page_tokens}"


def one_tier_replay(setup: Setup, page_tokens: int, how: tuple[str, ...] = WHOLE_PROMPTS) -> tuple[str, ...]:
    """One tier of the same capacity in tokens with any page size."""
    return *conversation(setup, page_tokens), *one_tier(f"{CAPACITY_TOKENS}tokens"), *how


def agents(path: Path, capacity_pages: int) -> tuple[str, ...]:
    return "trace=weka", f"trace.path={path}", "page_tokens=64", "eviction=lru", *one_tier(f"{capacity_pages}pages")


def exact_hits(setup: Setup) -> Iterator[Row]:
    """LRU on one tier against rates and counts from other programs."""
    for capacity, expected in PAGE_HIT_RATES.items():
        run = run_kvsim("replay", *conversation(setup, 512), *one_tier(capacity), *PROMPTS_ONLY)
        rate = f"{run.result['page_hit_rate']:.6f}".lstrip("0")
        yield Row(what=f"page hit rate, {capacity}", measured=rate, claim=f"= {expected}", holds=rate == expected)
    for capacity, tokens in SECOND_HALF_HIT_TOKENS.items():
        found = second_half_hit_tokens(setup, 512, capacity)
        what = f"hit tokens with warmup=0.5, {capacity}"
        yield Row(what=what, measured=f"{found:,}", claim=f"= {tokens:,}", holds=found == tokens)


def second_half_hit_tokens(setup: Setup, page_tokens: int, capacity: str) -> int:
    settings = (*conversation(setup, page_tokens), *one_tier(capacity), *PROMPTS_ONLY, "warmup=0.5")
    return run_kvsim("replay", *settings).hit_tokens


def page_sizes(setup: Setup) -> Iterator[Row]:
    """One tier of the same capacity in tokens with every page size: the same hits at the same speed."""
    found = setup.measure("replay", {size: one_tier_replay(setup, size) for size in PAGE_SIZES})
    for size, beside in found.items():
        yield ONE_TIER.judge(f"one tier, {size}-token pages", beside, bar=("kvsim, one tier", size))
    multiples = [beside.times for beside in found.values()]
    spread = max(multiples) / min(multiples)
    yield Row(what="fastest over slowest page size", measured=f"{spread:.2f}x", claim="<= 1.3x", holds=spread <= 1.3)
    yield same_hit_tokens({size: beside.best for size, beside in found.items()})


def same_hit_tokens(best: dict[int, Run]) -> Row:
    """Hit tokens may differ by what rounding prompts up to whole pages of the largest size adds."""
    largest = best[max(best)].result
    rounding = largest["prompt_pages"] * max(best) / largest["prompt_tokens"] - 1
    tokens = [run.hit_tokens for run in best.values()]
    difference = max(tokens) / min(tokens) - 1
    return Row(
        what="spread of hit tokens, largest over smallest minus 1",
        measured=f"{difference:.2%} ({min(tokens):,} to {max(tokens):,})",
        claim=f"<= {rounding:.2%}, the share that rounding to pages adds",
        holds=difference <= rounding,
    )


def tiers(setup: Setup) -> Iterator[Row]:
    """Three tiers with write-back."""
    settings = {size: (*conversation(setup, size), *three_tiers(), *WHOLE_PROMPTS) for size in TIER_PAGE_SIZES}
    for size, found in setup.measure("replay", settings).items():
        yield THREE_TIERS.judge(f"three tiers, write_back, {size}-token pages", found, bar=("kvsim, three tiers", size))


def simulation(setup: Setup) -> Iterator[Row]:
    """Three tiers with all transfers, chunked prefill and decode on a virtual clock, on GPUs that have the memory for them."""
    choices = (*three_tiers(), "hardware.gpus=4", "eviction=lru", "prefetch=threshold")
    settings = {size: (*conversation(setup, size), *choices) for size in TIER_PAGE_SIZES}
    for size, found in setup.measure("simulate", settings).items():
        yield SIMULATION[size].judge(f"simulate, three tiers, write_back, {size}-token pages", found)
        yield less_memory(f"its peak memory, {size}-token pages", found.runs, SIMULATION_MB)


def sixteen_engines(setup: Setup) -> Iterator[Row]:
    """Sixteen engines on one core, whose router looks at nothing, or at what all of them have in their caches."""
    common = (*conversation(setup, 512), *one_tier("6000pages"), "hardware.gpus=4", "cluster.engines=16")
    settings = {place: (*common, f"routing={routing}") for place, routing in enumerate(CLUSTER_ROUTING)}
    for place, found in setup.measure("simulate", settings).items():
        rate = found.best.requests_per_s
        is_claimed = build_name() == "compiled"
        yield Row(
            what=f"simulate, 16 engines, {CLUSTER_ROUTING[place]}, 512-token pages",
            measured=f"{found.times:.3f}x ({rate:,.0f})",
            claim=f"> {CLUSTER_RATE:,} requests/s" if is_claimed else "",
            holds=rate > CLUSTER_RATE if is_claimed else None,
        )


def agent_sessions(setup: Setup) -> Iterator[Row]:
    """All WEKA sessions on one tier; then ten copies of each on a tier ten times as large, which keeps the hit rate."""
    runs, many, rates = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        repeated = Path(folder) / "sessions.jsonl.gz"
        repeat_sessions(setup.agents, repeated, copies=10)
        for _ in range(setup.repeats):
            rates.append(setup.yardstick.measure())
            runs.append(run_kvsim("replay", *agents(setup.agents, 100_000)))
            many.append(run_kvsim("replay", *agents(repeated, 1_000_000)))
    once, longer = (min(run.read_and_replay_s for run in some) for some in (runs, many))
    alone = Beside(runs=runs, yardsticks=rates).times
    what = f"read and replay {runs[0].result['requests']:,} requests, one tier"
    yield Row(what=what, measured=f"{once:.2f} s; replay alone {alone:.3f}x", claim="< 5 s", holds=once < 5)
    yield less_memory("its peak memory", runs, 500)
    growth = longer / once
    what = f"the same for {many[0].result['requests']:,} requests, and the ratio of the times"
    yield Row(what=what, measured=f"{longer:.2f} s, {growth:.2f}x", claim="<= 11x", holds=growth <= 11)


def repeat_sessions(source: Path, target: Path, *, copies: int) -> None:
    """Write every session ``copies`` times with distinct ids, compressed like the source."""
    with gzip.open(source, "rt") as sessions, gzip.open(target, "wt", compresslevel=6) as repeated:
        for line in sessions:
            session = json.loads(line)
            for copy in range(copies):
                repeated.write(json.dumps(session | {"id": f"{session['id']}.{copy}"}) + "\n")


def peers(setup: Setup) -> Iterator[Row]:
    """The published simulators with the same capacity in tokens, and kvsim's rate relative to theirs."""
    replays = {size: one_tier_replay(setup, size, PROMPTS_ONLY) for size in TIER_PAGE_SIZES}
    for size, ours in setup.measure("replay", replays).items():
        counted = second_half_hit_tokens(setup, size, f"{CAPACITY_TOKENS}tokens")
        yield Row(what=f"kvsim, {size}-token pages", measured=f"{ours.times:.3f}x ({ours.best.requests_per_s:,.0f})")
        for peer in PEERS:
            yield from or_why_not(compare(setup, peer, size, ours, counted))


def others(setup: Setup) -> Iterator[Row]:
    """Simulators of serving, and why they are not measured."""
    for name in OTHERS:
        try:
            time_peer(setup, name, BLOCK_TOKENS)
        except RunFailed as reason:
            yield Row(what=name, measured=f"not measured: {reason}")


def compare(setup: Setup, peer: str, page_tokens: int, ours: Beside, counted: int) -> Iterator[Row]:
    """The rows of one peer; the yardstick runs before and after it."""
    try:
        before = setup.yardstick.measure()
        timings = time_peer(setup, peer, page_tokens)
    except RunFailed as reason:
        yield Row(what=f"{peer}, {page_tokens}-token pages", measured=f"not measured now: {reason}")
        yield from recorded(peer, page_tokens)
        return
    yardstick = max(before, setup.yardstick.measure())
    yield from (ratio(ours, timing, yardstick) for timing in timings)
    yield from same_hits(counted, timings[0])


def recorded(peer: str, page_tokens: int) -> Iterator[Row]:
    """The latest rates of a peer in results.json, with their date and without a claim."""
    sections = [section for titled in read_results(HERE / "results.json").values() if (section := titled.get("Peers"))]
    for section in sorted(sections, key=lambda section: section.when, reverse=True)[:1]:
        for row in section.rows:
            if row.what.startswith(f"{peer} ") and row.what.endswith(f", {page_tokens}-token pages"):
                rate = row.measured.split(";")[0]
                yield Row(what=row.what, measured=rate if " on 2" in rate else f"{rate} on {section.when}", bar=row.bar)


def time_peer(setup: Setup, peer: str, page_tokens: int) -> list[PeerTiming]:
    """Measure one peer in a process of its own; raise RunFailed with the reason if that is impossible."""
    options = ["--page-tokens", str(page_tokens), "--capacity-tokens", str(CAPACITY_TOKENS)]
    printed, _ = run_process([str(setup.peers_python), str(HERE / "peers.py"), peer, str(setup.conversation), *options])
    answer = json.loads(printed.strip().splitlines()[-1])
    if "unavailable" in answer:
        raise RunFailed(answer["unavailable"])
    return [PeerTiming(**timing) for timing in answer["timings"]]


def ratio(ours: Beside, timing: PeerTiming, yardstick: float) -> Row:
    """Compare kvsim with one peer; settings fitted to this trace are shown without a claim."""
    multiple = timing.requests_per_s / yardstick
    times = ours.times / multiple
    least = 1 if timing.page_tokens == 512 else 5
    return Row(
        what=f"{timing.peer}, {timing.setting}, {timing.page_tokens}-token pages",
        measured=f"{multiple:.3f}x ({timing.requests_per_s:,.0f}); kvsim is {times:.2f}x as fast",
        claim=f"> {least}x as fast" if timing.as_shipped else "none: not as shipped",
        holds=times > least if timing.as_shipped else None,
        bar=(f"{timing.peer}, {timing.setting.split(',')[0]}", timing.page_tokens, multiple),
    )


def same_hits(counted: int, timing: PeerTiming) -> Iterator[Row]:
    """Compare a peer's hits with kvsim's if it knows prefixes, otherwise with the known count of flat LRU."""
    expected = counted if timing.hit_unit == "tokens" else FLAT_LRU_HITS.get(timing.page_tokens)
    if expected is not None:
        whose = "as kvsim counts" if timing.hit_unit == "tokens" else "as flat LRU must"
        what = f"hit {timing.hit_unit} of {timing.peer}, {timing.page_tokens}-token pages"
        yield Row(what=what, measured=f"{timing.hits:,}", claim=f"= {expected:,}, {whose}", holds=timing.hits == expected)


def sweep(setup: Setup) -> Iterator[Row]:
    """Replays of every policy at every capacity, by two workers."""
    try:
        version("hydra-joblib-launcher")
    except PackageNotFoundError:
        raise RunFailed("Hydra's joblib launcher is not installed: pip install kvsim[joblib]") from None
    sizes = ",".join(f"{pages}pages" for pages in SWEEP_CAPACITIES)
    launcher = ("hydra/launcher=joblib", f"hydra.launcher.n_jobs={WORKERS}")
    settings = ("trace=mooncake", f"trace.path={setup.conversation}", "page_tokens=512", f"eviction={','.join(SWEEP_POLICIES)}")
    runs = [run_sweep(*launcher, *settings, f"tiers.gpu.capacity={sizes}") for _ in range(setup.repeats)]
    yield from sweep_rows(min(runs, key=lambda run: run.wall_s - allowed_s(run)))


def allowed_s(run: Sweep, *, shared_by: int = WORKERS) -> float:
    """Seconds: 1.3x a worker's share of the replays, plus 90 ms per job, divided by ``shared_by`` workers."""
    return 1.3 * sum(run.replays_s) / WORKERS + 0.09 * len(run.replays_s) / shared_by


def sweep_rows(run: Sweep) -> Iterator[Row]:
    """The claim with 90 ms for each job of a worker, and the looser one with 90 ms for each job of the sweep."""
    strict, loose = allowed_s(run), allowed_s(run, shared_by=1)
    jobs, wall = len(run.replays_s), run.wall_s
    yield Row(
        what=f"a sweep of {jobs} replays by {WORKERS} workers",
        measured=f"{wall:.1f} s, {wall / strict:.2f} of the limit; its replays take {sum(run.replays_s):.1f} s in total",
        claim=f"<= {strict:.1f} s: 1.3x half the total, plus 90 ms for each job of a worker",
        holds=wall <= strict,
    )
    yield Row(
        what="the same, allowing 90 ms for each job of the sweep",
        measured=f"{wall:.1f} s, {wall / loose:.2f} of the limit",
        claim=f"<= {loose:.1f} s",
        holds=wall <= loose,
    )


def less_memory(what: str, runs: list[Run], limit_mb: int) -> Row:
    peak_mb = max(run.peak_bytes for run in runs) / 1e6
    return Row(what=what, measured=f"{peak_mb:,.0f} MB", claim=f"< {limit_mb} MB", holds=peak_mb < limit_mb)


SECTIONS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "Exact hits": exact_hits,
    "Page sizes": page_sizes,
    "Three tiers": tiers,
    "Simulation": simulation,
    "Sixteen engines": sixteen_engines,
    "Agent sessions (WEKA)": agent_sessions,
    "Peers": peers,
    "Simulators of serving": others,
    "Sweep": sweep,
}


def or_why_not(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows; if measuring fails, a last row with the reason, as a failed claim."""
    try:
        yield from rows
    except RunFailed as reason:
        yield Row(what="not measured", measured=str(reason), claim="measured", holds=False)


def measure_section(name: str, setup: Setup, console: Console) -> Section:
    """Measure one section, and print its rows and the spread of the yardstick's runs."""
    before = len(setup.yardstick.rates)
    rows = list(or_why_not(SECTIONS[name](setup)))
    print_rows(console, name, rows)
    when = time.strftime("%Y-%m-%d")
    section = Section(when=when, machine=machine(), yardstick=setup.yardstick.rates[before:], rows=rows)
    console.print(section.noise)
    return section


def write(folder: Path, sections: dict[str, Section]) -> None:
    """Replace the same build's older sections in the results."""
    kept = read_results(folder / "results.json")
    kept[build_name()] = kept.get(build_name(), {}) | sections
    kept = {build: kept[build] for build in sorted(kept, reverse=True)}
    write_results(folder / "results.json", kept)
    write_table(folder / "results.md", kept, SECTIONS)
    draw_bars(folder / "results.html", kept)


def read_options() -> Namespace:
    parser = option_parser(__file__, __doc__, {"trace": CONVERSATION, "weka": WEKA})
    parser.add_argument("--yardstick", type=Path, default=YARDSTICK, help="program that prints its requests per second")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of each command")
    parser.add_argument("--peers-python", type=Path, default=sys.executable, help="interpreter that has the peers (this one)")
    names = [section.__name__ for section in SECTIONS.values()]
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="measure these sections only")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    conversation = Path(options.trace)
    yardstick = Yardstick(program=options.yardstick, trace=conversation)
    given = {"agents": Path(options.weka), "repeats": options.repeats, "peers_python": options.peers_python}
    setup = Setup(conversation=conversation, yardstick=yardstick, **given)
    console = Console()
    console.print(f"kvsim is {build_name()}.")
    titles = [title for title, section in SECTIONS.items() if section.__name__ in options.only]
    sections = {title: measure_section(title, setup, console) for title in titles}
    write(options.output, sections)
    failed = [row.what for section in sections.values() for row in section.rows if row.holds is False]
    console.print(f"Failed: {'; '.join(failed)}" if failed else "Every claim holds.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
