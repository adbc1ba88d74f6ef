"""The jobs of a sweep on the command line, in whatever process they run: what each runs, and what it prints."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.plans.build import build_run
from kvsim.plans.command_settings import SweepSettings
from kvsim.plans.plan import Plan
from kvsim.results.result import RunRecord
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.grid import Lacking
from kvsim.sweeps.job import Job, run_job
from kvsim.sweeps.objective import Objective
from kvsim.sweeps.planning import Way, effective


class SweepJob(NamedTuple):
    """What a command knows about the sweep that runs it."""

    group: str
    """The sweep's name."""
    varied: str
    """The overrides that distinguish the job from the others."""
    is_alone: bool
    """Whether no other job runs at the same time."""
    place: str = ""
    """Where it stands among the others, and how long they take, if that is known."""


RunCommand = Callable[[Plan, str, SweepJob | None], RunRecord]
"""Runs a command: takes its plan, the command line that repeats it alone, and the sweep that it is a job of, if any."""


class OutputLost(BaseException):
    """A line about a job cannot be printed: the command ends, and the job has not failed. Not an Exception, which fails a job."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, kw_only=True)
class CommandJobs:
    """What the jobs of a sweep have in common. Launchers send it to other processes."""

    command: str
    run: RunCommand
    folder: Path
    settings: SweepSettings
    config_name: str
    flags: list[str]
    """Flags with which a command finds the same files of settings."""
    swept: list[str]
    """The keys that the sweep varies."""
    lacking: Lacking
    is_alone: bool
    is_planned: bool = False
    """Whether the jobs have been planned and leave out what has no effect on them; those of an optimizer have not."""
    refused: frozenset[int] = frozenset()
    """Numbers of jobs that cannot run, which the user knows already."""

    def run_job(self, number: int, overrides: Sequence[str], compositions: Compositions, place: str = "") -> Objective:
        """Run a job and print how it ended. Returns its objectives; None for a failed job and where none are set."""
        if self.settings.fail_fast and any(self.folder.glob("*/error.json")):
            return None
        if number in self.refused:
            return None
        given = self.lacking.left_out(overrides) if self.is_planned else self._effective(number, overrides, compositions)
        about = SweepJob(self.folder.name, of_interest(given, self.swept), self.is_alone, place)
        line = shlex.join(["kvsim", self.command, *self.flags, *(word for word in given if not word.startswith("sweep."))])
        job = Job(number=number, overrides=given, plan=lambda: self.plan(given, compositions))
        ended = run_job(self.folder, self.command, job, lambda plan: self.run(plan, line, about))
        if ended.failure is not None:
            print(failure_line(ended.name, ended.failure, about.varied), file=sys.stderr, flush=True)
        elif ended.is_earlier:
            tell(f"job {ended.name}  {about.varied}  finished before")
        return ended.objective

    def way(self, compositions: Compositions) -> Way[list[str]]:
        """How these jobs are planned."""
        return Way(
            lines=list,
            without=lambda job, lines: [line for line in job if line not in lines],
            plan=lambda job: self.plan(job, compositions),
        )

    def _effective(self, number: int, overrides: Sequence[str], compositions: Compositions) -> list[str]:
        """Return what of a job has an effect, and say what else it sets."""
        given, objections, _ = effective(self.lacking.left_out(overrides), self.way(compositions))
        for line, objection in objections.items():
            tell(f"job {number}  {line} is left out: it has no effect {objection.why}")
        return given

    def plan(self, overrides: Sequence[str], compositions: Compositions) -> Plan:
        """Make the plan of a job. Raises UsageError."""
        config, choices = compositions.compose(overrides)
        return build_run(config, command=self.command, overrides=overrides, choices=choices)


def tell(line: str) -> None:
    """Print a line about a job. Raises OutputLost."""
    try:
        print(line, flush=True)
    except OSError as error:
        raise OutputLost(error) from error


def failure_line(name: str, record: dict[str, Any], overrides: str) -> str:
    """The line that reports a failed job."""
    more = f", traceback in {name}/error.json" if "traceback" in record else ""
    return f"kvsim: job {name} failed: {record['error']} ({overrides}{more})"


def of_interest(overrides: Sequence[str], swept: Sequence[str]) -> str:
    """The overrides of the keys that the sweep varies; all of them if there are none."""
    return " ".join(override for override in overrides if override.split("=")[0] in swept) or " ".join(overrides)
