"""When things happened to the requests of a real run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When things happened to each request, in seconds. A request that has no time of admission is not played."""

    admitted_s: npt.NDArray[np.float64]
    tokens_s: Sequence[npt.NDArray[np.float64]]
    """When each token of its answer was there; with the first one, its prompt is computed, and with the last one, it ends."""
    pauses_s: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """From when to when requests that were preempted had given their pages back, as far as that has been seen."""
    brief_s: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """The same of requests that have missed one step alone, together with one of those; perhaps they were preempted."""
    preemptions: int = 0
    """How often requests were preempted in all."""
    formed_s: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """When the engine formed its steps, as far as that has been seen."""
    steps_ahead: int = 0
    """Steps that run while one is formed."""
    joined_s: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """When each request joined a queue that is served first come, first served, as far as that is known."""
