"""What share of a trace a replay plays, in how many samples."""

from dataclasses import dataclass
from typing import Any

from kvsim.numbers import Real, Whole, refusal

EXAMPLE = "such as 1% or 0.01"
FEWEST = 2
"""Samples without which there is no interval."""
MOST_SHARE = 0.25
"""Largest share of a sample: with two samples played one by one and together, it is as much work as the whole trace."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Samples of the subtrees of a trace, which have none in common."""

    share: float
    """Of the subtrees, in each sample."""
    draws: int
    """Number of samples; 1 only if it is the whole trace."""


def sampling_of(share: Any, draws: Any) -> Sampling | None:
    """Return what the settings ``sample`` and ``sample_draws`` mean; None without a sample. Raises ValueError."""
    if not Whole(FEWEST).holds(draws):
        raise ValueError(refusal("sample_draws", Whole(FEWEST), draws, "an interval needs several samples"))
    if share is None:
        return None
    part = _share(share)
    if not Real(above=0, most=1).holds(part):
        raise ValueError(refusal("sample", Real(above=0, most=1), share, f"it is a share of the trace, {EXAMPLE}"))
    if MOST_SHARE < part < 1:
        raise ValueError(f"sample must be at most 25%, or 100%, not {share}: more of it is as much work as the whole trace")
    return Sampling(share=float(part), draws=1 if part == 1 else min(draws, int(FEWEST * MOST_SHARE / part + 1e-9)))


def _share(given: Any) -> Any:
    """Return a share that is written as a number or, as text, in percent; anything else as it is."""
    if isinstance(given, str) and given.endswith("%"):
        try:
            return float(given[:-1]) / 100
        except ValueError:
            return given
    return given
