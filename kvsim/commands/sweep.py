"""A multirun: its jobs in whatever process a launcher runs them, what was finished before, and what is written at its end."""

import copyreg
import json
import os
import pickle
import re
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvsim.build import Plan, SweepSettings, build_run, check_output, sweep_settings
from kvsim.commands.bounds import complete, compute_once
from kvsim.commands.mistake import Mistake
from kvsim.commands.sweep_loader import SweepLoader
from kvsim.engine.collector import without_garbage_collector
from kvsim.errors import UsageError
from kvsim.fingerprint import configuration_hash
from kvsim.report.folder import prepare_folder, replacing
from kvsim.report.result import RunRecord
from kvsim.report.runs import Run, read_runs
from kvsim.suggest import closest

Objective = float | list[float] | None
HASH = re.compile(rb'"config_hash": "([0-9a-f]{32})"')
SAME_TERMINAL = (".BasicLauncher", ".JoblibLauncher", ".RayLauncher")
"""Launchers whose jobs write to the terminal of the sweep."""
_check_of_hydra = Sweeper.validate_batch_is_legal
WATCH_S = 0.5
HEAD_BYTES = 400
"""The hash of a finished job stands in so many leading bytes of its result."""


class Listed(BaseException):
    """The jobs have been listed, and nothing is to be run."""


class SweepJob(NamedTuple):
    """A job among the others of its sweep."""

    group: str
    """The sweep's name."""
    is_alone: bool
    """Whether no other job runs at the same time."""


@dataclass
class Begun:
    """A sweep under way in this process, which launches its jobs."""

    folder: Path
    command: str
    settings: SweepSettings
    watch: "FailureWatch | None"


class FailureWatch(threading.Thread):
    """Says which jobs have failed as soon as they have, where these write to other places than this terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.is_over = threading.Event()
        self.said: set[Path] = set()

    def run(self) -> None:
        while not self.is_over.wait(WATCH_S):
            self.say()

    def say(self) -> None:
        """Say what has not been said."""
        for path in sorted(set(self.folder.glob("*/error.json")) - self.said):
            self.said.add(path)
            record = json.loads(path.read_text())
            print(failure_line(path.parent.name, record, _said(self.folder, record["overrides"])), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End, after a last look."""
        self.is_over.set()
        self.join()
        self.say()


_begun: list[Begun] = []
"""At most one: Hydra tells a callback of the beginning, and nobody of an interrupt."""


def forget_sweep() -> None:
    """Nothing has begun: a sweep that a mistake ended before its first job is not reported by the next command."""
    _begun.clear()
    for kind in (ConfigStore, DictConfig):
        copyreg.dispatch_table.pop(kind, None)


def send_little(config: DictConfig) -> None:
    """Have launchers send with each job what is the same for all of them as bytes, made once, and made use of once a process.

    That is the sweep's configuration. Those that plugins have registered are not sent: they register them where a job runs.
    """
    pickled = pickle.dumps(config)

    def reduce(other: DictConfig) -> Any:
        return (_received, (pickled,)) if other is config else other.__reduce_ex__(2)

    copyreg.pickle(DictConfig, reduce)
    copyreg.pickle(ConfigStore, lambda _store: (ConfigStore.instance, ()))


@lru_cache(maxsize=1)
def _received(pickled: bytes) -> DictConfig:
    config: DictConfig = pickle.loads(pickled)
    return config


class SweepCallback(Callback):
    """Is told by Hydra when a multirun begins, in the process that launches its jobs, and of each job in the job's process."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            begin_sweep(config)
        except UsageError as error:
            raise Mistake(error) from error
        except Exception as error:  # Hydra would only warn, and go on
            traceback.print_exc()
            raise SystemExit(1) from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep the plugins of this process: launchers would have Hydra import them all again before its next job."""
        plugins = Plugins.instance()
        found = plugins.discover(), plugins.get_stats()
        setattr(Plugins, "_scan_all_plugins", staticmethod(lambda modules: found))  # noqa: B010  (as below)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Leave the configuration out of what a launcher sends back: a sweeper reads the returned value alone."""
        job_return.cfg = job_return.hydra_cfg = None


