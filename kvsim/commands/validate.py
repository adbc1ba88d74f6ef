"""``kvsim validate``: the same run in simulated time and on this machine, side by side."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import hydra
from omegaconf import DictConfig
from rich.console import Console

from kvsim import run
from kvsim.build import Plan
from kvsim.commands.application import run_application, run_job
from kvsim.commands.record import describe
from kvsim.commands.sweep import Job, Objective
from kvsim.commands.traces import load_trace
from kvsim.engine.collector import without_garbage_collector
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError, WrongResult
from kvsim.report.folder import write_run
from kvsim.report.progress import progress
from kvsim.report.result import RunRecord, warmup_requests
from kvsim.report.validation import compare, failures, print_validation, write_validation

BOTH = ("simulated", "hardware")


@hydra.main(version_base="1.3", config_path="pkg://kvsim.conf", config_name="config")
def application(cfg: DictConfig) -> Objective:
    """A validation."""
    return run_job("validate", run_validation, cfg)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    if {"-m", "--multirun"} & set(arguments):
        raise UsageError("-m: kvsim validate takes one configuration: leave -m out")
    run_application(application, arguments)


def run_validation(plan: Plan, command_line: str, job: Job | None = None) -> RunRecord:
    """Run both, write their folders and the comparison, print it. Raises WrongResult if it is not within the tolerances."""
    check_fresh(plan)
    results, outcomes = zip(*(run_one(plan, substrate, command_line) for substrate in BOTH), strict=True)
    record = compare(results, outcomes, plan.tolerances, command_line)
    write_validation(plan.output, record)
    console = Console()
    print_validation(record, console)
    files = ("validate.json", "validate.html", *(f"{name}/result.json" for name in BOTH))
    console.print(f"\n{plan.output}: {' '.join(files)}", highlight=False)
    run.check_verified(outcomes[1])
    if not record["holds"]:
        raise WrongResult(f"the simulation is not within its tolerances: {failures(record)}")
    return record


def check_fresh(plan: Plan) -> None:
    """Raise UsageError if the run on hardware would begin with pages that the simulated one does not have."""
    if plan.disk.path is not None and (plan.disk.path / "pages.index").exists():
        raise UsageError(f"disk.folder: {plan.disk.path} has pages of an earlier run: choose an empty folder to compare with")


def run_one(plan: Plan, substrate: str, command_line: str) -> tuple[RunRecord, Outcome]:
    """Run the plan on one substrate, with policies of its own, and write the run's folder inside the validation's."""
    config = {**plan.config, "substrate": substrate}
    one = replace(deepcopy(plan), substrate=substrate, output=plan.output / substrate, config=config)
    with without_garbage_collector():
        trace, load_s = load_trace(one)
        run.check_capacity(one, trace.requests)
        warmup_requests(one.warmup, len(trace.requests))
        with progress(len(trace.requests), substrate, shown=True) as meter:
            outcome = run.simulate(one, trace.requests, meter.advance)
    result = describe("simulate", one, outcome, load_s=load_s, command_line=command_line)
    write_run(one.output, result, outcome)
    return result, outcome
