"""Whether a difference between two cases may be chance: by their seeds or, with one run each, by resampling its requests."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from kvsim.report.comparison.cases import Case
from kvsim.results.measures import Measure
from kvsim.results.records import Damaged, read_requests, read_result
from kvsim.results.resampling import NEEDED, Difference, Resampled, difference, resampled
from kvsim.results.runs import Run
from kvsim.results.statistics import paired_difference

MOST_COMPARED = 30
"""Cases next to the best one whose requests are read."""


class Against(NamedTuple):
    """The best case against another one, and what was drawn again: seeds, sessions or stretches."""

    place: int
    difference: Difference
    drawn: str


def against(
    cases: Sequence[Case], measure: Measure, best: int, others: Sequence[int], most: int = MOST_COMPARED
) -> list[Against]:
    """Return the best case against each other one, the nearest first, where their noise is known.

    The requests of at most so many of them are read.
    """
    leader = cases[best].mean(measure)
    means = {place: mean.mean for place in others if (mean := cases[place].mean(measure)) is not None}
    if leader is None:
        return []
    nearest = sorted(means, key=lambda place: abs(means[place] - leader.mean))
    found = []
    for number, place in enumerate(nearest):
        one, other = cases[best], cases[place]
        by_seed = paired_difference(one.by_seed(measure.of), other.by_seed(measure.of))
        if by_seed is not None and by_seed.half_width is not None:
            ends = by_seed.mean - by_seed.half_width, by_seed.mean + by_seed.half_width
            found.append(Against(place, Difference(by_seed.mean, *ends), "seeds"))
        elif len(one.runs) == len(other.runs) == 1 and number < most:
            runs = _resampled(one.runs[0]), _resampled(other.runs[0])
            if (paired := difference(measure.key, (leader.mean, means[place]), *runs)) is not None:
                found.append(Against(place, paired, "sessions" if runs[0] and runs[0].has_sessions else "stretches"))
    return found


def _resampled(run: Run) -> Resampled | None:
    """Return a run's measures in each draw; None if its requests are not in its folder, or are a sample."""
    path = run.folder / "requests.csv.gz"
    return _read(run.folder, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=2000)
def _read(folder: Path, _mtime_ns: int) -> Resampled | None:
    try:
        record = read_result(folder)
        if "sample" in record:  # the rows are those of a sample, and the rates are not
            return None
        return resampled(record, read_requests(folder, record, lambda name: name in NEEDED or name.startswith("hit_")))
    except Damaged:
        return None
