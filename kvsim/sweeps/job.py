"""One job of a sweep: the same for a grid on the command line, from Python, of an optimizer and in a launcher's process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.engine.collector import without_garbage_collector
from kvsim.plans.plan import Plan
from kvsim.results.result import RunRecord
from kvsim.run.execute import own_folder
from kvsim.run.fingerprint import configuration_hash
from kvsim.run.interrupts import stop_if_interrupted
from kvsim.sweeps.folder import failure_record, index_of, place_job, write_failure
from kvsim.sweeps.live import note_end
from kvsim.sweeps.objective import Objective, objectives


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job runs."""

    number: int
    overrides: list[str]
    """As text, for the record of a failure."""
    plan: Callable[[], Plan]
    """Makes the plan; an error in it fails the job."""
    is_described: bool = True
    """Whether the configuration describes the run completely. If not, a later sweep cannot tell that it has finished."""


class Ended(NamedTuple):
    """How a job ended."""

    name: str
    """Of its folder."""
    objective: Objective = None
    failure: dict[str, Any] | None = None
    """The ``error.json`` of a job that failed."""
    is_earlier: bool = False
    """Whether an earlier sweep had finished it."""


def run_job(folder: Path, command: str, job: Job, run: Callable[[Plan], RunRecord]) -> Ended:
    """Run a job of the sweep in ``folder`` unless its result is there; write a failure to ``error.json``.

    ``run`` runs the command with the job's plan, and writes and logs its result.
    """
    ended = _run_job(folder, command, job, run)
    note_end(folder, is_earlier=ended.is_earlier)
    return ended


@without_garbage_collector()
def _run_job(folder: Path, command: str, job: Job, run: Callable[[Plan], RunRecord]) -> Ended:
    name = str(job.number)
    try:
        plan = job.plan()
        config_hash = configuration_hash(plan, command) if job.is_described else f"object-{job.number}"
        name, finished = place_job(folder, name, config_hash)
        if finished is not None:
            return Ended(name, objectives(finished, plan.sweep), is_earlier=True)
        plan = replace(plan, output=folder / name)
        with own_folder(plan, command, folder.name):
            record = run(plan)
        if hash_of_result := record.get("config_hash"):
            index_of(folder.absolute())[hash_of_result] = name
        return Ended(name, objectives(record, plan.sweep))
    except Exception as error:
        stop_if_interrupted(error)
        failure = failure_record(error, job.overrides)
        return Ended(write_failure(folder / name, failure), failure=failure)
