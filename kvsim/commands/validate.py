"""``kvsim validate``: compares a run in simulated time with the same run on this machine."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig
from rich.console import Console

from kvsim.commands.application import run_application, run_job
from kvsim.commands.objective import Objective
from kvsim.commands.sweep_job import SweepJob
from kvsim.errors import UsageError, WrongResult
from kvsim.execute import Result, execute
from kvsim.plan import Plan
from kvsim.policies.copies import copied
from kvsim.report.folder import write_run
from kvsim.report.progress import progress
from kvsim.report.result import RunRecord
from kvsim.report.validation import compare, failures, print_validation, write_validation
from kvsim.run import check_verified

BOTH = ("simulated", "hardware")


def application(cfg: DictConfig) -> Objective:
    """Run the validation."""
    return run_job("validate", run_validation, cfg)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("validate", application, arguments)


def run_validation(plan: Plan, command_line: str, job: SweepJob | None = None) -> RunRecord:
    """Run on both substrates, write both folders and the comparison, and print it.

    Raises WrongResult if reused pages were wrong or the simulation is not within its tolerances.
    """
    check_fresh(plan)
    simulated, measured = (run_one(plan, substrate, command_line) for substrate in BOTH)
    records, outcomes = (simulated.record, measured.record), (simulated.outcome, measured.outcome)
    record = compare(records, outcomes, plan.tolerances, command_line)
    write_validation(plan.output, record)
    console = Console()
    print_validation(record, console)
    files = ("validate.json", "validate.html", *(f"{name}/result.json" for name in BOTH))
    console.print(f"\n{plan.output}: {' '.join(files)}", highlight=False)
    check_verified(measured.outcome)
    if not record["holds"]:
        raise WrongResult(f"the simulation is outside its tolerances: {failures(record)}")
    return record


def check_fresh(plan: Plan) -> None:
    """Raise UsageError if the hardware run would start with pages on disk that the simulated run does not have."""
    if plan.disk.path is not None and (plan.disk.path / "pages.index").exists():
        raise UsageError(f"disk.folder: {plan.disk.path} contains pages of an earlier run: choose an empty folder")


def run_one(plan: Plan, substrate: str, command_line: str) -> Result:
    """Run the plan on one substrate, with its own copies of the policies, and write the run's folder inside the validation's."""
    config = {**plan.config, "substrate": substrate}
    own = replace(
        plan,
        tiers=[replace(tier, eviction=copied(tier.eviction), placement=copied(tier.placement)) for tier in plan.tiers],
        prefetch=copied(plan.prefetch),
        checkpoint=copied(plan.checkpoint),
        scheduling=copied(plan.scheduling),
        routing=copied(plan.routing),
        decode_routing=copied(plan.decode_routing),
    )
    one = replace(own, substrate=substrate, output=plan.output / substrate, config=config)
    result = execute("simulate", one, watch=partial(progress, label=substrate), command_line=command_line)
    write_run(one.output, result.record, result.outcome)
    return result
