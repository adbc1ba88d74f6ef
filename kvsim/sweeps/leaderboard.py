"""``kvsim leaderboard``: the policies of a family, ranked by runs on every trace with every capacity of the GPU tier.

The runs on a trace are a sweep, in a folder of their own; the command and the Python API call this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvsim.errors import NoEffect, UsageError
from kvsim.files.locking import Lock
from kvsim.plans.arguments import Arguments
from kvsim.report.leaderboard import write_leaderboard
from kvsim.results.fields import SCHEMA
from kvsim.results.result import RunRecord, installed_versions, plain
from kvsim.results.runs import Run, read_runs
from kvsim.run.execute import Watch, unwatched
from kvsim.settings.unused_settings import WHY, WITHOUT_EFFECT, given, keys_of
from kvsim.sweeps.contestants import CAPACITY, Asked, Entry, Ground, baseline_of, entries, grounds
from kvsim.sweeps.from_python import Settings, SweepPlan, run_sweep
from kvsim.sweeps.job import Ended
from kvsim.sweeps.measures import MEASURES, Columns, counted
from kvsim.sweeps.standings import Cell, as_record, noise_of, standings, verdict

Played = dict[tuple[str, str], Run]
"""The runs on a trace, by policy and capacity."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """All runs on a trace."""

    ground: Ground
    playing: Sequence[Entry]
    plan: SweepPlan


def play_leaderboard(asked: Asked, folder: Path, watch: Watch = unwatched) -> RunRecord:
    """Play all, write the folder, and return the content of ``leaderboard.json``.

    ``watch`` takes the number of runs. A run that is in the folder already is not played again. Raises UsageError, before any run
    for whatever can be checked then.
    """
    for name in WITHOUT_EFFECT["leaderboard"]:
        if key := given(keys_of(asked.overrides), name):
            raise NoEffect(key, f"on kvsim leaderboard{WHY.get(('leaderboard', name), '')}", "leave it out")
    baseline = baseline_of(asked)
    playing = entries(asked, baseline)
    if asked.bound:
        playing.append(Entry(asked.bound, [f"{asked.settings.family}={asked.bound}"]))
    matches = [Match(ground=ground, playing=playing, plan=_sweep(asked, ground, playing)) for ground in grounds(asked)]
    for match in matches:
        match.plan.check()
        _check_baseline(match, playing[0])
    with Lock(folder):
        with watch(sum(len(match.plan.jobs) for match in matches)) as advance:
            cells = _played(asked, matches, baseline, folder, advance)
        record = _record(asked, cells, baseline, matches)
        write_leaderboard(folder, record)
    return record


def _check_baseline(match: Match, baseline: Entry) -> None:
    """Raise UsageError if the policy with which all are compared cannot play."""
    for at, error in match.plan.planned.refused.items():
        if entry_of(match, match.plan.jobs[at]) is baseline:
            raise error


def entry_of(match: Match, job: Settings) -> Entry:
    """Return the policy that a job chooses. Other settings of the job, which have no effect on it, may have been left out."""
    own = set(job.overrides)
    return max((one for one in match.playing if own.issuperset(one.lines)), key=lambda one: len(one.lines))


def looking_ahead(match: Match) -> list[str]:
    """Return the policies that know the future of the trace."""
    found = []
    for entry in match.playing:
        lines = [*match.ground.fixed, *entry.lines, f"{CAPACITY}={match.ground.capacities[0]}"]
        try:
            plan = match.plan.plan_of(Settings(number=0, overrides=lines, objects={}))
        except UsageError:
            continue
        if plan.prefetch.needs_future or any(tier.eviction.needs_future for tier in plan.tiers):
            found.append(entry.name)
    return found


def _sweep(asked: Asked, ground: Ground, playing: Sequence[Entry]) -> SweepPlan:
    plan = SweepPlan(
        command=asked.command,
        trace=ground.trace,
        settings={asked.settings.family: [entry.name for entry in playing], CAPACITY: list(ground.capacities)},
        fixed=Arguments(ground.fixed, {}),
        line=asked.command_line,
    )
    cells = [(entry, capacity) for entry in playing for capacity in ground.capacities]
    plan.jobs = [
        Settings(number=number, overrides=[*ground.fixed, *entry.lines, f"{CAPACITY}={capacity}"], objects={})
        for number, (entry, capacity) in enumerate(cells)
    ]
    return plan


def _played(
    asked: Asked, matches: Sequence[Match], baseline: str, folder: Path, advance: Callable[[int], None] | None
) -> list[Cell]:
    """Play all and return what came out."""
    cells: list[Cell] = []
    done = 0
    for number, match in enumerate(matches, start=1):
        place = folder / str(number)
        with Lock(place):
            ended = run_sweep(match.plan, place, asked.settings.workers, partial(_advance, advance, done))
            cells += _cells(asked, match, baseline, _runs(place, match, ended), place.name)
        done += len(match.plan.jobs)
    return cells


def _advance(advance: Callable[[int], None] | None, before: int, ended: int) -> None:
    if advance is not None:
        advance(before + ended)


def _runs(place: Path, match: Match, ended: Mapping[int, Ended]) -> Played:
    """Read the runs of a trace. The folder may have those of earlier leaderboards, too."""
    runs = {run.name: run for run in read_runs([place], damaged_fail=True)}
    found = {}
    for job in match.plan.jobs:
        capacity = next(one for one in match.ground.capacities if f"{CAPACITY}={one}" in job.overrides)
        found[entry_of(match, job).name, capacity] = runs[ended[job.number].name]
    return found


def _cells(asked: Asked, match: Match, baseline: str, played: Played, group: str) -> list[Cell]:
    """Return what came out on a trace."""
    found = []
    for capacity in match.ground.capacities:
        base = played[baseline, capacity]
        columns = counted(base)
        rows = [_cell(asked, played[one.name, capacity], base, columns, group) for one in match.playing]
        named = [
            replace(row, policy=one.name, trace=match.ground.name, capacity=capacity)
            for one, row in zip(match.playing, rows, strict=True)
        ]
        most = next((row.gain for row in named if row.policy == asked.bound), None)
        room = most if most is not None and most > 0 else None
        found += [row if room is None or row.gain is None else replace(row, most=room, headroom=row.gain / room) for row in named]
    return found


def _cell(asked: Asked, run: Run, base: Run, columns: Columns | None, group: str) -> Cell:
    """Return how a run compares with the baseline's, whose requests have these columns; its place is not yet known."""
    own, measure = counted(run), MEASURES[asked.measure]
    if run.result is None or own is None:
        return Cell(reason=run.error or "it failed")
    wall_s, played = run.result["wall_s"], run.result["requests"] + run.result["warmup_requests"]
    cell = Cell(value=measure.value(own), us_per_request=1e6 * wall_s / max(1, played), folder=f"{group}/{run.name}")
    if base.result is None or columns is None:
        return replace(cell, reason=f"the baseline failed: {base.error}")
    try:
        gain = measure.gain(own, columns)
    except ValueError:
        return replace(cell, reason="no request that counts was served, by this policy and the baseline")
    return replace(cell, gain=gain.value, noise=noise_of(gain), cost=wall_s / max(base.result["wall_s"], 1e-9))


def _record(asked: Asked, cells: Sequence[Cell], baseline: str, matches: Sequence[Match]) -> RunRecord:
    """Return the content of ``leaderboard.json``."""
    named = [one.name for one in matches[0].playing if one.name != asked.bound]
    bound = asked.bound if any(cell.policy == asked.bound and cell.value is not None for cell in cells) else None
    cells = [cell for cell in cells if cell.policy in (*named, bound)]
    places = standings(cell for cell in cells if cell.policy != bound)
    look_ahead = looking_ahead(matches[0])
    best, why = verdict(places, baseline, look_ahead)
    record = {
        "schema": SCHEMA,
        "command": "leaderboard",
        "command_line": asked.command_line,
        "status": "complete",
        "versions": installed_versions(),
        "family": asked.settings.family,
        "measure": asked.measure,
        "runs": asked.command,
        "baseline": baseline,
        "bound": bound,
        "look_ahead": [name for name in look_ahead if name in named],
        "best": best,
        "verdict": why,
        "traces": [match.ground.record() for match in matches],
        "standings": as_record(places),
        "cells": as_record(cells),
        "notes": [note for match in matches for note in match.plan.planned.notes],
    }
    return {name: plain(value) for name, value in record.items()}
