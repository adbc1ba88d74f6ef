"""The jobs of a sweep before the first one runs: which settings have no effect where, and which jobs cannot run.

``tiers.disk.capacity=0,2TiB prefetch=threshold`` asks what a disk changes. Nothing is read ahead without one, so the first job
leaves the prefetch out. A setting that has no effect in any job is a mistake.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from kvsim.errors import NoEffect, UsageError
from kvsim.results.rates import count
from kvsim.sweeps.folder import failure_record, write_failure
from kvsim.sweeps.job import Ended

J = TypeVar("J")
"""A job, as the sweep has it."""
SHOWN = 12
"""The most numbers of jobs in a line."""


@dataclass(frozen=True, kw_only=True)
class Way(Generic[J]):
    """How a kind of sweep handles its jobs."""

    lines: Callable[[J], list[str]]
    """What a job sets, as ``KEY=VALUE``."""
    without: Callable[[J, set[str]], J]
    """The job without some of its lines."""
    plan: Callable[[J], object]
    """Makes the plan of a job, or raises UsageError."""


@dataclass(frozen=True, kw_only=True)
class Planned(Generic[J]):
    """The jobs of a sweep that are left, each once."""

    jobs: list[J]
    notes: list[str] = field(default_factory=list)
    """A sentence for each setting that some jobs leave out."""
    refused: dict[int, UsageError] = field(default_factory=dict)
    """Why jobs cannot run, by their place in ``jobs``."""


def planned(jobs: Sequence[J], way: Way[J], advance: Callable[[int], None] = lambda done: None) -> Planned[J]:
    """Plan all jobs of a grid. Raises NoEffect for a setting without effect in every job that has it.

    ``advance`` is called with the number of jobs that have been planned.
    """
    kept: dict[tuple[str, ...], J] = {}
    errors: dict[tuple[str, ...], UsageError] = {}
    idle: dict[str, list[NoEffect]] = {}
    for number, job in enumerate(jobs, 1):
        left, objections, error = effective(job, way)
        for line, objection in objections.items():
            idle.setdefault(line, []).append(objection)
        key = tuple(way.lines(left))
        kept.setdefault(key, left)
        if error is not None:
            errors[key] = error
        advance(number)
    uses = {line: sum(line in way.lines(job) for job in jobs) for line in idle}
    for line, found in idle.items():
        if len(found) == uses[line]:
            raise found[0]
    notes = [_note(line, found, uses[line]) for line, found in idle.items()]
    return Planned(
        jobs=list(kept.values()), notes=notes, refused={at: errors[key] for at, key in enumerate(kept) if key in errors}
    )


def effective(job: J, way: Way[J]) -> tuple[J, dict[str, NoEffect], UsageError | None]:
    """Return a job without the lines that have no effect on it, these lines with the reasons, and why it cannot run, if so."""
    objections: dict[str, NoEffect] = {}
    while True:
        try:
            way.plan(job)
        except NoEffect as error:
            lost = {line for line in way.lines(job) if _concerns(line, error.key)}
            if not lost:
                return job, objections, error
            objections |= dict.fromkeys(lost, error)
            job = way.without(job, lost)
        except UsageError as error:
            return job, objections, error
        else:
            return job, objections, None


def _concerns(line: str, key: str) -> bool:
    """Whether a line sets a setting, or one below it."""
    own = line.lstrip("+~").partition("=")[0]
    return own == key or own.startswith(f"{key}.")


def _note(line: str, found: Sequence[NoEffect], uses: int) -> str:
    return f"{line} is left out in {len(found)} of {uses} jobs, where it has no effect {found[0].why}"


def refusals(planned: Planned[J]) -> list[str]:
    """Say which jobs cannot run, and why: a line for each reason. Empty if all can."""
    if not planned.refused:
        return []
    reasons: dict[str, list[int]] = {}
    for number, error in planned.refused.items():
        reasons.setdefault(" ".join(str(error).split()), []).append(number)
    head = f"{len(planned.refused)} of {count(len(planned.jobs))} jobs cannot run; the others do:"
    return [head, *(f"  {_numbered(numbers)}: {reason}" for reason, numbers in reasons.items())]


def write_refusals(folder: Path, planned: Planned[J], texts: Callable[[J], list[str]]) -> dict[int, Ended]:
    """Write the ``error.json`` of each job that cannot run; ``texts`` is what a job sets. Returns how these jobs ended."""
    ended = {}
    for number, error in planned.refused.items():
        failure = failure_record(error, texts(planned.jobs[number]))
        ended[number] = Ended(write_failure(folder / str(number), failure), failure=failure)
    return ended


def _numbered(numbers: Sequence[int]) -> str:
    more = f", and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"job{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:SHOWN]))}{more}"
