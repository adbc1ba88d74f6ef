"""Sweeps whose jobs Hydra starts: those that an optimizer chooses, and those that a launcher runs in other processes."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from kvsim.results.records import read_failure
from kvsim.settings.configuration import Asked, config_loader, only_known_errors
from kvsim.settings.sources import use
from kvsim.sweeps.command_jobs import CommandJobs, failure_line, of_interest
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.objective import Objective

SAME_TERMINAL = (".BasicLauncher", ".JoblibLauncher", ".RayLauncher")
"""Launchers whose jobs write to the sweep's own terminal."""
WATCH_S = 0.5


def optimize(jobs: CommandJobs, asked: Asked, overrides: Sequence[str]) -> None:
    """Run the jobs that Hydra's sweeper chooses. Raises UsageError."""
    with _started(jobs, asked) as parts:
        Plugins.instance().instantiate_sweeper(**parts).sweep(arguments=list(overrides))


def launch(jobs: CommandJobs, asked: Asked, grid: Sequence[Sequence[str]], most: int) -> None:
    """Run the jobs of a grid by Hydra's launcher, at most so many at a time. Raises UsageError."""
    with _started(jobs, asked) as parts:
        launcher = Plugins.instance().instantiate_launcher(**parts)
        for first in range(0, len(grid), most):
            for ended in launcher.launch(grid[first : first + most], initial_job_idx=first):
                _ = ended.return_value  # raises the job's error, which is none of the run's: those are in its folder


@dataclass(frozen=True)
class HydraJob:
    """Runs a job in the process in which Hydra calls it."""

    jobs: CommandJobs
    sweep: str = field(default_factory=lambda: uuid4().hex)
    """Tells sweeps apart in a process that outlives one."""

    def __call__(self, config: DictConfig) -> Objective:
        """Run the job that Hydra's own part of the configuration describes; the run's part is composed here."""
        own = HydraConfig.get()
        use(own.runtime.config_sources)
        overrides = [str(override) for override in own.overrides.task]
        return self.jobs.run_job(int(own.job.num), overrides, _compositions(self.sweep, self.jobs.config_name))


@lru_cache(maxsize=1)
def _compositions(sweep: str, config_name: str) -> Compositions:
    return Compositions(config_loader(), config_name)


class JobLoader(ConfigLoaderImpl):
    """Gives Hydra the configuration of a job without composing it: ``HydraJob`` does that."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return Hydra's part of the sweep's configuration with the overrides of a job."""
        config = OmegaConf.masked_copy(master_config, "hydra")
        config.hydra.overrides.task = list(sweep_overrides)
        return config


@contextmanager
def _started(jobs: CommandJobs, asked: Asked) -> Iterator[dict[str, Any]]:
    """Yield what a plugin of Hydra is made of. Jobs need no folder from Hydra."""
    config = deepcopy(asked.config)
    OmegaConf.set_readonly(config.hydra, None)
    config.hydra.sweep.update(dir=str(jobs.folder), subdir=".")
    given = [str(word) for word in config.hydra.overrides.hydra if not str(word).startswith("hydra.mode=")]
    with only_known_errors(given or asked.overrides), _failures_shown(jobs, str(config.hydra.launcher._target_)):
        context = HydraContext(config_loader=JobLoader(asked.loader.get_search_path()), callbacks=Callbacks(config))
        yield {"hydra_context": context, "task_function": HydraJob(jobs), "config": config}


@contextmanager
def _failures_shown(jobs: CommandJobs, launcher: str) -> Iterator[None]:
    """Report failed jobs as they fail, for launchers whose jobs do not write to this terminal."""
    if launcher.endswith(SAME_TERMINAL):
        yield
        return
    watch = FailureWatch(jobs.folder, jobs.swept)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class FailureWatch(threading.Thread):
    """Looks for new ``error.json`` files in a sweep's folder."""

    def __init__(self, folder: Path, swept: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.folder, self.swept = folder, swept
        self.is_over = threading.Event()
        self.reported: set[Path] = set()

    def run(self) -> None:
        while not self.is_over.wait(WATCH_S):
            self.say()

    def say(self) -> None:
        """Report new failures."""
        for path in sorted(set(self.folder.glob("*/error.json")) - self.reported):
            self.reported.add(path)
            record = read_failure(path.parent)
            varied = of_interest(record["overrides"], self.swept)
            print(failure_line(path.parent.name, record, varied), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Stop after a last check."""
        self.is_over.set()
        self.join()
        self.say()