def begin_sweep(config: DictConfig) -> None:
    """Prepare the sweep's folder; or list the jobs and end with Listed. Raises UsageError."""
    settings = sweep_settings(OmegaConf.to_container(config.sweep, resolve=True))
    folder, command = Path(os.path.relpath(config.hydra.sweep.dir)), str(config.hydra.job.name)
    check_objective(settings)
    if _is_optimizing(config) and settings.objective is None:
        raise UsageError("sweep.objective is missing: say what the sweeper is to optimize, as sweep.objective=hit_rate")
    if settings.dry_run:
        index_of.cache_clear()
        list_jobs(config, folder, command)
        raise Listed
    check_output(folder)
    prepare_folder(folder)
    index_of.cache_clear()
    for left in (*folder.glob("*/error.json"), *folder.glob("bounds/*.begun")):
        left.unlink()
    arguments = [str(override) for override in config.hydra.overrides.task]
    words = ["kvsim", command, "-m", *config.hydra.overrides.hydra, *arguments]
    words = [word for word in words if not word.startswith("hydra.mode=")]
    with replacing(folder / "sweep.json") as file:
        record = {"command": command, "command_line": shlex.join(words), "swept": _swept(config, arguments)}
        file.write(json.dumps(record, indent=2).encode())
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    hydra.config_loader = SweepLoader(hydra.config_loader.get_search_path())
    with suppress(pickle.PicklingError):  # of a class of a plugin that was imported twice
        send_little(config)
    setattr(Sweeper, "validate_batch_is_legal", _try_each_choice)  # noqa: B010  (types do not allow the assignment)
    watch = None
    if not str(config.hydra.launcher._target_).endswith(SAME_TERMINAL):
        watch = FailureWatch(folder)
        watch.start()
    _begun[:] = [Begun(folder, command, settings, watch)]


def _try_each_choice(sweeper: Sweeper, batch: Sequence[Sequence[str]]) -> None:
    """Compose a configuration with each choice from a group, and with each key that is set, once.

    Hydra would compose those of all jobs before it begins the first.
    """
    assert sweeper.hydra_context is not None and sweeper.config is not None
    loader = sweeper.hydra_context.config_loader
    if not isinstance(loader, SweepLoader):  # another program's sweep in this process
        _check_of_hydra(sweeper, batch)
        return
    read = cache(lambda line: OverridesParser.create().parse_overrides([line])[0])
    what = cache(lambda line: read(line).key_or_group if loader.sets_value(read(line)) else line)
    tried: set[str] = set()
    for job in batch:
        tries = {what(line) for line in job}
        if not tries <= tried:
            loader.load_sweep_config(master_config=sweeper.config, sweep_overrides=list(job))
            tried |= tries
    loader.send()


def end_sweep(*, is_interrupted: bool = False) -> None:
    """Write the table and the page over all jobs in the folder of the sweep that this process has begun, if it has.

    Raises UsageError if jobs have failed.
    """
    if not _begun:
        return
    sweep = _begun.pop()
    if sweep.watch:
        sweep.watch.stop()
    if sweep.command == "curve":
        failures = list(read_failures(sweep.folder))
        finished = len(list(sweep.folder.glob("*/curve.json")))
    else:
        runs = write_sweep(sweep.folder, with_bounds=not is_interrupted)
        finished = sum(run.error is None for run in runs)
        failures = [run for run in runs if run.error is not None]
    if failures and not is_interrupted:
        not_begun = ", and no others were begun (sweep.fail_fast)" if sweep.settings.fail_fast else ""
        raise SweepError(failures, f"{len(failures)} of {finished + len(failures)} jobs failed{not_begun}")


class SweepError(UsageError):
    """Jobs of a sweep have failed; exit code 1 if one of them by a bug."""

    def __init__(self, failures: list[Run], message: str) -> None:
        first = failures[0]
        super().__init__(f"{message}; the first is job {first.name}: {first.error}")
        self.exit_code = 1 if any(run.is_crash for run in failures) else 2


