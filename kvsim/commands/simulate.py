"""``kvsim simulate``: serves a trace in simulated time."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvsim.commands.application import run_application, start_run

if TYPE_CHECKING:
    from kvsim.plans.plan import Plan
    from kvsim.results.result import RunRecord
    from kvsim.sweeps.command_jobs import SweepJob


def run(plan: "Plan", command_line: str, job: "SweepJob | None") -> "RunRecord":
    """Run the command once."""
    from kvsim.commands.job import run_command

    return run_command("simulate", plan, command_line, job)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("simulate", partial(start_run, "simulate", run), arguments)
