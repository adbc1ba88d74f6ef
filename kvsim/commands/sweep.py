"""A sweep (multirun) as a whole: its folder, what it lists, and the tables and pages written at its end."""

import os
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvsim.bound_files import complete
from kvsim.commands import hydra_internals
from kvsim.commands.objective import check_directions, check_objective
from kvsim.commands.seeds import add_seeds
from kvsim.commands.sweep_job import failure_line, of_interest, said_of
from kvsim.errors import UsageError
from kvsim.files.locking import Lock
from kvsim.plans.build import build_run, sweep_settings
from kvsim.plans.command_settings import SweepSettings
from kvsim.plans.construct import construct
from kvsim.plans.plan import Plan
from kvsim.report.saturation_page import Named, print_saturation, read_saturations, write_saturation
from kvsim.results.logger import Logger
from kvsim.results.records import read_failure, read_sweep
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run, read_runs
from kvsim.run.fingerprint import configuration_hash
from kvsim.settings.mistake import Listed, Mistake
from kvsim.settings.sources import flags, use
from kvsim.sweep_folder import begin_folder, index_of, place_job, write_comparison

SAME_TERMINAL = (".BasicLauncher", ".JoblibLauncher", ".RayLauncher")
"""Launchers whose jobs write to the sweep's own terminal."""
WATCH_S = 0.5


@dataclass
class Begun:
    """A sweep that this process has started."""

    folder: Path
    command: str
    settings: SweepSettings
    logger: Logger
    watch: "FailureWatch | None"
    lock: ExitStack
    """Ends the lock of the folder."""


class FailureWatch(threading.Thread):
    """Reports failed jobs as they fail, for launchers whose jobs do not write to this terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.is_over = threading.Event()
        self.said: set[Path] = set()

    def run(self) -> None:
        while not self.is_over.wait(WATCH_S):
            self.say()

    def say(self) -> None:
        """Report new failures."""
        for path in sorted(set(self.folder.glob("*/error.json")) - self.said):
            self.said.add(path)
            record = read_failure(path.parent)
            print(failure_line(path.parent.name, record, said_of(self.folder, record["overrides"])), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Stop after a last check."""
        self.is_over.set()
        self.join()
        self.say()


_begun: list[Begun] = []
"""The sweep under way, if any. Hydra calls back when a sweep begins but not when it is interrupted."""


def forget_sweep() -> None:
    """Forget a sweep that ended before its first job, so that the next command in this process does not report it."""
    while _begun:
        _begun.pop().lock.close()
    hydra_internals.restore()


class SweepCallback(Callback):
    """Called by Hydra: when a multirun begins, in the process that launches its jobs; around each job, in the job's process."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        use(config.hydra.runtime.config_sources)
        try:
            begin_sweep(config)
        except Exception as error:  # Hydra would only warn and continue
            raise Mistake(error) from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Let the job find the user's policies, and the next job of this process start faster."""
        use(config.hydra.runtime.config_sources)
        hydra_internals.keep_plugins()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Drop the configuration from what a launcher sends back: a sweeper reads the returned value only."""
        job_return.cfg = job_return.hydra_cfg = None


def begin_sweep(config: DictConfig) -> None:
    """Prepare the sweep's folder, or list the jobs and raise Listed. Raises UsageError."""
    _ = config.output  # a reference in it that leads nowhere is told by this key, not Hydra's
    settings = sweep_settings(config.sweep)
    folder, command = Path(os.path.relpath(config.hydra.sweep.dir)), str(config.hydra.job.name)
    logger = construct(Logger, OmegaConf.to_container(config.logger, resolve=True), "logger")
    check_objective(settings)
    if _is_optimizing(config) and settings.objective is None:
        raise UsageError("sweep.objective is missing: set what the sweeper optimizes, such as sweep.objective=hit_rate")
    given = hydra_internals.task_overrides(config)
    if settings.seeds is not None:
        add_seeds(config, command, settings.seeds, is_optimizing=_is_optimizing(config))
    aims = [asdict(one) for one in check_directions(config, settings)]
    if settings.dry_run:
        index_of.cache_clear()
        list_jobs(config, folder, command)
        raise Listed
    arguments = hydra_internals.task_overrides(config)
    words = ["kvsim", command, "-m", *flags(config.hydra.runtime.config_sources), *config.hydra.overrides.hydra, *given]
    words = [word for word in words if not word.startswith("hydra.mode=")]
    swept = _swept(config, arguments)
    with ExitStack() as stack:
        stack.enter_context(Lock(folder))
        begin_folder(folder, {"command": command, "command_line": shlex.join(words), "swept": swept, "objectives": aims})
        lock = stack.pop_all()
    hydra_internals.speed_up(config)
    watch = None
    if not str(config.hydra.launcher._target_).endswith(SAME_TERMINAL):
        watch = FailureWatch(folder)
        watch.start()
    _begun[:] = [Begun(folder, command, settings, logger, watch, lock)]


def end_sweep(*, is_interrupted: bool = False) -> None:
    """Write the table and the page of the sweep that this process has started, if any. Raises UsageError if jobs failed."""
    if not _begun:
        return
    sweep = _begun.pop()
    with sweep.lock:
        failures, finished = _ended(sweep, is_interrupted=is_interrupted)
    if failures and not is_interrupted:
        not_begun = ", and no others were started (sweep.fail_fast)" if sweep.settings.fail_fast else ""
        raise SweepError(failures, f"{len(failures)} of {finished + len(failures)} jobs failed{not_begun}")


