"""``kvsim validate``: compares simulations with the same runs on this machine, with recordings of them, or with a server."""

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from kvsim.commands.application import run_application, start_run
from kvsim.commands.run_folders import HARDWARE, SIMULATED, place, run_plans, simulations
from kvsim.errors import UsageError, WrongResult
from kvsim.plans.plan import Plan
from kvsim.report.validation.recording import Recording, read_measured, recorded
from kvsim.report.validation.repeated import compare_repeated
from kvsim.report.validation.repeated_page import print_repeated, render_repeated, repeated_failures
from kvsim.report.validation.validation import compare, failures, print_validation, render_validation, write_validation
from kvsim.results.result import RunRecord
from kvsim.run.play import check_verified
from kvsim.settings.unused_settings import keys_of
from kvsim.sweeps.command_jobs import SweepJob

AGAINST_SERVER = ("server", "results")
"""Settings that choose runs against a server in place of runs on this machine."""


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    if any(key == name or key.startswith(f"{name}.") for key in keys_of(arguments) for name in AGAINST_SERVER):
        from kvsim.commands import validate_server

        validate_server.main(arguments)
        return
    run_application("validate", partial(start_run, "validate", run_validation), arguments)


def run_validation(plan: Plan, command_line: str, job: SweepJob | None) -> RunRecord:
    """Simulate, run on this machine or read recordings, write all folders and the comparison, and print it.

    Raises WrongResult if reused pages were wrong or the simulation is not within its tolerances.
    """
    settings = plan.validation
    measured = read_measured(settings.measured)
    runs = len(measured) or settings.runs
    same_hardware = not measured or plan.reads_hardware
    if not measured:
        check_fresh(plan, runs)
    simulated = serve(plan, SIMULATED, simulations(plan, runs), command_line)
    measured = measured or serve(plan, HARDWARE, [plan] * runs, command_line)
    if runs == 1:
        record = compare(simulated[0], measured[0], settings, command_line, same_hardware=same_hardware)
        render, show, describe = render_validation, print_validation, failures
    else:
        record = compare_repeated(simulated, measured, settings, command_line, same_hardware=same_hardware)
        render, show, describe = render_repeated, print_repeated, repeated_failures
    write_validation(plan.output, record, render(record))
    finish(plan, record, measured, show, describe)
    return record


def finish(
    plan: Plan,
    record: RunRecord,
    measured: Sequence[Recording],
    show: Callable[[RunRecord, Console], None],
    describe: Callable[[RunRecord], str],
) -> None:
    """Print the comparison. Raises WrongResult if a page was wrong or a figure is outside its tolerance."""
    console = Console()
    show(record, console)
    folders = [SIMULATED, *([] if plan.validation.measured else [HARDWARE])]
    console.print(f"\n{plan.output}: validate.json validate.html {' '.join(f'{name}/' for name in folders)}", highlight=False)
    for run in measured:
        check_verified(run.record["hardware"])
    if not record["holds"]:
        raise WrongResult(f"the simulation is outside its tolerances: {describe(record)}")


def check_fresh(plan: Plan, runs: int) -> None:
    """Raise UsageError if a real run would start with pages on disk that simulations do not have, or if recorded real runs would
    be mixed with new ones."""
    if plan.disk.path is not None and (plan.disk.path / "pages.index").exists():
        raise UsageError(f"disk.folder: {plan.disk.path} contains pages of an earlier run: choose an empty folder")
    replaced = {place(plan, HARDWARE, number, runs) for number in range(runs)}
    earlier = {path.parent for path in (plan.output / HARDWARE).rglob("result.json")}
    if left := sorted(earlier - replaced):
        raise UsageError(
            f"output: {left[0]} is a real run of another validation: choose another folder with output=DIR, or compare it again "
            f"with validate.measured={plan.output / HARDWARE}"
        )


def serve(plan: Plan, substrate: str, plans: Sequence[Plan], command_line: str) -> list[Recording]:
    """Run plans on a substrate, as ``run_plans`` does."""
    results = run_plans(plan, substrate, plans, command_line)
    folders = [place(plan, substrate, number, len(plans)) for number in range(len(plans))]
    return [recorded(str(folder), one.record, one.outcome) for folder, one in zip(folders, results, strict=True)]