# --- a job -----------------------------------------------------------------------------------------------------------


@without_garbage_collector()
def run_sweep_job(command: str, run: Callable[..., RunRecord], cfg: DictConfig) -> Objective:
    """Run the job at hand unless it is finished; a failure is reported in one line, and kept in ``error.json``.

    Returns the objectives; None where there are none.
    """
    job = HydraConfig.get()
    number, overrides = str(job.job.num), [str(override) for override in job.overrides.task]
    folder = Path(os.path.relpath(job.sweep.dir))
    cfg.output = os.path.relpath(job.runtime.output_dir)
    said = _said(folder, overrides)
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
    """The name of a job's folder in the sweep's, and its result if it is finished.

    A job is finished where the result of its configuration is; if the folder of its number has that of another one, which
    an earlier sweep has left, it gets one with part of its hash in the name.
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
    """The finished jobs of a sweep's folder: from the hash of a configuration to a job's name. Read once a process."""
    index = {}
    for path in sorted(folder.glob("*/result.json")):
        with path.open("rb") as file:
            if found := HASH.search(file.read(HEAD_BYTES)):
                index[found[1].decode()] = path.parent.name
    return index


def objectives(result: RunRecord, settings: SweepSettings) -> Objective:
    """What ``sweep.objective`` names, of a result; a list if it names several. Raises UsageError for what has no number."""
    if settings.objective is None:
        return None
    numbers = [objective(result, name) for name in settings.objective]
    return numbers if len(numbers) > 1 else numbers[0]


def objective(result: RunRecord, name: str) -> float:
    """One number of a result by its path, as ``ttft_s.p99``; ``capacity_bytes`` are the bytes of all tiers together."""
    if name == "capacity_bytes":
        capacities = [tier["capacity_pages"] for tier in result["tiers"].values()]
        if None in capacities:
            raise UsageError("sweep.objective: capacity_bytes of an unlimited tier is no number: give it a capacity")
        return float(sum(capacities) * result["page_bytes"])
    value: Any = result
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            known = ", ".join(value) if isinstance(value, dict) else "no parts"
            raise UsageError(f"sweep.objective: result.json has no {name}; {part!r} is not among {known}")
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = ", ".join(f"{name}.{key}" for key in value) if isinstance(value, dict) else f"{value!r} in this run"
        raise UsageError(f"sweep.objective: {name} is no number: {what}")
    return float(value)


OBJECTIVES = (
    "hit_rate", "page_hit_rate", "hit_tokens", "hit_pages", "rejected", "ttft_s", "tpot_s", "e2e_s", "throughput", "links",
    "tiers", "prefetch", "placement", "checkpoints", "retractions", "simulated_s", "requests_per_s", "wall_s", "capacity_bytes",
)  # fmt: skip


def check_objective(settings: SweepSettings) -> None:
    """Raise UsageError for an objective that no result has."""
    for name in settings.objective or ():
        first = name.split(".")[0]
        if first not in OBJECTIVES:
            hint = closest(first, OBJECTIVES) or f"; choose from {', '.join(OBJECTIVES)}"
            raise UsageError(f"sweep.objective: result.json has no number {name}{hint}")


def outcome_line(result: RunRecord) -> str:
    """A run in a few words."""
    rate = "no prompt served" if result["hit_rate"] is None else f"hit rate {result['hit_rate']:.2%}"
    p99 = result["ttft_s"]["p99"]
    waiting = "" if p99 is None else f", ttft p99 {p99:.3g} s"
    return f"{rate}{waiting}, {result['wall_s']:.3g} s"


def _report_failure(
    folder: Path, number: str, overrides: list[str], said: str, error: Exception, plan: Plan | None, group: str
) -> None:
    """Say at once what has failed, keep it for the sweep's end, and tell the logger."""
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
    """What is said of a failed job."""
    more = f", traceback in {number}/error.json" if record["is_crash"] else ""
    return f"kvsim: job {number} failed: {record['error']} ({said}{more})"


