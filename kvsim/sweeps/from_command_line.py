"""A sweep on the command line (``-m``) as a whole: its jobs, its folder, and the tables and pages written at its end."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from kvsim.errors import UsageError
from kvsim.files.locking import Lock
from kvsim.numbers import Whole, refusal
from kvsim.plans.build import sweep_settings
from kvsim.plans.command_settings import SweepSettings
from kvsim.plans.construct import construct
from kvsim.report.saturation_page import print_saturation, read_saturations, write_saturation
from kvsim.results.logger import Logger
from kvsim.results.progress import Remaining, progress
from kvsim.results.records import read_sweep
from kvsim.results.runs import Run, read_runs
from kvsim.run.fingerprint import configuration_hash
from kvsim.run.interrupts import interrupts_first, stop_if_interrupted, undisturbed
from kvsim.settings.configuration import Asked, check_run_here
from kvsim.settings.sources import flags
from kvsim.sweeps.bounds import add_bounds
from kvsim.sweeps.command_jobs import CommandJobs, OutputLost, RunCommand, of_interest
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.folder import begin_folder, index_of, place_job
from kvsim.sweeps.grid import Job, Lacking, check, combinations, lacking, prune, read_overrides, samples
from kvsim.sweeps.live import LivePage
from kvsim.sweeps.objective import check_directions, check_objective
from kvsim.sweeps.planning import Planned, planned, refusals, write_refusals
from kvsim.sweeps.seeds import check_effect, with_seeds

GRID, HERE = ".BasicSweeper", ".BasicLauncher"
"""What Hydra calls a sweep over all combinations, and one whose jobs run one after another in this process."""


MANY = 50
"""Jobs from which on a progress bar shows how many have been checked."""


@dataclass(kw_only=True)
class Prepared:
    """A sweep before it runs."""

    asked: Asked
    jobs: CommandJobs
    compositions: Compositions
    overrides: list[str]
    """Those of the sweep, with its seeds."""
    grid: list[Job] | None
    """The jobs; None if an optimizer chooses them."""
    checked: list[Job]
    """Jobs to compose before the first one runs, as far as they differ in choices and keys."""
    note: str
    """What to tell the user about settings that jobs leave out because their choices lack them."""
    planned: Planned[Job]
    """What was found when the jobs were planned; nothing if an optimizer chooses them."""
    record: dict[str, Any]
    """The content of ``sweep.json``."""
    logger: Logger


class SweepError(UsageError):
    """Jobs of a sweep failed. The exit code is 1 if one of them crashed."""

    def __init__(self, failures: list[Run], message: str) -> None:
        first = failures[0]
        super().__init__(f"{message}; the first is job {first.name}: {first.error}")
        self.exit_code = 1 if any(run.is_crash for run in failures) else 2


def run_sweep(command: str, run: RunCommand, asked: Asked) -> None:
    """Run the jobs that a command line asks for, or list them. Raises UsageError if it cannot begin, or if jobs failed."""
    sweep = prepare(command, run, asked)
    if sweep.note:
        print(sweep.note, flush=True)
    if sweep.jobs.settings.dry_run:
        list_jobs(sweep)
        print_notes(sweep)
        return
    check(sweep.compositions, sweep.checked)
    refuse(sweep)
    with Lock(sweep.jobs.folder):
        begin_folder(sweep.jobs.folder, sweep.record)
        write_refusals(sweep.jobs.folder, sweep.planned, lambda job: job)
        live = LivePage(sweep.jobs.folder, None if sweep.grid is None else len(sweep.grid) - len(sweep.jobs.refused))
        try:
            try:
                with interrupts_first():
                    run_jobs(sweep, live)
            except KeyboardInterrupt:
                with undisturbed():
                    end(sweep, live, is_interrupted=True)
                raise
            except OutputLost as lost:
                raise lost.error from None
            failures, finished = end(sweep, live)
        finally:
            with undisturbed():
                live.close()
    if failures:
        not_begun = ", and no others were started (sweep.fail_fast)" if sweep.jobs.settings.fail_fast else ""
        raise SweepError(failures, f"{len(failures)} of {finished + len(failures)} jobs failed{not_begun}")


def refuse(sweep: Prepared) -> None:
    """Say which jobs cannot run, before any work. Raises SweepError if none can, or if the first failure is to end the sweep."""
    refused = sweep.planned.refused
    lines = refusals(sweep.planned)
    if lines and (len(refused) == len(sweep.planned.jobs) or sweep.jobs.settings.fail_fast):
        name, error = next(iter(refused.items()))
        failed = [Run(name=str(name), folder=sweep.jobs.folder, error=" ".join(str(error).split()))]
        raise SweepError(failed, f"{len(refused)} of {len(sweep.planned.jobs)} jobs cannot run, and none was started")
    for line in lines:
        print(line if line.startswith(" ") else f"kvsim: {line}", file=sys.stderr, flush=True)


def prepare(command: str, run: RunCommand, asked: Asked) -> Prepared:
    """Check what a command line asks for. Raises UsageError, and errors of OmegaConf about settings that all jobs share."""
    config, sweeper = asked.config, asked.config.hydra.sweeper
    _ = config.output  # an error in it is reported for this key, not for Hydra's
    settings = sweep_settings(config.sweep)
    logger = construct(Logger, OmegaConf.to_container(config.logger, resolve=True), "logger")
    check_objective(settings)
    is_grid = str(sweeper._target_).endswith(GRID)
    (_check_batches if is_grid else _check_optimizer)(sweeper, settings)
    aims = [asdict(aim) for aim in check_directions(config, settings)]
    parameters: dict[str, Any] = OmegaConf.to_container(sweeper).get("params") or {}  # type: ignore[union-attr]
    overrides = asked.overrides
    if settings.seeds is not None:
        overrides = with_seeds(command, overrides, list(parameters), int(config.seed), settings.seeds)
    compositions = Compositions(asked.loader, asked.config_name)
    read = read_overrides(overrides, parameters, asked.loader)
    jobs = _jobs(command, run, asked, settings, read, lacking(compositions, read))
    grid, note = prune(combinations(read), jobs.lacking) if is_grid else (None, _left_out(jobs.lacking))
    if is_grid and jobs.is_alone:
        check_run_here(asked)
    found = Planned(jobs=grid or [])
    if grid is not None:
        with progress(len(grid), "checking", unit="jobs", shown=len(grid) >= MANY) as advance:
            found = planned(grid, jobs.way(compositions), advance)
        grid, jobs = found.jobs, replace(jobs, is_planned=True, refused=frozenset(found.refused))
    if grid is not None and settings.seeds is not None:
        check_effect(grid, settings.seeds, lambda job: jobs.plan(job, compositions))
    record = {"command": command, "command_line": _command_line(command, asked), "swept": jobs.swept, "objectives": aims}
    record |= {"notes": found.notes} if found.notes else {}
    return Prepared(
        asked=asked,
        jobs=jobs,
        compositions=compositions,
        overrides=overrides,
        grid=grid,
        checked=[jobs.lacking.left_out(job) for job in samples(read)] if grid is None else grid,
        note=note,
        planned=found,
        record=record,
        logger=logger,
    )


def _jobs(
    command: str, run: RunCommand, asked: Asked, settings: SweepSettings, read: Sequence[Override], lacking: Lacking
) -> CommandJobs:
    hydras = asked.config.hydra
    return CommandJobs(
        command=command,
        run=run,
        folder=Path(os.path.relpath(hydras.sweep.dir)),
        settings=settings,
        config_name=asked.config_name,
        flags=flags(hydras.runtime.config_sources),
        swept=list(dict.fromkeys(one.get_key_element() for one in read if one.is_sweep_override())),
        lacking=lacking,
        is_alone=str(hydras.launcher._target_).endswith(HERE),
    )


def _command_line(command: str, asked: Asked) -> str:
    hydras = asked.config.hydra
    words = ["kvsim", command, "-m", *flags(hydras.runtime.config_sources), *hydras.overrides.hydra, *asked.overrides]
    return shlex.join(word for word in words if not word.startswith("hydra.mode="))


def _left_out(lacking: Lacking) -> str:
    """Return what to tell the user of a sweep whose jobs are chosen as it runs."""
    return f"{lacking}; left out there" if lacking.keys else ""


def _check_optimizer(sweeper: DictConfig, settings: SweepSettings) -> None:
    """Raise UsageError for settings with which an optimizer cannot sweep."""
    if settings.objective is None:
        raise UsageError("sweep.objective is missing: set what the sweeper optimizes, such as sweep.objective=hit_rate")
    if settings.seeds is not None:
        raise UsageError("sweep.seeds: an optimizing sweeper takes one result per configuration: leave it out")
    if settings.dry_run:
        raise UsageError("sweep.dry_run: an optimizing sweeper chooses its jobs as it runs: leave it out")


def _check_batches(sweeper: DictConfig, settings: SweepSettings) -> None:
    """Raise UsageError unless a launcher can be given as many jobs at a time as the settings of a grid say."""
    if sweeper.max_batch_size is not None and not Whole(1).holds(sweeper.max_batch_size):
        raise UsageError(refusal("hydra.sweeper.max_batch_size", Whole(1), sweeper.max_batch_size))


def run_jobs(sweep: Prepared, live: LivePage) -> None:
    """Run the jobs here if they are a grid for this process, or through Hydra."""
    if sweep.grid is not None and sweep.jobs.is_alone:
        remaining = Remaining(len(sweep.grid))
        for number, job in enumerate(sweep.grid):
            stop_if_interrupted()
            sweep.jobs.run_job(number, job, sweep.compositions, remaining.next())
            live.look()
        return
    from kvsim.sweeps.from_hydra import launch, optimize

    with live.watching():
        if sweep.grid is None:
            optimize(sweep.jobs, sweep.asked, sweep.overrides)
        else:
            launch(sweep.jobs, sweep.asked, sweep.grid, _at_a_time(sweep))


def list_jobs(sweep: Prepared) -> None:
    """Print the jobs of a sweep, marking those that have finished or cannot work."""
    index_of.cache_clear()
    finished = 0
    for number, job in enumerate(sweep.grid or []):
        name, state = str(number), ""
        try:
            plan = sweep.jobs.plan(job, sweep.compositions)
            name, result = place_job(sweep.jobs.folder, name, configuration_hash(plan, sweep.jobs.command))
            state = "" if result is None else "  finished before"
            finished += result is not None
        except UsageError as error:
            state = f"  cannot work: {' '.join(str(error).split())}"
        print(f"job {name}  {of_interest(job, sweep.jobs.swept)}{state}")
    print(f"{len(sweep.grid or [])} jobs in {sweep.jobs.folder}, {finished} finished before")


# --- the end -----------------------------------------------------------------------------------------------------------


def end(sweep: Prepared, live: LivePage, *, is_interrupted: bool = False) -> tuple[list[Run], int]:
    """Write and print what a sweep leaves at its end. Returns the failed jobs, and the number of the others."""
    folder = sweep.jobs.folder
    if sweep.jobs.command == "curve":
        print_notes(sweep)
        return _failures(folder), len(list(folder.glob("*/curve.json")))
    if sweep.jobs.command == "saturate":
        ended = _end_saturations(folder)
        print_notes(sweep)
        return ended
    runs = read_runs([folder], damaged_fail=True)
    if not is_interrupted:
        add_bounds(runs)
    files = live.finish(runs)
    print_runs(folder, runs, files)
    print_notes(sweep)
    if not is_interrupted:
        sweep.logger.log_sweep(folder, runs)
    failures = [run for run in runs if run.error is not None]
    return failures, len(runs) - len(failures)


def print_runs(folder: Path, runs: list[Run], files: list[str]) -> None:
    """Print the table of a sweep's runs and the names of the files about it; nothing if no run has finished."""
    from rich.console import Console

    from kvsim.report.comparison.compare import print_comparison
    from kvsim.report.comparison.pareto import front_of, print_front

    if any(run.result is not None for run in runs):
        console = Console()
        print_comparison(runs, console)
        if front := front_of(runs):
            print_front(front, console)
        console.print(f"\n{folder}: {' '.join(files)}", highlight=False)


def print_notes(sweep: Prepared) -> None:
    """Print which settings some jobs left out because they have no effect there."""
    for note in sweep.planned.notes:
        print(note, flush=True)


def _end_saturations(folder: Path) -> tuple[list[Run], int]:
    from rich.console import Console

    records, damaged = read_saturations(folder)
    if records:
        console = Console()
        sweep = read_sweep(folder)
        write_saturation(folder, records, command_line=sweep["command_line"], notes=sweep.get("notes", ()))
        print_saturation(records, console)
        console.print(f"\n{folder}: saturate.csv saturate.html", highlight=False)
    return [*_failures(folder), *damaged], len(records)


def _failures(folder: Path) -> list[Run]:
    """Return the failed jobs of a sweep's folder."""
    return [run for run in read_runs([folder], damaged_fail=True) if run.error is not None]


def _at_a_time(sweep: Prepared) -> int:
    """Return how many jobs a launcher is given at a time."""
    return sweep.asked.config.hydra.sweeper.max_batch_size or len(sweep.grid or [])
