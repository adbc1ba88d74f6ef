"""What an autoscaling policy is given before a run."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class AutoscalingContext:
    """Passed to ``bind`` before a run."""

    engines: int = 1
    """Most engines."""
    least_engines: int = 0
    """Fewest engines."""
    kv_tokens: int | None = None
    """Tokens that the GPU tier of an engine holds; None if unlimited."""
    taken_tokens: Callable[[float], float] | None = None
    """Returns how many of ``kv_tokens`` a request takes that has so many tokens; None: as many. They are more under vLLM's rules
    for sliding windows, where groups of layers share the tier and each takes slots of its own."""
    max_batch_tokens: int = 8192
    """Most tokens of a step, ``engine.max_batch_tokens``."""
    max_running_requests: int = 256
    """Most running requests of an engine."""
    tokens_per_step: float = 1.0
    """Tokens of an answer that a step yields, on average: above 1 with drafts."""
    step_tokens: int = 1
    """Tokens of ``max_batch_tokens`` that a decoding request takes of a step: those of a draft, too."""
    step_s: Callable[[int, int, int], float] | None = None
    """Returns the seconds of a step of an engine, given (prompt tokens, decoding requests, tokens of their contexts together):
    what a profile of the engine says. None if that is not known."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Seeded; the policy's only source of randomness."""
