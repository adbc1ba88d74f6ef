"""How much sooner does a simulation end with two processes (``cluster.workers=2``), and what do they cost?

Claim: with a router that chooses before the run, two processes on two cores take at most 0.75 of the time of one, by the critical
path; with one that hears of engines late, at most 0.9, since it chooses for all of them in a process of its own.

    questions     short prompts about a text that others ask about, too: 200 tokens shared, 200 of their own, no second turn
    conversation  Mooncake's trace

Each run is a process of its own, which reports elapsed time, CPU time of each of its processes, and the critical path: what would
have elapsed if each had had a core of its own. That is the CPU time before the processes begin and after they end and, between,
the longest of theirs: of all of it or, where they meet at the end of each window, of each window. Building and playing count,
reading the trace does not. Other programs stretch elapsed time, and CPU time less. The best of several runs counts. Exits with 1
if a claim fails, or if two processes do not give the results of one.

    python experiments/speed/workers.py --requests 200000
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from measure import RunFailed, run_process
from results import machine, read_rows, write_rows

HERE = Path(__file__).resolve().parent
CONVERSATION = HERE.parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
ENGINES = 64
LATE = {"staleness_s": 0.5, "late_answers": True}
ROUTING: dict[str, tuple[dict[str, Any], float]] = {
    "session_affinity": ({}, 0.75),
    "round_robin": ({}, 0.75),
    "llm_d": ({"staleness_s": 0.5}, 0.9),
    "lmetric": (LATE, 0.9),
    "kv_aware": (LATE, 0.9),
}
"""Settings of each router, and what part of one process's time two may take."""
QUESTIONS = {"weight": 1.0, "systems": 1000, "system_tokens": 200, "turns": 1.0, "message_tokens": 200, "answer_tokens": 60}
TIERS = ("tiers.gpu.capacity=4000pages", "tiers.cpu.capacity=0", "tiers.disk.capacity=0", "cluster.engines_per_host=1")
TRACES = ("questions", "conversation")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run took, in seconds."""

    build: str
    """Of kvsim: pure Python or compiled."""
    trace: str
    routing: str
    workers: int
    requests: int
    elapsed_s: float
    router_s: float
    """CPU time of the first process, which has the router."""
    workers_s: list[float]
    """CPU time of the others."""
    critical_s: float
    digest: str
    """Of the results."""
    where: str

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes."""
        return self.router_s + sum(self.workers_s)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.build, self.trace, self.routing, self.workers


# --- one run, in a process of its own --------------------------------------------------------------------------------------


class Times:
    """CPU times of a run's processes, noted where they meet."""

    def __init__(self) -> None:
        self.mine = [time.process_time()]
        """Of this process, each time that it has listened to the others."""
        self.theirs: list[list[float]] = []
        """Of each of the others, each time that it has told something."""

    def note(self) -> None:
        """Let the parts of ``cluster.workers`` note their times."""
        from kvsim.run import apart, windows
        from kvsim.run.processes import Line

        told: list[float] = []
        tell, listen = Line.tell, windows._listen

        def tell_and_note(line: Line, kind: str, content: Any) -> None:
            told.append(time.process_time() - began[0])
            if kind == "done":
                content["told_s"] = told
            tell(line, kind, content)

        def listen_and_note(*arguments: Any) -> None:
            self.mine.append(time.process_time())
            listen(*arguments)

        began = [0.0]  # a forked process counts from 0
        Line.tell = tell_and_note  # type: ignore[method-assign]
        windows._listen = listen_and_note
        for module in (apart, windows):
            module.merged = self._merged(module.merged)  # type: ignore[attr-defined]

    def _merged(self, merged: Any) -> Any:
        def noted(requests: Any, shares: Any, parts: Any, order: Any) -> Any:
            self.mine.append(time.process_time())
            self.theirs = [part["told_s"] for part in parts]
            return merged(requests, shares, parts, order)

        return noted

    def critical_s(self, *, meet: bool) -> float:
        """The critical path; processes ``meet`` at the end of each window, or only at the end of all."""
        end_s = time.process_time()
        if not self.theirs:
            return end_s - self.mine[0]
        if not meet:
            return max(self.mine[-1] - self.mine[0], max(told[-1] for told in self.theirs)) + end_s - self.mine[-1]
        windows = [max(parts) for parts in zip(*[spans(told) for told in self.theirs], strict=True)]
        chosen = spans([one - self.mine[0] for one in self.mine[1:]])
        chosen += [0.0] * (len(windows) - len(chosen))
        return sum(max(pair) for pair in zip(windows, chosen, strict=False)) + end_s - self.mine[-1]


