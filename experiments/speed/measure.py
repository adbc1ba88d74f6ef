"""Runs of the command line in processes of their own, with the time and memory that a user would see."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

REPEATS = 5
"""Runs of each command; the fastest counts, and the largest memory."""


class RunFailed(Exception):
    """A command failed; the message ends with its last line of output."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run of a kvsim command."""

    result: dict[str, Any]
    """Its result.json."""
    peak_bytes: int
    """Largest resident memory of the process."""

    @property
    def requests_per_s(self) -> float:
        """Requests per second, without reading the trace."""
        return float(self.result["requests_per_s"])

    @property
    def read_and_replay_s(self) -> float:
        """Seconds to read the trace and to run it."""
        return float(self.result["load_s"] + self.result["wall_s"])

    @property
    def hit_tokens(self) -> int:
        """Hit tokens of all tiers."""
        return sum(self.result["hit_tokens"].values())


def run_kvsim(command: str, *overrides: str) -> Run:
    """Run ``kvsim COMMAND OVERRIDES`` once and read its result.json; raise RunFailed if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        printed, peak_bytes = run_process([_kvsim(), command, *overrides, f"output={output}"])
        try:
            result = json.loads((output / "result.json").read_text())
        except FileNotFoundError:
            raise RunFailed(f"kvsim {command} wrote no result.json; it printed: {_last_line(printed)}") from None
    return Run(result=result, peak_bytes=peak_bytes)


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """A plain LRU replay of the conversation trace in pure Python, which shows how fast the machine is at the moment."""

    program: Path
    trace: Path
    rates: list[float] = field(default_factory=list)
    """Requests per second of every run so far."""

    def measure(self) -> float:
        """Run it once in a process of its own; raise RunFailed if the program does not exist."""
        if not self.program.exists():
            raise RunFailed(f"no yardstick at {self.program}; set --yardstick to its path")
        printed, _ = run_process([sys.executable, str(self.program), str(self.trace), "1"])
        self.rates.append(float(printed))
        return self.rates[-1]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Runs of one command, and of the yardstick in the same rounds."""

    runs: list[Run]
    yardsticks: list[float]

    @property
    def best(self) -> Run:
        """The run with the most requests per second."""
        return max(self.runs, key=lambda run: run.requests_per_s)

    @property
    def times(self) -> float:
        """Best requests per second as a multiple of the yardstick's best."""
        return self.best.requests_per_s / max(self.yardsticks)


def run_beside(yardstick: Yardstick, repeats: int, command: str, settings: Mapping[int, Sequence[str]]) -> dict[int, Beside]:
    """Run the yardstick and then the command with each of several settings, ``repeats`` times."""
    rates: list[float] = []
    found: dict[int, list[Run]] = {key: [] for key in settings}
    for _ in range(repeats):
        rates.append(yardstick.measure())
        for key, overrides in settings.items():
            found[key].append(run_kvsim(command, *overrides))
    return {key: Beside(runs=runs, yardsticks=rates) for key, runs in found.items()}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One finished sweep of replays."""

    wall_s: float
    """Seconds from the start of the command to its end."""
    replays_s: list[float]
    """Seconds of each job's replay from its result.json: without reading the trace, configuration and files."""


def run_sweep(*overrides: str) -> Sweep:
    """Run ``kvsim replay -m OVERRIDES`` once and read the results of its jobs; raise RunFailed if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        run_process([_kvsim(), "replay", "-m", *overrides, f"output={folder}"])
        wall_s = perf_counter() - began
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*/result.json")]
    return Sweep(wall_s=wall_s, replays_s=[float(result["wall_s"]) for result in results])


def run_process(command: list[str]) -> tuple[str, int]:
    """Return the output of a command and its peak memory in bytes; raise RunFailed unless it exits with 0.

    ``wait4`` reports the resources of this child alone. Linux includes the memory that the parent process had when it
    started the child, so the calling program must stay small.
    """
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        text = printed.read()
    if process.returncode != 0:
        raise RunFailed(f"{Path(command[0]).name} {command[1]} exited with {process.returncode}: {_last_line(text)}")
    return text, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kvsim() -> str:
    """The command of this Python's environment, or else the one on the path."""
    beside_python = Path(sys.executable).with_name("kvsim")
    found = str(beside_python) if beside_python.exists() else shutil.which("kvsim")
    if found is None:
        raise RunFailed("no command kvsim; install the project into this environment: pip install -e .")
    return found


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]
