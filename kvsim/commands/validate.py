"""``kvsim validate``: compares simulations with the same runs on this machine, with recordings of them, or with a server."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from kvsim.commands.application import run_application, start_run
from kvsim.errors import WrongResult
from kvsim.plans.plan import Plan
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord
from kvsim.run.validating import validate
from kvsim.run.validating_server import is_against_server
from kvsim.run.validation_runs import HARDWARE, SIMULATED
from kvsim.sweeps.command_jobs import SweepJob


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    if is_against_server(arguments):
        from kvsim.commands import validate_server

        validate_server.main(arguments)
        return
    run_application("validate", partial(start_run, "validate", run_validation), arguments)


def run_validation(plan: Plan, command_line: str, job: SweepJob | None) -> RunRecord:
    """Simulate, run on this machine or read recordings, write all folders and the comparison, and print it.

    Raises WrongResult if reused pages were wrong or the simulation is not within its tolerances.
    """
    compared = validate(plan, command_line, watch=lambda label: partial(progress, label=label))
    console = Console()
    compared.presentation.print(compared.record, console)
    folders = [SIMULATED, *([] if plan.validation.measured else [HARDWARE])]
    console.print(f"\n{plan.output}: validate.json validate.html {' '.join(f'{name}/' for name in folders)}", highlight=False)
    compared.check_pages()
    if not compared.record["holds"]:
        raise WrongResult(f"the simulation is outside its tolerances: {compared.presentation.failures(compared.record)}")
    return compared.record
