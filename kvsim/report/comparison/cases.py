"""Runs grouped into cases: a case is a configuration, with one run or with a run for each of several seeds."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsim.report.comparison.differing import settings_of
from kvsim.results.fields import FIELDS
from kvsim.results.measures import Measure
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run
from kvsim.results.statistics import Mean, mean_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A configuration and its runs, which differ in the seed only, in order of seed."""

    runs: list[Run]
    settings: dict[str, str]
    """Settings by key; ``seed`` is a text that names all seeds."""

    @property
    def results(self) -> list[RunRecord]:
        return [run.result for run in self.runs if run.result is not None]

    @property
    def first(self) -> RunRecord:
        """The result of the first seed."""
        return self.results[0]

    @property
    def name(self) -> str:
        """The name of the run, or the numbers of several runs: ``0-4`` or ``0,5,10``."""
        return listed([run.name for run in self.runs])

    def by_seed(self, number: Callable[[RunRecord], float | None]) -> dict[int, float]:
        """Return a number of each run, by seed, where it is known."""
        values = {result["seed"]: number(result) for result in self.results}
        return {seed: value for seed, value in values.items() if value is not None}

    def mean(self, measure: Measure) -> Mean | None:
        """Return the mean of a measure over the seeds; None where no run has it."""
        return mean_of(list(self.by_seed(measure.of).values()))

    def bound(self, kind: str, key: str = "hit_rate") -> dict[int, float]:
        """Return a bound's rate for each run, by seed, where it is known."""
        found = {result["seed"]: run.bounds[kind].get(key) for run, result in self._pairs() if kind in run.bounds}
        return {seed: rate for seed, rate in found.items() if rate is not None}

    def bound_name(self, kind: str) -> str:
        """Return what identifies the case's bounds of a kind; empty if none is known."""
        return " ".join(result["bounds"][kind] for run, result in self._pairs() if kind in run.bounds)

    def outcome(self) -> str:
        """Return all results of the runs as text: cases with equal texts have equal results."""
        inputs = {row.name for row in FIELDS if not row.is_outcome}
        outcomes = [{name: value for name, value in result.items() if name not in inputs} for result in self.results]
        return json.dumps(outcomes, sort_keys=True)

    @property
    def is_same_for_all_seeds(self) -> bool:
        """Whether there are several seeds, and they make no difference."""
        outcomes = {Case(runs=[run], settings={}).outcome() for run in self.runs}
        return len(self.runs) > 1 and len(outcomes) == 1

    def _pairs(self) -> Iterator[tuple[Run, RunRecord]]:
        return zip(self.runs, self.results, strict=True)


def cases_of(runs: Sequence[Run], *, by_run: bool = False) -> list[Case]:
    """Group recorded runs that differ in nothing but the seed. Runs with equal seeds too are cases of their own.

    ``by_run`` makes a case of each run.
    """
    results = [run.result for run in runs if run.result is not None]
    settings = [settings_of(result) for result in results]
    if by_run:
        return [Case(runs=[run], settings=own) for run, own in zip(runs, settings, strict=True)]
    seeds = [str(result["seed"]) for result in results]
    followers = _followers(settings, seeds)
    groups: dict[tuple[Any, ...], list[int]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for place, own in enumerate(settings):
        rest = tuple(sorted((key, value) for key, value in own.items() if key not in followers))
        seen[rest, seeds[place]] = seen.get((rest, seeds[place]), 0) + 1
        groups.setdefault((rest, seen[rest, seeds[place]]), []).append(place)
    cases = []
    for places in groups.values():
        places.sort(key=lambda place: int(seeds[place]))
        named = {key: value for key, value in settings[places[0]].items() if key not in followers}
        cases.append(Case(runs=[runs[place] for place in places], settings=named | {"seed": listed([seeds[p] for p in places])}))
    return cases


def _followers(settings: Sequence[Mapping[str, str]], seeds: Sequence[str]) -> set[str]:
    """Return the keys that hold the run's seed in every run: ``seed``, and ``trace.seed`` unless it was set."""
    keys = {key for own in settings for key in own if key.endswith(".seed")}
    return {"seed"} | {key for key in keys if all(own.get(key, seed) == seed for own, seed in zip(settings, seeds, strict=True))}


def listed(names: Sequence[str]) -> str:
    """Join names: consecutive numbers as ``0-4``, others with commas, of more than four only the first and the last."""
    if len(names) > 1 and all(name.isdigit() for name in names):
        numbers = [int(name) for name in names]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{names[0]}-{names[-1]}"
    return ",".join(names) if len(names) <= 4 else f"{names[0]},…,{names[-1]}"
