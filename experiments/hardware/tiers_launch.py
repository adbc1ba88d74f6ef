"""Why does the host take longer to launch steps of few prompt tokens where lower tiers are hit?

In the runs of tiers.py, such steps took up to twice as long as expected, and longer with a disk than without. Serves
configurations of that study with the machine's description recorded there, each in three ways:

as served       the engine, the disk's threads and those of the GPU are in one process, and share the interpreter's lock
own process     the GPU's threads are in a process of their own, as those of several GPUs are
without tiers   as served, but with the GPU's tier only: no copies, no disk

A launch that waits for the lock takes longer than the thread's CPU time; one that has a slower processor does not.

    python experiments/hardware/tiers_launch.py [--only NAME ...] [--output DIR]      on a machine with a GPU: two minutes

Writes tiers_launch.md and exits with 1 if a run fails.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
LOWER = ("tiers.cpu.", "tiers.disk.", "placement=", "prefetch=")
"""How settings begin that only a run with lower tiers has."""


@dataclass(frozen=True)
class Row:
    """Steps of few prompt tokens of one run. Times are means in seconds."""

    name: str
    way: str
    steps: int
    expected_s: float
    step_s: float
    launches: list[tuple[float, float]]
    """Wall and CPU time of each launch, where it was in this process."""

    def cells(self) -> tuple[str, ...]:
        times = [self.expected_s, self.step_s, *(fmean(column) for column in zip(*self.launches, strict=True))]
        shown = [f"{1e3 * seconds:.2f}" for seconds in times]
        return (self.name, self.way, str(self.steps), *shown, *["-"] * (4 - len(shown)))


def served(one: Configuration, way: str, machine: Path, folder: Path) -> Row | None:
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
    means = (sum(row[key] for row in some) / max(1, count) for key in ("expected_s", "measured_s"))
    return Row(one.name, way, count, *means, [] if way == "own process" else launches)


def rows(configurations: Sequence[Configuration], machine: Path, folder: Path) -> Iterator[Row | None]:
    for one in configurations:
        for way in WAYS:
            yield served(one, way, machine, folder / one.name / way.replace(" ", "_"))


def main(arguments: list[str] | None = None) -> int:
    """Serve and write the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["disk-1", "cpu-2"], metavar="NAME", help="configurations")
    parser.add_argument("--configurations", type=Path, default=CONFIGURATIONS, help="file of tiers_draw.py")
    parser.add_argument("--recorded", type=Path, default=HERE / "tiers_recorded", help="folder of the archives")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the table")
    options = parser.parse_args(arguments)
    chosen = [one for one in read_configurations(options.configurations) if one.name in options.only]
    if len(chosen) < len(set(options.only)):
        parser.error(f"--only: a configuration of {options.only} is not in {options.configurations}")
    options.output.mkdir(parents=True, exist_ok=True)
    heads = ("", "", "steps", "expected (ms)", "step (ms)", "launch (ms)", "its CPU time (ms)")
    found: list[Row | None] = []
    with tempfile.TemporaryDirectory() as folder:
        machine = unpack(options.recorded, Path(folder) / "recorded")[0]
        for row in rows(chosen, machine, Path(folder) / "runs"):
            found.append(row)
            table = markdown(heads, [row.cells() for row in found if row is not None])
            lines = [
                "# Launches of short steps, where lower tiers are hit",
                "",
                f"Steps of at most {SHORT} prompt tokens.",
                "",
                *table,
            ]
            (options.output / "tiers_launch.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if None in found else 0


if __name__ == "__main__":
    sys.exit(main())
