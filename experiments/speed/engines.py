"""Does a request cost the same with ten engines, a thousand and ten thousand?

Claim: a request to a cluster of 1,000 or 10,000 engines takes at most twice the CPU time of one to 10 engines, with each
router of the table; memory grows by less than 100 kB with each engine, besides what requests take. Every engine gets the same
load: sessions arrive at a rate in proportion to the number of engines. Prompts are short, of 200 tokens shared with other
sessions and 200 of their own, so that routing is a large part of the time.

Each run is a process of its own, which reports CPU time: first to build the engines, then to serve the requests. Runs take turns,
and the best of several counts. Exits with 1 if a claim fails. Results of other labels and builds are kept.

    python experiments/speed/engines.py --requests 1000000
    python experiments/speed/engines.py --label before --routing least_loaded      # with another kvsim on the PYTHONPATH
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from measure import RunFailed, run_process
from results import machine, read_rows, write_rows

HERE = Path(__file__).resolve().parent
ENGINES = (10, 1000, 10_000)
ROUTING = ("round_robin", "random", "session_affinity", "power_of_two", "least_loaded", "prefix_aware", "kv_aware")
COLOURS = ("#8c8c8c", "#b58900", "#2aa198", "#268bd2", "#d33682", "#cb4b16", "#5f5fc4")
TICKS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
SESSIONS_PER_S = 0.8
"""Of one engine."""
TURNS = 3.0
MOST_TIMES = 2.0
MOST_KB = 100.0
CHAT = {
    "weight": 1.0,
    "systems": 1000,
    "system_tokens": 200,
    "turns": TURNS,
    "message_tokens": 200,
    "answer_tokens": 60,
    "pause_s": 10.0,
}
SETTINGS = ("tiers.gpu.capacity=4000pages", "tiers.cpu.capacity=0", "tiers.disk.capacity=0", "cluster.engines_per_host=1")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run took."""

    label: str
    build: str
    """Of kvsim: pure Python or compiled."""
    engines: int
    routing: str
    requests: int
    build_s: float
    """CPU seconds to build the engines."""
    run_s: float
    """CPU seconds to serve the requests."""
    trace_mb: float
    """Largest memory when the trace is loaded, when the engines are built, and at the end."""
    built_mb: float
    peak_mb: float
    where: str

    @property
    def request_us(self) -> float:
        """CPU microseconds of a request."""
        return self.run_s / self.requests * 1e6

    @property
    def engine_kb(self) -> float:
        """Memory of an engine without requests."""
        return (self.built_mb - self.trace_mb) * 1e3 / self.engines

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What tells a run from others; a run with the same key replaces it."""
        return self.label, self.build, self.routing, self.engines, round(self.requests, 1 - len(str(self.requests)))


# --- one run, in a process of its own --------------------------------------------------------------------------------------


def peak_mb() -> float:
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def run_one(options: Namespace) -> Cost:
    """Load the trace, build the engines and serve the requests, without the garbage collector, as a simulation does."""
    import kvsim
    from kvsim.core.requests import fixed
    from kvsim.engine.collector import without_garbage_collector
    from kvsim.installation import build_name
    from kvsim.plans.arguments import arguments_of
    from kvsim.plans.from_python import plan_for
    from kvsim.plans.substrate_choice import SUBSTRATES
    from kvsim.run.assembly import build_cluster, build_graphs, build_served
    from kvsim.run.play import with_known_answers

    engines, (routing,) = options.engines[0], options.routing
    mix: dict[str, Any] = {name: CHAT | {"weight": float(name == "chat")} for name in ("chat", "agent", "document")}
    trace = kvsim.load_trace(
        "synthetic",
        sessions=round(options.requests / TURNS),
        sessions_per_s=SESSIONS_PER_S * engines,
        max_prompt_tokens=8192,
        seed=1,
        mix=mix,
    )
    plan = plan_for("simulate", trace, arguments_of([*SETTINGS, f"cluster.engines={engines}"], {"routing": routing}))
    requests, loaded_mb = fixed(trace.requests), peak_mb()
    with without_garbage_collector():
        began = time.process_time()
        plan, choice = with_known_answers(plan, requests), SUBSTRATES[plan.substrate]
        caches = [build_served(plan, graph, requests) for graph in build_graphs(plan, requests, choice.pool)]
        cluster = build_cluster(plan, requests, caches, choice.open(plan, requests, caches))
        built, built_mb = time.process_time(), peak_mb()
        cluster.run(requests)
        ended = time.process_time()
    return Cost(
        label=options.label,
        build=build_name(),
        engines=engines,
        routing=routing,
        requests=len(requests),
        build_s=built - began,
        run_s=ended - built,
        trace_mb=loaded_mb,
        built_mb=built_mb,
        peak_mb=peak_mb(),
        where=f"{time.strftime('%Y-%m-%d')}, {machine()}",
    )


# --- all runs, table and picture -------------------------------------------------------------------------------------------


def measure(options: Namespace) -> Iterator[Cost]:
    """Make all runs in turn, and yield each that is the best of its kind so far."""
    best: dict[tuple[str, int], Cost] = {}
    for _ in range(options.repeats):
        for routing in options.routing:
            for engines in options.engines:
                found = in_process(options, routing, engines)
                known = best.get((routing, engines))
                if known is None or found.run_s < known.run_s:
                    best[routing, engines] = found
                    yield found
                print(f"{routing:18s} {engines:7,d} engines: {found.request_us:8.1f} us per request", flush=True)


def in_process(options: Namespace, routing: str, engines: int) -> Cost:
    command = [sys.executable, str(Path(__file__).resolve()), "--one", "--label", options.label]
    command += ["--requests", str(options.requests), "--engines", str(engines), "--routing", routing]
    printed, _ = run_process(command)
    return Cost(**json.loads(printed.strip().splitlines()[-1]))


def table(costs: list[Cost]) -> list[str]:
    """The rows of all runs, by label, build and number of requests."""
    lines = ["# Many engines", "", *__doc__.strip().splitlines()[:-3]]
    lines += ["", "![CPU time of a request against the number of engines, by routing policy](engines.png)", ""]
    for label, build, requests in sorted({(one.label, one.build, one.key[-1]) for one in costs}):
        some = [one for one in costs if (one.label, one.build, one.key[-1]) == (label, build, requests)]
        sizes = sorted({one.engines for one in some})
        lines += [f"## {label}: {requests:,} requests, {build}", ""]
        lines += ["| routing |" + "".join(f" {size:,} engines |" for size in sizes) + " slowest | most memory |"]
        lines += ["|---" * (len(sizes) + 3) + "|"]
        for routing in [name for name in ROUTING if any(one.routing == name for one in some)]:
            by_size = {one.engines: one for one in some if one.routing == routing}
            cells = [f" {by_size[size].request_us:.0f} us |" if size in by_size else " |" for size in sizes]
            most = max(one.peak_mb - one.trace_mb for one in by_size.values())
            lines += [f"| {routing} |{''.join(cells)} {times(by_size):.2f}x | {most:,.0f} MB besides the trace |"]
        many = max(some, key=lambda one: one.engines)
        memory = f"{many.engine_kb:.0f} kB and " if many.engine_kb >= 1 else ""  # less: the trace left enough
        lines += ["", f"An engine without requests takes {memory}{many.build_s / many.engines * 1e3:.2f} ms to build."]
        lines += [f"Measured {many.where}.", ""]
    return lines[:-1]


def times(by_size: dict[int, Cost]) -> float:
    """The slowest time of a request, as a multiple of that with the fewest engines."""
    return max(one.request_us for one in by_size.values()) / by_size[min(by_size)].request_us


def draw(path: Path, costs: list[Cost]) -> None:
    """Write a page with the time of a request against the number of engines."""
    import plotly.graph_objects as go

    from kvsim.report.screenshot import take_screenshot

    figure = go.Figure()
    for label, build, routing, requests in dict.fromkeys([(*one.key[:3], one.key[-1]) for one in costs]):
        group = (label, build, routing, requests)
        line = [one for one in costs if (*one.key[:3], one.key[-1]) == group]
        look = {"color": COLOURS[ROUTING.index(routing)], "dash": "dot" if label == "before" else "solid"}
        name = ", ".join([routing, *([label] if label != "now" else []), *([build] if build == "compiled" else [])])
        figure.add_scatter(name=name, x=[one.engines for one in line], y=[one.request_us for one in line], line=look)
    figure.update_xaxes(type="log", title="engines", tickvals=sorted({one.engines for one in costs}), tickformat=",d")
    figure.update_yaxes(type="log", title="CPU time of a request, us", tickvals=TICKS, tickformat=",d")
    figure.update_layout(title="CPU time of a request, by number of engines", width=1000, height=560, template="plotly_white")
    figure.write_html(path, include_plotlyjs=True, config={"displayModeBar": False})
    take_screenshot(path, path.with_suffix(".png"), width=1016, height=576)


def write(folder: Path, some: Iterable[Cost]) -> list[Cost]:
    """Write all runs and their table. Returns them in the order of the table."""
    costs = sorted(some, key=lambda one: (one.label, one.build, one.key[-1], ROUTING.index(one.routing), one.engines))
    write_rows(folder / "engines.json", costs, table(costs))
    return costs


def failed(costs: list[Cost], label: str) -> list[str]:
    """The claims that do not hold, of the runs with a label."""
    wrong = []
    for build, routing, requests in sorted({(one.build, one.routing, one.key[-1]) for one in costs if one.label == label}):
        group = (label, build, routing, requests)
        by_size = {one.engines: one for one in costs if (*one.key[:3], one.key[-1]) == group}
        if times(by_size) > MOST_TIMES:
            wrong.append(f"{routing}, {build}: {times(by_size):.2f}x the time")
        wrong += [f"{routing}: {one.engine_kb:.0f} kB an engine" for one in by_size.values() if one.engine_kb > MOST_KB]
    return wrong


def read_options() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200_000, help="about how many")
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    parser.add_argument("--routing", nargs="+", choices=ROUTING, default=ROUTING)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; the fastest counts")
    parser.add_argument("--label", default="now", help="what is measured, for the table; claims are about these runs alone")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of engines.json, engines.md and engines.html")
    parser.add_argument("--one", action="store_true", help="make one run in this process, and print it")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    if options.one:
        print(json.dumps(asdict(run_one(options))))
        return 0
    kept = {one.key: one for one in read_rows(options.output / "engines.json", Cost)}
    new: dict[tuple[str, str, str, int, int], Cost] = {}
    try:
        for cost in measure(options):  # written one by one: a run that fails, or is ended, loses none before it
            new[cost.key] = cost
            costs = write(options.output, (kept | new).values())
    except RunFailed as reason:
        print(reason)
        return 1
    draw(options.output / "engines.html", costs)
    wrong = failed(list(new.values()), options.label)
    print(f"Failed: {'; '.join(wrong)}" if wrong else "Every claim holds.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
