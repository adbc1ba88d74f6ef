"""One job of a sweep, in whatever process the launcher runs it."""

import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from kvsim.build import build_run, sweep_settings
from kvsim.commands.bounds import compute_once
from kvsim.commands.objective import Objective, objectives
from kvsim.engine.collector import without_garbage_collector
from kvsim.errors import UsageError
from kvsim.fingerprint import configuration_hash
from kvsim.plan import Plan
from kvsim.report.folder import prepare_folder, replacing
from kvsim.report.result import RunRecord

HASH = re.compile(rb'"config_hash": "([0-9a-f]{32})"')
HEAD_BYTES = 400
"""The hash of a finished job is within this many leading bytes of its result."""


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
    number, overrides = str(job.job.num), [str(override) for override in job.overrides.task]
    folder = Path(os.path.relpath(job.sweep.dir))
    cfg.output = os.path.relpath(job.runtime.output_dir)
    said = said_of(folder, overrides)
    settings = sweep_settings(OmegaConf.to_container(cfg.sweep))
    if settings.fail_fast and any(folder.glob("*/error.json")):
        return None
    plan = None
    try:
        plan = build_run(cfg, command=command, overrides=overrides)
        name, finished = place_job(folder, number, configuration_hash(plan, command))
        if finished is not None:
            print(f"job {name}  {said}  finished before", flush=True)
            return objectives(finished, settings)
        object.__setattr__(plan, "output", folder / name)
        is_alone = "BasicLauncher" in job.launcher._target_
        result = run(plan, shlex.join(["kvsim", command, *overrides]), SweepJob(group=folder.name, is_alone=is_alone))
        if command != "curve":
            index_of(folder.absolute())[result["config_hash"]] = name
            print(f"job {name}  {said}  {outcome_line(result)}", flush=True)
            compute_once(folder / "bounds", plan, result["bounds"])
        return objectives(result, settings)
    except Exception as error:
        _report_failure(Path(cfg.output), number, overrides, said, error, plan, folder.name)
        return None


def place_job(folder: Path, number: str, config_hash: str) -> tuple[str, RunRecord | None]:
    """The name of a job's folder inside the sweep's folder, and the job's result if it has finished.

    A job has finished if any folder of the sweep has the result of its configuration. If the folder with its number has the
    result of another configuration, left by an earlier sweep, part of the hash is added to the name.
    """
    index = index_of(folder.absolute())
    if (name := index.get(config_hash)) and (folder / name / "result.json").exists():
        if name != number:
            with suppress(OSError):
                (folder / number).rmdir()
        return name, json.loads((folder / name / "result.json").read_text())
    is_taken = number in index.values() and (folder / number / "result.json").exists()
    return f"{number}-{config_hash[:8]}" if is_taken else number, None


@cache
def index_of(folder: Path) -> dict[str, str]:
    """Names of the finished jobs in a sweep's folder by the hash of their configuration. Read once per process."""
    index = {}
    for path in sorted(folder.glob("*/result.json")):
        with path.open("rb") as file:
            if found := HASH.search(file.read(HEAD_BYTES)):
                index[found[1].decode()] = path.parent.name
    return index


def outcome_line(result: RunRecord) -> str:
    """Summarize a run in a few words."""
    rate = "no prompt served" if result["hit_rate"] is None else f"hit rate {result['hit_rate']:.2%}"
    p99 = result["ttft_s"]["p99"]
    waiting = "" if p99 is None else f", ttft p99 {p99:.3g} s"
    return f"{rate}{waiting}, {result['wall_s']:.3g} s"


def _report_failure(
    folder: Path, number: str, overrides: list[str], said: str, error: Exception, plan: Plan | None, group: str
) -> None:
    """Report a failed job at once, record it for the end of the sweep and send it to the logger."""
    is_crash = not isinstance(error, UsageError)
    message = " ".join(f"{type(error).__name__}: {error}".split() if is_crash else str(error).split())
    record: dict[str, Any] = {"error": message, "is_crash": is_crash, "overrides": overrides}
    if is_crash:
        record["traceback"] = traceback.format_exc().splitlines()
    print(failure_line(number, record, said), file=sys.stderr, flush=True)
    with suppress(UsageError):
        prepare_folder(folder)
        with replacing(folder / "error.json") as file:
            file.write(json.dumps(record, indent=2).encode())
    if plan is not None:
        plan.logger.log_failure(folder, plan.config, str(record["error"]), group)


def failure_line(number: str, record: dict[str, Any], said: str) -> str:
    """The line that reports a failed job."""
    more = f", traceback in {number}/error.json" if record["is_crash"] else ""
    return f"kvsim: job {number} failed: {record['error']} ({said}{more})"


def said_of(folder: Path, overrides: list[str]) -> str:
    """The overrides that distinguish a job from the others."""
    try:
        swept = json.loads((folder / "sweep.json").read_text())["swept"]
    except OSError:
        swept = []
    return of_interest(overrides, swept)


def of_interest(overrides: list[str], swept: Any) -> str:
    """The overrides of the keys that the sweep varies; all of them if there are none."""
    return " ".join(override for override in overrides if override.split("=")[0] in swept) or " ".join(overrides)