def read_failures(folder: Path) -> Iterator[Run]:
    """The failed jobs of a sweep's folder."""
    return (run for run in read_runs([folder]) if run.error is not None)


# --- the whole sweep -------------------------------------------------------------------------------------------------


def write_sweep(folder: Path, *, with_bounds: bool) -> list[Run]:
    """Write ``sweep.csv`` and ``report.html`` over all jobs in a folder, and print their table. Returns the jobs."""
    from rich.console import Console

    from kvsim.report.compare import comparison_csv, print_comparison
    from kvsim.report.compare_html import render_comparison

    runs = read_runs([folder])
    if with_bounds:
        add_bounds(runs)
    finished = [run for run in runs if run.result is not None]
    files = ["sweep.csv"]
    with replacing(folder / "sweep.csv") as file:
        file.write(comparison_csv(runs).encode())
    if finished:
        command_line = json.loads((folder / "sweep.json").read_text())["command_line"]
        with replacing(folder / "report.html") as file:
            file.write(render_comparison(runs, command_line).encode())
        console = Console()
        print_comparison(runs, console)
        files.append("report.html")
        console.print(f"\n{folder}: {' '.join(files)}", highlight=False)
    return runs


def add_bounds(runs: list[Run]) -> None:
    """Give each run the bounds to compare it with, computed now where no job has. Those that cannot be are left out."""
    for run in runs:
        names = (run.result or {}).get("bounds") or {}
        missing = [kind for kind in names if kind not in run.bounds]
        if missing and run.result is not None:
            with suppress(UsageError):
                plan = plan_of(run.result)
                for kind, bound in complete(run.bounds_folder, plan).items():
                    for other in runs:
                        if ((other.result or {}).get("bounds") or {}).get(kind) == names[kind]:
                            other.bounds[kind] = bound


def plan_of(result: RunRecord) -> Plan:
    """The plan of a run that was recorded. Raises UsageError if its configuration is not one any more."""
    config = result["config"] | {"output": ".", "sweep": {}, "validate": {}}
    return build_run(OmegaConf.create(config), command=result["command"])


# --- before it begins ------------------------------------------------------------------------------------------------


def list_jobs(config: DictConfig, folder: Path, command: str) -> None:
    """Print the jobs of a sweep, and which of them are finished or cannot work. Raises UsageError."""
    if _is_optimizing(config):
        raise UsageError("sweep.dry_run: an optimizing sweeper chooses its jobs as it goes: leave it out")
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    loader = GlobalHydra.instance().config_loader()
    parameters = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides([*parameters, *config.hydra.overrides.task])
    swept = {override.get_key_element() for override in overrides if override.is_sweep_override()}
    finished = 0
    jobs = BasicSweeper.split_arguments(overrides, None)[0]
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
        print(f"job {name}  {_of_interest(job, swept)}{state}")
    print(f"{len(jobs)} jobs in {folder}, {finished} finished before")


def _is_optimizing(config: DictConfig) -> bool:
    return "BasicSweeper" not in str(config.hydra.sweeper._target_)


def _swept(config: DictConfig, arguments: list[str]) -> list[str]:
    """The keys that differ from job to job."""
    overrides = OverridesParser.create().parse_overrides(arguments)
    parameters = OmegaConf.to_container(config.hydra.sweeper).get("params") or {}  # type: ignore[union-attr]
    return [*parameters, *(override.get_key_element() for override in overrides if override.is_sweep_override())]


def _said(folder: Path, overrides: list[str]) -> str:
    """A job by what sets it apart."""
    try:
        swept = json.loads((folder / "sweep.json").read_text())["swept"]
    except OSError:
        swept = []
    return _of_interest(overrides, swept)


def _of_interest(overrides: list[str], swept: Any) -> str:
    return " ".join(override for override in overrides if override.split("=")[0] in swept) or " ".join(overrides)
