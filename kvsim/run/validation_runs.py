"""Runs of a validation, each in a folder of its own."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsim.plans.plan import Plan
from kvsim.report.folder import prepare_folder, write_run, write_shared_script
from kvsim.report.template import SHARED_SCRIPT
from kvsim.run.execute import Result, Watch, execute, page_bounds
from kvsim.run.upper_bounds import Bound
from kvsim.trace.base import Trace

SIMULATED, HARDWARE = "simulated", "hardware"


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


def place(plan: Plan, substrate: str, number: int, runs: int) -> Path:
    """Return the folder of a run: that of its substrate, or a numbered one in it if there are several runs."""
    folder = plan.output / substrate
    return folder if runs == 1 else folder / str(number + 1)


def run_plans(
    plan: Plan,
    substrate: str,
    plans: Sequence[Plan],
    command_line: str | None,
    trace: Trace | None = None,
    *,
    watch: Callable[[str], Watch],
) -> list[Result]:
    """Run plans on a substrate, one after another, each with its own copies of the policies, and write their folders.

    ``trace`` is another one than that of the plans, which their configuration does not describe. ``watch`` takes what a run is
    called.
    """
    made, bounds = list[Result](), dict[str, Bound]()
    if len(plans) > 1:
        prepare_folder(plan.output)
        write_shared_script(plan.output)
    for number, one in enumerate(plans):
        folder = place(plan, substrate, number, len(plans))
        script = None if len(plans) == 1 else f"../../{SHARED_SCRIPT}"
        label = substrate if len(plans) == 1 else f"{substrate} {number + 1}/{len(plans)}"
        config = {**one.config, "substrate": substrate}
        own = replace(one.with_own_policies(), substrate=substrate, output=folder, config=config)
        how: dict[str, Any] = {"command_line": command_line, "is_named": trace is None}
        result = execute("simulate", own, trace, watch=watch(label), **how)
        bounds = bounds or page_bounds(own, result.record, trace)  # all of these runs have the same
        write_run(folder, result.record, result.outcome, shared_script=script, bounds=bounds)
        made.append(result)
    return made