def _ended(sweep: Begun, *, is_interrupted: bool) -> tuple[list[Run], int]:
    """Write what a sweep leaves at its end. Returns the failed jobs, and the number of the others."""
    if sweep.watch:
        sweep.watch.stop()
    if sweep.command == "curve":
        return list(read_failures(sweep.folder)), len(list(sweep.folder.glob("*/curve.json")))
    if sweep.command == "saturate":
        records, damaged = read_saturations(sweep.folder)
        write_saturations(sweep.folder, records)
        return [*read_failures(sweep.folder), *damaged], len(records)
    runs = write_sweep(sweep.folder, with_bounds=not is_interrupted)
    if not is_interrupted:
        sweep.logger.log_sweep(sweep.folder, runs)
    return [run for run in runs if run.error is not None], sum(run.error is None for run in runs)


class SweepError(UsageError):
    """Jobs of a sweep failed. The exit code is 1 if one of them crashed."""

    def __init__(self, failures: list[Run], message: str) -> None:
        first = failures[0]
        super().__init__(f"{message}; the first is job {first.name}: {first.error}")
        self.exit_code = 1 if any(run.is_crash for run in failures) else 2


def read_failures(folder: Path) -> Iterator[Run]:
    """The failed jobs of a sweep's folder."""
    return (run for run in read_runs([folder], damaged_fail=True) if run.error is not None)


# --- the whole sweep -------------------------------------------------------------------------------------------------


def write_sweep(folder: Path, *, with_bounds: bool) -> list[Run]:
    """Write the files about all jobs in a folder and print their table. Returns the jobs."""
    from rich.console import Console

    from kvsim.report.comparison.compare import print_comparison
    from kvsim.report.comparison.pareto import front_of, print_front

    runs = read_runs([folder], damaged_fail=True)
    if with_bounds:
        add_bounds(runs)
    files = write_comparison(folder, runs)
    if any(run.result is not None for run in runs):
        console = Console()
        print_comparison(runs, console)
        if front := front_of(runs):
            print_front(front, console)
        console.print(f"\n{folder}: {' '.join(files)}", highlight=False)
    return runs


def write_saturations(folder: Path, records: list[Named]) -> None:
    """Write ``saturate.csv`` and ``saturate.html`` for the jobs of a sweep and print their table."""
    from rich.console import Console

    if records:
        console = Console()
        write_saturation(folder, records, command_line=read_sweep(folder)["command_line"])
        print_saturation(records, console)
        console.print(f"\n{folder}: saturate.csv saturate.html", highlight=False)


def add_bounds(runs: list[Run]) -> None:
    """Give each run its bounds, computing those that no job has computed. Bounds that cannot be computed are left out."""
    for run in runs:
        names = (run.result or {}).get("bounds") or {}
        missing = [kind for kind in names if kind not in run.bounds]
        if missing and run.result is not None:
            with suppress(UsageError):
                plan = plan_of(run.result)
                for kind, bound in complete(run.bounds_folder, plan).items():
                    for other in runs:
                        if ((other.result or {}).get("bounds") or {}).get(kind) == names.get(kind, ""):
                            other.bounds[kind] = bound


def plan_of(result: RunRecord) -> Plan:
    """The plan of a recorded run. Raises UsageError if its configuration is no longer valid."""
    config = result["config"] | {"output": ".", "sweep": {}, "validate": {}, "logger": {}}
    return build_run(OmegaConf.create(config), command=result["command"], choices=result["choices"])


# --- before it begins ------------------------------------------------------------------------------------------------


def list_jobs(config: DictConfig, folder: Path, command: str) -> None:
    """Print the jobs of a sweep, marking those that have finished or cannot work. Raises UsageError."""
    if _is_optimizing(config):
        raise UsageError("sweep.dry_run: an optimizing sweeper chooses its jobs as it runs: leave it out")
    loader = hydra_internals.sweep_loader()
    overrides = hydra_internals.swept_overrides(config)
    swept = {override.get_key_element() for override in overrides if override.is_sweep_override()}
    finished = 0
    jobs, note = hydra_internals.split_sweep(config, overrides)
    if note:
        print(note)
    for number, job in enumerate(jobs):
        name, state = str(number), ""
        try:
            cfg = loader.load_sweep_config(config, job)
            with read_write(cfg), open_dict(cfg):
                del cfg["hydra"]
            plan = build_run(cfg, command=command, overrides=job)
            name, result = place_job(folder, name, configuration_hash(plan, command))
            state = "" if result is None else "  finished before"
            finished += result is not None
        except (UsageError, HydraException, OmegaConfBaseException) as error:
            state = f"  cannot work: {' '.join(str(error).split())}"
        print(f"job {name}  {of_interest(job, swept)}{state}")
    print(f"{len(jobs)} jobs in {folder}, {finished} finished before")


def _is_optimizing(config: DictConfig) -> bool:
    return not hydra_internals.is_grid(config)


def _swept(config: DictConfig, arguments: list[str]) -> list[str]:
    """The keys that the sweep varies."""
    overrides = OverridesParser.create().parse_overrides(arguments)
    parameters = OmegaConf.to_container(config.hydra.sweeper).get("params") or {}  # type: ignore[union-attr]
    return [*parameters, *(override.get_key_element() for override in overrides if override.is_sweep_override())]
