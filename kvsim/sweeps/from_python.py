"""A sweep from Python: its jobs, in this process or in worker processes, each written into the sweep's folder."""

import itertools
import multiprocessing
import pickle
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvsim.engine.collector import freeze
from kvsim.errors import UsageError
from kvsim.plans.arguments import Arguments, arguments_of, is_policy
from kvsim.plans.construct import construct
from kvsim.plans.from_python import composed, is_described, plan_for
from kvsim.plans.plan import Plan
from kvsim.report.template import SHARED_SCRIPT
from kvsim.results.logger import Logger
from kvsim.results.result import RunRecord
from kvsim.run.execute import record_run
from kvsim.settings.configuration import check_overrides, config_loader
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.folder import begin_folder, failure_record, write_failure
from kvsim.sweeps.job import Ended, Job, run_job
from kvsim.sweeps.planning import Planned, Way, planned, write_refusals
from kvsim.trace.base import Trace
from kvsim.trace.memory import source_of

NO_GUARD = (
    'kvsim.sweep: the worker processes import the script that starts them: put the call under `if __name__ == "__main__":`, or '
    "leave workers out"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one job of a sweep sets."""

    number: int
    overrides: list[str]
    objects: dict[str, Any]
    """Policy objects by key; pickled where the job is sent to another process."""

    @property
    def arguments(self) -> Arguments:
        """What the job sets."""
        return Arguments(self.overrides, self.objects)

    @property
    def texts(self) -> list[str]:
        """Its overrides as text, those by objects included."""
        return [*self.overrides, *(_of_object(key, policy) for key, policy in self.objects.items())]

    def without(self, texts: set[str]) -> "Settings":
        """Return the job without some of its overrides."""
        objects = {key: policy for key, policy in self.objects.items() if _of_object(key, policy) not in texts}
        return replace(self, overrides=[line for line in self.overrides if line not in texts], objects=objects)


def _of_object(key: str, policy: Any) -> str:
    return f"{key}={policy!r}"


@dataclass(kw_only=True)
class SweepPlan:
    """A sweep before it runs."""

    command: str
    trace: Trace
    settings: dict[str, list[Any]]
    """Values by key: the runs are all combinations."""
    fixed: Arguments
    compositions: Compositions = field(default_factory=lambda: Compositions(config_loader()))
    jobs: list[Settings] = field(default_factory=list)
    planned: Planned[Settings] = field(default_factory=lambda: Planned(jobs=[]))
    """What was found when the jobs were planned."""
    line: str | None = None
    """The command that makes these runs, if it is no sweep's own."""

    def __post_init__(self) -> None:
        for number, values in enumerate(itertools.product(*self.settings.values())):
            own = arguments_of([dict(zip(self.settings, values, strict=True))], {})
            overrides, objects = [*self.fixed.overrides, *own.overrides], self.fixed.objects | own.objects
            self.jobs.append(Settings(number=number, overrides=overrides, objects=objects))

    def check(self) -> Logger:
        """Compose each value of each setting once and plan all jobs, before any job runs. Returns the logger.

        Raises UsageError.
        """
        seen: set[str] = set()
        for job in self.jobs:
            if not seen.issuperset(job.texts):
                check_overrides(job.overrides)
                config = self.compositions.compose(composed(self.trace, job.arguments)).config
                seen.update(job.texts)
        way = Way(lines=lambda job: job.texts, without=Settings.without, plan=self.plan_of)
        self.planned = planned(self.jobs, way)
        self.jobs = [replace(job, number=number) for number, job in enumerate(self.planned.jobs)]
        return construct(Logger, OmegaConf.to_container(config.logger, resolve=True), "logger")

    def plan_of(self, job: Settings) -> Plan:
        """Return the checked plan of a job. Raises UsageError."""
        return plan_for(self.command, self.trace, job.arguments, self.compositions.compose)

    def record(self) -> dict[str, Any]:
        """Return the content of ``sweep.json``."""
        swept = [f"{key}={','.join(map(_text, values))}" for key, values in self.settings.items()]
        words = ["kvsim", self.command, "-m", *composed(self.trace, self.fixed), *swept]
        line = self.line or (shlex.join(words) if source_of(self.trace) is None else None)
        record = {"command": self.command, "command_line": line, "swept": list(self.settings)}
        return record | ({"notes": self.planned.notes} if self.planned.notes else {})


def values_of(settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each setting of a sweep; a single value counts as a list of one. Raises UsageError."""
    found = {}
    for key, values in settings.items():
        is_one = isinstance(values, str | Mapping) or is_policy(values) or not isinstance(values, Iterable)
        found[key] = [values] if is_one else list(values)
        if not found[key]:
            raise UsageError(f"{key}: the sweep has no values for it; give at least one")
    return found


def run_sweep(plan: SweepPlan, folder: Path, workers: int, advance: Callable[[int], None]) -> dict[int, Ended]:
    """Run all jobs into ``folder``, which the caller has locked.

    Returns how each job ended, by its number, in order. A job whose result is in the folder already does not run again: its
    folder may have another name than its number. ``advance`` is called with the number of finished jobs. Raises UsageError if
    the sweep cannot begin or its workers died.
    """
    begin_folder(folder, plan.record())
    ended = write_refusals(folder, plan.planned, lambda job: job.texts)
    jobs = [job for job in plan.jobs if job.number not in ended]
    if workers > 1 and len(jobs) > 1:
        ended |= _in_workers(plan, jobs, folder, workers, advance)
    else:
        for job in jobs:
            ended[job.number] = run_one(folder, plan.command, plan.trace, job, plan.compositions)
            advance(len(ended))
    return dict(sorted(ended.items()))


def run_one(folder: Path, command: str, trace: Trace, settings: Settings, compositions: Compositions) -> Ended:
    """Run a job of a sweep."""
    is_named = is_described(settings.objects)
    is_in_program = bool(settings.objects) or source_of(trace) is not None
    line = None if is_in_program else shlex.join(["kvsim", command, *composed(trace, settings.arguments)])
    job = Job(
        number=settings.number,
        overrides=settings.texts,
        plan=lambda: plan_for(command, trace, settings.arguments, compositions.compose),
        is_described=is_named,
    )

    def run(plan: Plan) -> RunRecord:
        script = None if plan.logger.wants_page else f"../{SHARED_SCRIPT}"
        how: dict[str, Any] = {"command_line": line, "is_named": is_named}
        return record_run(command, plan, trace, group=folder.name, shared_script=script, **how).record

    return run_job(folder, command, job, run)


# --- worker processes ------------------------------------------------------------------------------------------------

_received: list[tuple[Trace, Compositions]] = []
"""The trace of the sweep and the configurations of its jobs, in a worker process."""


def refuse_without_guard() -> None:
    """End a worker process that, while it starts, runs the script that started it; the process that waits for it says why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)


def _check_main() -> None:
    """Raise UsageError if worker processes could not import the program, because it does not come from a file."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is not None and not Path(program).exists():
        raise UsageError(
            "kvsim.sweep: a program on standard input has no worker processes: save it to a file, or leave out workers"
        )


def _in_workers(
    plan: SweepPlan, jobs: Sequence[Settings], folder: Path, workers: int, advance: Callable[[int], None]
) -> dict[int, Ended]:
    """Run the jobs in new processes. Returns how they ended, by their numbers."""
    _check_main()
    sent = [_packed(job) for job in jobs]
    with tempfile.TemporaryDirectory(prefix="kvsim-") as place:
        trace = Path(place, "trace")
        trace.write_bytes(pickle.dumps(plan.trace, pickle.HIGHEST_PROTOCOL))
        pool = ProcessPoolExecutor(
            min(workers, len(sent)), multiprocessing.get_context("spawn"), initializer=_receive, initargs=(str(trace),)
        )
        try:
            futures = [pool.submit(_work, folder.absolute(), plan.command, job) for job in sent]
            for done, _ in enumerate(as_completed(futures), 1 + len(plan.jobs) - len(jobs)):
                advance(done)
            return {job.number: future.result() for job, future in zip(jobs, futures, strict=True)}
        except BrokenProcessPool as error:
            if not list(Path(place).glob("begun-*")):
                raise UsageError(NO_GUARD) from error
            raise UsageError("kvsim.sweep: a worker process died, perhaps for lack of memory: use fewer workers") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _receive(path: str) -> None:
    """Load the trace, when a worker process begins."""
    file = Path(path)
    file.with_name(f"begun-{multiprocessing.current_process().pid}").touch()
    _received[:] = [(pickle.loads(file.read_bytes()), Compositions(config_loader()))]
    freeze()


def _work(folder: Path, command: str, packed: bytes) -> Ended:
    number, overrides, objects, names = pickle.loads(packed)
    job = Settings(number=number, overrides=overrides, objects={})
    try:
        for key, (policy, own) in ((key, pickle.loads(policy)) for key, policy in objects.items()):
            if own:
                vars(policy).update(own)
            job.objects[key] = policy
    except Exception as error:
        record = failure_record(UsageError(f"{names}: a worker process cannot make it: {error}"), overrides)
        return Ended(write_failure(folder / str(number), record), failure=record)
    trace, compositions = _received[0]
    return run_one(folder, command, trace, job, compositions)


def _packed(job: Settings) -> bytes:
    """Pickle a job. A policy's own attributes are stored separately, because pickle loses those that a compiled class lacks."""
    objects = {}
    for key, policy in job.objects.items():
        where = sys.modules.get(type(policy).__module__)
        try:
            if type(policy).__module__ == "__main__" and not hasattr(where, "__file__"):
                raise pickle.PicklingError("its class is defined in a notebook or at a prompt")
            objects[key] = pickle.dumps((policy, dict(vars(policy)) if hasattr(policy, "__dict__") else None))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{key}={policy!r} cannot reach a worker process: {error}; define its class in a module, or leave out workers"
            ) from error
    return pickle.dumps((job.number, job.overrides, objects, ", ".join(job.texts[len(job.overrides) :])))


def _text(value: Any) -> str:
    if is_policy(value):
        return repr(value)
    (line,) = arguments_of([{"value": value}], {}).overrides
    return line.removeprefix("value=")
