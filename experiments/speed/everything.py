"""Every figure of speed, by one command: what run.py, engines.py, workers.py, billion.py and policy_speed/run.py claim, in turn.

Each part is a process of its own with a limit on its time, and writes its own table and picture. everything.md lists what was
run, with the load on the machine before and after: under load, rates are lower and times are longer than on a machine that is
quiet, most of all what is measured with a clock on the wall. A part whose packages or traces are not there is not run, and the
table says what it lacks. Exits with 1 if a claim of any part fails or a part is not run.

    python experiments/speed/everything.py                      # an hour or two, on a quiet machine
    python experiments/speed/everything.py --quick              # small sizes, to see that all of it works
    python experiments/speed/everything.py --only engines workers
"""

import os
import resource
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Timer

from results import machine, read_rows, write_rows

from kvsim.installation import build_name

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[2] / "shared"
LIMIT_S = 3600.0
NOT_RUN = 69
"""Exit code of a part that lacks something (EX_UNAVAILABLE of sysexits.h)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program, and its words for a whole and for a quick measurement."""

    program: str
    table: str
    whole: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """What it reads, below the folder ``shared`` beside the project."""

    def lacks(self) -> list[str]:
        """What is not there of what it needs."""
        files = [str(Path("..") / "shared" / name) for name in self.files if not (SHARED / name).exists()]
        return [*[name for name in self.packages if find_spec(name) is None], *files]


TRACE, AGENTS = "traces/mooncake_conversation_trace.jsonl.gz", "traces/weka_claude_code_traces_rle.jsonl.gz"
YARDSTICK = "tools/yardstick.py"
SOME_ROUTERS = ("--routing", "round_robin", "least_loaded", "kv_aware")
PARTS = {
    "run": Part(program="run.py", table="results.md", quick=("--repeats", "1"), files=(TRACE, AGENTS, YARDSTICK)),
    "engines": Part(
        program="engines.py",
        table="engines.md",
        whole=("--requests", "1000000", *SOME_ROUTERS),
        quick=("--requests", "20000", *SOME_ROUTERS),
    ),
    "workers": Part(
        program="workers.py", table="workers.md", quick=("--requests", "20000", "--traces", "questions"), files=(TRACE,)
    ),
    "billion": Part(
        program="billion.py",
        table="billion.md",
        quick=("--share", "0.01"),
        packages=("zstandard",),
        files=(TRACE, YARDSTICK),
    ),
    "billion_simulated": Part(
        program="billion.py",
        table="billion.md",
        whole=("--only", "simulate"),
        quick=("--only", "simulate", "--share", "0.01"),
        packages=("zstandard",),
        files=(TRACE, YARDSTICK),
    ),
    "policies": Part(program="../policy_speed/run.py", table="../policy_speed/results_one_tier.md", quick=("--only", "one_tier")),
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One part that was run."""

    part: str
    build: str
    command: str
    exit_code: int
    """Of the program: 1 if a claim fails; 124 if it took too long; ``NOT_RUN``."""
    last_line: str
    elapsed_s: float
    cpu_s: float
    load_before: float
    load_after: float
    """Processes that ran or waited for a core, on average over a minute."""
    where: str


def measure(name: str, options: Namespace) -> Ran:
    """Run a part, with its output on the terminal."""
    part = PARTS[name]
    words = [*(part.quick if options.quick else part.whole)]
    if name == "run" and options.peers_python:
        words += ["--peers-python", str(options.peers_python)]
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        words += ["--output", str(options.output)]
    before, began_s, load_before = cpu_s(), time.perf_counter(), os.getloadavg()[0]
    if lacks := part.lacks():
        exit_code, last = NOT_RUN, f"lacks {', '.join(lacks)}"
        print(f"{name}: not run: {last}", flush=True)
    else:
        exit_code, last = play([sys.executable, str(HERE / part.program), *words], options.limit_s)
    return Ran(
        part=name,
        build=build_name(),
        command=" ".join(["python", os.path.normpath(Path("experiments/speed") / part.program), *words]),
        exit_code=exit_code,
        last_line=last,
        elapsed_s=time.perf_counter() - began_s,
        cpu_s=cpu_s() - before,
        load_before=load_before,
        load_after=os.getloadavg()[0],
        where=f"{time.strftime('%Y-%m-%d')}, {machine()}",
    )


def play(command: list[str], limit_s: float) -> tuple[int, str]:
    """Run a command, and pass its output on. Returns its exit code and last line. All that it has started ends with it."""
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        late: list[bool] = []
        timer = Timer(limit_s, lambda: (late.append(True), os.killpg(process.pid, signal.SIGKILL)))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
            exit_code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
    return (124, f"ended after {limit_s:,.0f} s; so far: {last or 'nothing'}") if late else (exit_code, last)


def cpu_s() -> float:
    """Processor time of all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(rows: list[Ran]) -> list[str]:
    lines = ["# All figures of speed", "", *__doc__.strip().splitlines()[:-4]]
    lines += ["", "| part | build | table | claims | last line | CPU | elapsed | load before, after |", "|---" * 8 + "|"]
    verdicts = {0: "hold", 1: "FAIL", 124: "took too long", NOT_RUN: "not run"}
    for one in rows:
        name = PARTS[one.part].table
        verdict = verdicts.get(one.exit_code, f"exit code {one.exit_code}")
        cells = [
            one.part,
            one.build,
            f"[{Path(name).name}]({name})",
            verdict,
            one.last_line.replace("|", "/"),
            f"{one.cpu_s:,.0f} s",
        ]
        lines.append(f"| {' | '.join(cells)} | {one.elapsed_s:,.0f} s | {one.load_before:.1f}, {one.load_after:.1f} |")
    lines += ["", "Measured:", "", *dict.fromkeys(f"- `{one.command}`: {one.where}" for one in rows)]
    return lines


def read_options() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS), help="parts to run (all)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that all of it works")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds after which a part is ended (an hour)")
    parser.add_argument("--peers-python", type=Path, help="interpreter that has the peers of run.py (this one)")
    parser.add_argument("--output", type=Path, help="folder of all tables and pictures (those of the programs)")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    folder = options.output or HERE
    path = folder / "everything.json"
    new = [measure(name, options) for name in options.only]
    kept = {(one.part, one.build): one for one in [*read_rows(path, Ran), *new]}
    rows = sorted(kept.values(), key=lambda one: (list(PARTS).index(one.part), one.build))
    write_rows(path, rows, table(rows))
    wrong = [one.part for one in new if one.exit_code]
    print(f"Failed: {', '.join(wrong)}" if wrong else "Every claim of every part holds.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
