"""How far durations of one machine are apart: from run to run, and from one step, copy or read to the next."""

from dataclasses import dataclass, fields
from typing import Any

from kvsim.numbers import Real, Whole, check_number, shown

MOST_FACTOR = 1e6
"""The largest factor of a duration."""


@dataclass(kw_only=True)
class Variation:
    """Durations of one kind relative to the expected one: a factor for the whole run times a factor for each duration.

    The factors of successive durations have the distribution ``each`` and are correlated (a Gaussian copula with normal scores
    of first order).
    """

    run: float = 0.0
    """Standard deviation of the natural logarithm of the factor that all durations of a run share; its median is 1."""
    correlation: float = 0.0
    """Correlation between the normal scores of one factor and the next."""
    each: list[Any]
    """Rows of [probability, factor]: quantiles of the factor of each duration, from probability 0 to 1, linear in between."""

    def check(self, name: str) -> None:
        """Raise ValueError, with one line that begins with ``name``, for a value that cannot be."""
        for part in ("run", "correlation"):
            check_number(f"{name}.{part}", Real(least=0, below=1), getattr(self, part))
        form = f"{name}.each must be rows of [probability, factor]"
        if not all(isinstance(row, list) and len(row) == 2 and all(map(Real().holds, row)) for row in self.each):
            raise ValueError(f"{form}, not {shown(self.each)}")
        probabilities, factors = [row[0] for row in self.each], [row[1] for row in self.each]
        if len(self.each) < 2 or probabilities[0] != 0 or probabilities[-1] != 1:
            raise ValueError(f"{form} whose probabilities begin with 0 and end with 1, not {shown(probabilities)}")
        if probabilities != sorted(set(probabilities)) or factors != sorted(factors):
            raise ValueError(f"{form} in ascending order, no probability twice, not {shown(self.each)}")
        for factor in factors:
            check_number(f"{name}.each", Real(above=0, most=MOST_FACTOR), factor, hint="a factor of a duration")


@dataclass(kw_only=True)
class Noise:
    """What varies on a machine. None: that part takes the same time whenever it does the same work.

    A step with prefill takes its computation times ``prefill_steps`` or its launch times ``launches``, whichever is longer. The
    factors of a link apply to the time for which a transfer occupies it, not to its latency.
    """

    decode_steps: Variation | None = None
    """Steps without prefill."""
    prefill_steps: Variation | None = None
    launches: Variation | None = None
    """Launches of steps with prefill, by the host."""
    loads: Variation | None = None
    """Copies to the GPU."""
    stores: Variation | None = None
    """Copies from the GPU."""
    disk_reads: Variation | None = None
    disk_writes: Variation | None = None
    seed: int = 0
    """Tells runs apart that have all other settings in common, such as those that ``kvsim validate`` simulates."""

    def __post_init__(self) -> None:
        check_number("noise.seed", Whole(), self.seed)
        for field in fields(self):
            if isinstance(variation := getattr(self, field.name), Variation):
                variation.check(f"noise.{field.name}")
