"""One job of a sweep, in whatever process the launcher runs it."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from kvsim.bound_files import compute_once
from kvsim.commands.objective import Objective, objectives
from kvsim.engine.collector import without_garbage_collector
from kvsim.files.locking import Lock
from kvsim.plans.build import build_run, sweep_settings
from kvsim.results.records import Damaged, read_sweep
from kvsim.results.result import RunRecord
from kvsim.run.fingerprint import configuration_hash
from kvsim.settings.mistake import Mistake
from kvsim.settings.sources import flags
from kvsim.sweep_folder import failure_record, index_of, outcome_line, place_job, write_failure

WITHOUT_HITS = ("curve", "saturate")
"""Commands whose jobs are more than one run: they print their own tables, and there are no bounds beside them."""


class SweepJob(NamedTuple):
    """What a command is told about the sweep that runs it."""

    group: str
    """The sweep's name."""
    is_alone: bool
    """Whether no other job runs at the same time."""


@without_garbage_collector()
def run_sweep_job(command: str, run: Callable[..., RunRecord], cfg: DictConfig) -> Objective:
    """Run the current job unless its result exists already; report a failure in one line and write it to ``error.json``.

    Returns the objectives; None for a failed job and where none are set.
    """
    job = HydraConfig.get()
    number, overrides = str(job.job.num), list(map(str, OmegaConf.to_container(job.overrides.task) or ()))
    folder = Path(os.path.relpath(job.sweep.dir))
    cfg.output = os.path.relpath(job.runtime.output_dir)
    said = said_of(folder, overrides)
    settings = sweep_settings(cfg.sweep)
    if settings.fail_fast and any(folder.glob("*/error.json")):
        return None
    plan = None
    try:
        plan = build_run(cfg, command=command, overrides=overrides, choices=job.runtime.choices)
        name, finished = place_job(folder, number, configuration_hash(plan, command))
        if finished is not None:
            tell(f"job {name}  {said}  finished before")
            return objectives(finished, settings)
        object.__setattr__(plan, "output", folder / name)
        is_alone = "BasicLauncher" in job.launcher._target_
        alone = [override for override in overrides if not override.startswith("sweep.")]
        line = shlex.join(["kvsim", command, *flags(job.runtime.config_sources), *alone])
        with Lock(plan.output):
            result = run(plan, line, SweepJob(group=folder.name, is_alone=is_alone))
        if command not in WITHOUT_HITS:
            index_of(folder.absolute())[result["config_hash"]] = name
            tell(f"job {name}  {said}  {outcome_line(result)}")
            compute_once(folder / "bounds", plan, result["bounds"])
        return objectives(result, settings)
    except Exception as error:
        record = _report_failure(Path(cfg.output), overrides, said, error)
        if plan is not None:
            plan.logger.log_failure(Path(cfg.output), plan.begun(command), str(record["error"]), folder.name)
        return None


def tell(line: str) -> None:
    """Print a line about a job. If that is not possible, the command ends; the job has not failed."""
    try:
        print(line, flush=True)
    except OSError as error:
        raise Mistake(error) from error


def _report_failure(folder: Path, overrides: list[str], said: str, error: Exception) -> dict[str, Any]:
    """Record a failed job for the end of the sweep and report it at once."""
    record = failure_record(error, overrides)
    name = write_failure(folder, record)
    print(failure_line(name, record, said), file=sys.stderr, flush=True)
    return record


def failure_line(name: str, record: dict[str, Any], said: str) -> str:
    """The line that reports a failed job."""
    more = f", traceback in {name}/error.json" if "traceback" in record else ""
    return f"kvsim: job {name} failed: {record['error']} ({said}{more})"


def said_of(folder: Path, overrides: list[str]) -> str:
    """The overrides that distinguish a job from the others."""
    try:
        swept = read_sweep(folder)["swept"]
    except Damaged:
        swept = []
    return of_interest(overrides, swept)


def of_interest(overrides: list[str], swept: Any) -> str:
    """The overrides of the keys that the sweep varies; all of them if there are none."""
    return " ".join(override for override in overrides if override.split("=")[0] in swept) or " ".join(overrides)
