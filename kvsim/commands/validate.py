"""``kvsim validate``: compares simulations of a run with the same run on this machine, or with recordings of it."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from kvsim.commands.application import run_application, start_run
from kvsim.errors import UsageError, WrongResult
from kvsim.plans.plan import Plan
from kvsim.report.folder import prepare_folder, write_run, write_shared_script
from kvsim.report.template import SHARED_SCRIPT
from kvsim.report.validation.recording import Recording, read_measured, recorded
from kvsim.report.validation.repeated import compare_repeated
from kvsim.report.validation.repeated_page import print_repeated, render_repeated, repeated_failures
from kvsim.report.validation.validation import compare, failures, print_validation, render_validation, write_validation
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord
from kvsim.run.execute import execute
from kvsim.run.play import check_verified
from kvsim.sweeps.command_jobs import SweepJob

SIMULATED, HARDWARE = "simulated", "hardware"


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
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


def simulations(plan: Plan, runs: int) -> list[Plan]:
    """Return the plans of the simulations: one for a single real run, and one if the machine has no noise."""
    noise = plan.hardware.noise
    if runs == 1 or noise is None:
        return [plan]
    return [with_noise_seed(plan, noise.seed + number) for number in range(plan.validation.simulations)]


def with_noise_seed(plan: Plan, seed: int) -> Plan:
    """Return the same plan with another seed of the noise, also in the configuration that is recorded."""
    assert plan.hardware.noise is not None
    config = deepcopy(plan.config)
    config["hardware"]["noise"]["seed"] = seed
    hardware = replace(plan.hardware, noise=replace(plan.hardware.noise, seed=seed))
    return replace(plan, hardware=hardware, config=config)


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


def place(plan: Plan, substrate: str, number: int, runs: int) -> Path:
    """Return the folder of a run: that of its substrate, or a numbered one in it if there are several runs."""
    folder = plan.output / substrate
    return folder if runs == 1 else folder / str(number + 1)


def serve(plan: Plan, substrate: str, plans: Sequence[Plan], command_line: str) -> list[Recording]:
    """Run plans on a substrate, one after another, each with its own copies of the policies, and write their folders."""
    served = []
    if len(plans) > 1:
        prepare_folder(plan.output)
        write_shared_script(plan.output)
    for number, one in enumerate(plans):
        folder = place(plan, substrate, number, len(plans))
        script = None if len(plans) == 1 else f"../../{SHARED_SCRIPT}"
        label = substrate if len(plans) == 1 else f"{substrate} {number + 1}/{len(plans)}"
        served.append(run_one(one, substrate, folder, label, script, command_line))
    return served


def run_one(plan: Plan, substrate: str, folder: Path, label: str, script: str | None, command_line: str) -> Recording:
    """Run a plan on a substrate and write its folder."""
    own = replace(plan.with_own_policies(), substrate=substrate, output=folder, config={**plan.config, "substrate": substrate})
    result = execute("simulate", own, watch=partial(progress, label=label), command_line=command_line)
    write_run(folder, result.record, result.outcome, shared_script=script)
    return recorded(str(folder), result.record, result.outcome)