def spans(times: list[float]) -> list[float]:
    """The time between each of some times and the one before it."""
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def run_one(options: Namespace) -> Cost:
    """Load a trace and simulate it."""
    import kvsim
    from kvsim.installation import build_name
    from kvsim.plans.arguments import arguments_of
    from kvsim.plans.from_python import plan_for
    from kvsim.run.play import simulate

    (name,), (routing,), (workers,) = options.traces, options.routing, options.workers
    trace = load(kvsim, name, options.requests)
    settings = [*(TIERS if name == "questions" else TIERS[1:]), f"cluster.engines={ENGINES}", f"cluster.workers={workers}"]
    settings += [f"routing.{key}={str(value).lower()}" for key, value in ROUTING[routing][0].items()]
    plan = plan_for("simulate", trace, arguments_of([*settings, f"routing={routing}"], {}))
    times = Times()
    times.note()
    began_s = time.perf_counter()
    outcome = simulate(plan, trace.requests)
    elapsed_s = time.perf_counter() - began_s
    return Cost(
        build=build_name(),
        trace=name,
        routing=routing,
        workers=workers,
        requests=len(trace.requests),
        elapsed_s=elapsed_s,
        router_s=time.process_time() - times.mine[0],
        workers_s=[told[-1] for told in times.theirs],
        critical_s=times.critical_s(meet="staleness_s" in ROUTING[routing][0]),
        digest=sha256(b"".join(outcome.columns[column].tobytes() for column in sorted(outcome.columns))).hexdigest()[:16],
        where=f"{time.strftime('%Y-%m-%d')}, {machine()}",
    )


def load(kvsim: Any, name: str, requests: int) -> Any:
    if name == "conversation":
        return kvsim.load_trace("mooncake", path=str(CONVERSATION), page_tokens=512)
    mix = {each: QUESTIONS | {"weight": float(each == "chat")} for each in ("chat", "agent", "document")}
    return kvsim.load_trace("synthetic", sessions=requests, sessions_per_s=2.4 * ENGINES, max_prompt_tokens=8192, seed=1, mix=mix)


# --- all runs, and their table ---------------------------------------------------------------------------------------------


def measure(options: Namespace) -> list[Cost]:
    """Make all runs in turn, and return the best of each."""
    best: dict[tuple[str, str, str, int], Cost] = {}
    for _ in range(options.repeats):
        for name in options.traces:
            for routing in options.routing:
                for workers in options.workers:
                    command = [sys.executable, str(Path(__file__).resolve()), "--one", "--requests", str(options.requests)]
                    command += ["--traces", name, "--routing", routing, "--workers", str(workers)]
                    found = Cost(**json.loads(run_process(command)[0].strip().splitlines()[-1]))
                    if found.key not in best or found.critical_s < best[found.key].critical_s:
                        best[found.key] = found
                    print(
                        f"{name:13s}{routing:18s}{workers} {found.elapsed_s:7.1f} s, critical {found.critical_s:7.1f} s",
                        flush=True,
                    )
    return list(best.values())


def table(costs: list[Cost]) -> list[str]:
    lines = ["# Processes", "", *__doc__.strip().splitlines()[:-2]]
    for build, name in sorted({(one.build, one.trace) for one in costs}):
        some = {(one.routing, one.workers): one for one in costs if (one.build, one.trace) == (build, name)}
        requests = max(one.requests for one in some.values())
        lines += ["", f"## {name}: {requests:,} requests, {ENGINES} engines, {build}", ""]
        lines += ["| routing | processes | elapsed | CPU: router + engines | critical path | | claim | |", "|---" * 8 + "|"]
        for (routing, workers), one in sorted(some.items(), key=lambda item: (list(ROUTING).index(item[0][0]), item[0][1])):
            alone, most = some.get((routing, 1)), ROUTING[routing][1]
            parts = " + ".join(f"{seconds:.1f}" for seconds in (one.router_s, *one.workers_s))
            row = f"| {routing} | {workers} | {one.elapsed_s:.1f} s | {parts} s | {one.critical_s:.1f} s |"
            if workers > 1 and alone:
                share = one.critical_s / alone.critical_s
                row += f" {share:.2f} of one's | <= {most:g} | {'holds' if share <= most else 'FAILS'} |"
            else:
                row += " | | |"
            lines.append(row)
        lines += ["", f"Measured {max(one.where for one in some.values())}."]
    return lines


def failed(costs: list[Cost]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    alone = {one.key[:3]: one for one in costs if one.workers == 1}
    for one in costs:
        before = alone.get(one.key[:3])
        if one.workers == 1 or before is None:
            continue
        if one.digest != before.digest:
            wrong.append(f"{one.trace}, {one.routing}: {one.workers} processes give other results than one")
        if one.critical_s > ROUTING[one.routing][1] * before.critical_s:
            wrong.append(f"{one.trace}, {one.routing}: {one.critical_s / before.critical_s:.2f} of the time of one process")
    return wrong


def read_options() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200_000, help="how many questions")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument("--routing", nargs="+", choices=ROUTING, default=tuple(ROUTING))
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; that with the shortest critical path counts")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of workers.json and workers.md")
    parser.add_argument("--one", action="store_true", help="make one run in this process, and print it")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    if options.one:
        print(json.dumps(asdict(run_one(options))))
        return 0
    try:
        new = measure(options)
    except RunFailed as reason:
        print(reason)
        return 1
    path = options.output / "workers.json"
    costs = sorted({one.key: one for one in [*read_rows(path, Cost), *new]}.values(), key=lambda one: one.key)
    write_rows(path, costs, table(costs))
    wrong = failed(new)
    print(f"Failed: {'; '.join(wrong)}" if wrong else "Every claim holds.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
