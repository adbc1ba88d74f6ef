"""Why does the host take longer to launch steps of few prompt tokens where lower tiers are hit?

In the runs of tiers.py, such steps took up to twice as long as expected, and longer with a disk than without. Serves
configurations of that study with the machine's description recorded there, each in three ways:

as served       the engine, the disk's threads and those of the GPU are in one process, and share the interpreter's lock
own process     the GPU's threads are in a process of their own, as those of several GPUs are
without tiers   as served, but with the GPU's tier only: no copies, no disk

A launch that waits for the lock takes longer than the thread's CPU time; one that has a slower processor does not. All are served
in rounds, so that the runs of one way are minutes apart: what differs between them is the host's speed at the time.

    python experiments/hardware/tiers_launch.py [--only NAME ...] [--runs N] [--output DIR]
                                                                    on a machine with a GPU: five minutes

Writes tiers_launch.md and exits with 1 if a run fails.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from json import loads
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from tiers import HERE, unpack
from tiers_measure import CONFIGURATIONS, Configuration, read_configurations

from kvsim.cli import main as kvsim
from kvsim.report.study import markdown

SHORT = 512
"""Most prompt tokens of a step that counts: in it the GPU waits for the launch."""
WAYS = ("as served", "own process", "without tiers")
HEADS = ("", "", "steps", "expected (ms)", "step (ms)", "launch (ms)", "its CPU time (ms)")
LOWER = ("tiers.cpu.", "tiers.disk.", "placement=", "prefetch=")
"""How settings begin that only a run with lower tiers has."""


@dataclass(frozen=True)
class Steps:
    """Steps of few prompt tokens of one run. Times are means in seconds."""

    count: int
    expected_s: float
    step_s: float
    launches: list[tuple[float, float]]
    """Wall and CPU time of each launch, where it was in this process."""

    @property
    def times_s(self) -> list[float]:
        return [self.expected_s, self.step_s, *(fmean(column) for column in zip(*self.launches, strict=True))]


def cells(name: str, way: str, runs: Sequence[Steps]) -> tuple[str, ...]:
    """Return a row of the table: each time of the runs, in their order."""
    columns = list(zip(*(run.times_s for run in runs), strict=True))
    shown = [", ".join(f"{1e3 * seconds:.2f}" for seconds in column) for column in columns]
    return (name, way, ", ".join(str(run.count) for run in runs), *shown, *["-"] * (4 - len(shown)))


def served(one: Configuration, way: str, machine: Path, folder: Path) -> Steps | None:
    """Serve a configuration in one of the ways; None if that fails."""
    from kvsim.substrate.hardware.machine import Demand
    from kvsim.substrate.hardware.model.transformer import Transformer

    launches: list[tuple[float, float]] = []
    step = Transformer.step

    def timed(self: Transformer, chunks: Sequence[Any], *given: Any, **named: Any) -> Any:
        began = time.perf_counter(), time.thread_time()
        result = step(self, chunks, *given, **named)
        if 0 < sum(chunk.tokens for chunk in chunks) <= SHORT:
            launches.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
        return result

    words = [word for word in one.overrides if way != "without tiers" or not word.startswith(LOWER)]
    words += [f"hardware=measured_{one.model}", "--config-dir", str(machine), f"output={folder}"]
    with ExitStack() as changed:
        changed.enter_context(patch.object(Transformer, "step", timed))
        if way == "own process":
            changed.enter_context(patch.object(Demand, "has_processes", True))
        if kvsim(["simulate", "substrate=hardware", *words]):
            return None
    steps = loads((folder / "result.json").read_text())["hardware"]["steps"]
    some = [row for row in steps if row["kind"] in ("both", "prefill") and row["least"] <= SHORT // 2 + 1]
    count = sum(row["steps"] for row in some)
    expected_s, step_s = (sum(row[key] for row in some) / max(1, count) for key in ("expected_s", "measured_s"))
    return Steps(count, expected_s, step_s, [] if way == "own process" else launches)


def machine_of(one: Configuration, machines: Sequence[Path]) -> Path:
    """Return the folder of the machine that has served the configuration."""
    return next(machine for machine in machines if (machine / "runs" / one.name).is_dir())


def in_rounds(
    configurations: Sequence[Configuration], machines: Sequence[Path], runs: int, folder: Path
) -> Iterator[tuple[str, str, Steps | None]]:
    """Serve every configuration in every way, as many times, and yield the name, the way and what was found."""
    for run in range(runs):
        for one in configurations:
            for way in WAYS:
                place = folder / str(run) / one.name / way.replace(" ", "_")
                yield one.name, way, served(one, way, machine_of(one, machines), place)


def lines_of(found: Mapping[tuple[str, str], Sequence[Steps]]) -> list[str]:
    """Return the lines of the page."""
    table = markdown(HEADS, [cells(*which, runs) for which, runs in found.items()])
    say = f"Steps of at most {SHORT} prompt tokens. Times are means of a run; runs are in their order, minutes apart."
    return ["# Launches of short steps, where lower tiers are hit", "", say, "", *table]


def main(arguments: list[str] | None = None) -> int:
    """Serve and write the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["disk-1", "cpu-2"], metavar="NAME", help="configurations")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each way")
    parser.add_argument("--configurations", type=Path, default=CONFIGURATIONS, help="file of tiers_draw.py")
    parser.add_argument("--recorded", type=Path, default=HERE / "tiers_recorded", help="folder of the archives")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the table")
    options = parser.parse_args(arguments)
    chosen = [one for one in read_configurations(options.configurations) if one.name in options.only]
    if len(chosen) < len(set(options.only)):
        parser.error(f"--only: a configuration of {options.only} is not in {options.configurations}")
    options.output.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], list[Steps]] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        machines = unpack(options.recorded, Path(folder) / "recorded")
        for name, way, steps in in_rounds(chosen, machines, options.runs, Path(folder) / "runs"):
            failed |= steps is None
            if steps is not None:
                found.setdefault((name, way), []).append(steps)
                (options.output / "tiers_launch.md").write_text("\n".join(lines_of(found)) + "\n")
    print("\n".join(lines_of(found)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
