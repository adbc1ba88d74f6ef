"""What a leaderboard compares, request by request."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvsim.results.records import read_requests
from kvsim.results.runs import Run
from kvsim.sweeps.paired import Difference, Numbers, difference

Columns = dict[str, np.ndarray]
"""Of the requests of a run, by name."""


class Measure(NamedTuple):
    """A sum over requests per unit of weight, of which more (1) or less (-1) is better."""

    better: int
    of: Callable[[Columns], Numbers]
    weights: Callable[[Columns], Numbers]
    has_clock: bool
    """Whether only a simulation has it."""
    has_bound: bool
    """Whether a family's bound bounds it."""

    def value(self, columns: Columns) -> float | None:
        """Return the measure of a run; requests that were rejected do not count. None if no others are left."""
        values, weights = self.of(columns), self.weights(columns)
        known = np.isfinite(values)
        total = float(weights[known].sum())
        return float(values[known].sum()) / total if total else None

    def gain(self, own: Columns, base: Columns) -> Difference:
        """Compare the requests that both runs have served. Above 0 is better, whichever way the measure is.

        Raises ValueError if there are none.
        """
        ours, theirs, weights = self.of(own), self.of(base), self.weights(base)
        known = np.isfinite(ours) & np.isfinite(theirs)
        found = difference(ours[known], theirs[known], weights[known])
        return found._replace(value=self.better * found.value + 0.0)


def _hits(requests: Columns) -> Numbers:
    hits = sum((requests[name] for name in requests if name.startswith("hit_tokens_")), np.zeros(len(requests["request"])))
    return np.where(requests["status"] != "finished", np.nan, hits)


MEASURES = {
    "hit_rate": Measure(
        better=1,
        of=_hits,
        weights=lambda requests: requests["prompt_tokens"].astype(float),
        has_clock=False,
        has_bound=True,
    ),
    "ttft_s": Measure(
        better=-1,
        of=lambda requests: requests["ttft_s"],
        weights=lambda requests: np.ones(len(requests["request"])),
        has_clock=True,
        has_bound=False,
    ),
}


def counted(run: Run) -> Columns | None:
    """Read the columns of a run's requests after the warm-up; None if it failed. Raises Damaged."""
    if run.result is None:
        return None
    columns = read_requests(run.folder, run.result)
    is_counted = columns["request"] >= run.result["warmup_requests"]
    return {name: column[is_counted] for name, column in columns.items()}
