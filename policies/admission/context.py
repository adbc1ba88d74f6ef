"""What an admission policy is given before a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from kvsim.core.request import Request


def no_objective(request: Request) -> float:
    """Return the objective of a request without any: infinite."""
    return inf


@dataclass(frozen=True, kw_only=True)
class AdmissionContext:
    """Passed to ``bind`` before a run."""

    engines: int = 1
    """Engines of the cluster."""
    page_tokens: int = 16
    max_batch_tokens: int = 8192
    """Most tokens of a step, ``engine.max_batch_tokens``."""
    max_running_requests: int = 256
    """Most running requests of an engine."""
    requests: Sequence[Request] = ()
    """All requests, to see what the trace says of them; empty where nobody knows them before they arrive."""
    ttft_s: Callable[[Request], float] = no_objective
    """Returns the objective of a request for its time to first token, by its class; infinite: none."""
    tpot_s: Callable[[Request], float] = no_objective
    """Returns that for its time per output token."""
    prefill_s: Callable[[Sequence[tuple[int, int]], int, int], float] | None = None
    """Returns the seconds of the steps in which an engine computes prompts one after another, beside decoding requests, given the
    (first token to compute, tokens) of each prompt, the decoding requests and the tokens of their contexts together: what a
    profile of the engine says. None if that is not known."""
    decode_step_s: Callable[[int, int], float] | None = None
    """Returns the seconds of a step that only decodes, given requests and the tokens of their contexts together. None if that is
    not known."""
    decodes: bool = True
    """Whether engines that compute prompts also generate answers; otherwise they pass their prompts on."""
    tokens_per_step: float = 1.0
    """Tokens that such a step yields of each answer, on average: above 1 with drafts."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Seeded; the policy's only source of randomness."""
