"""What a routing policy may know of its run."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsim.core.request import Request
from kvsim.pages.page_owners import Leading


@dataclass(frozen=True, kw_only=True)
class RoutingContext:
    """Passed to ``bind`` before a run."""

    engines: Sequence[int] = (0,)
    """Numbers of the engines that the policy chooses from, ascending."""
    capacities: "Sequence[int | None]" = (None,)
    """Capacities of their GPU tiers, in pages; None if unlimited."""
    page_tokens: int = 16
    prefills: bool = True
    """Whether these engines compute prompts; otherwise they get them computed."""
    decodes: bool = True
    """Whether these engines generate answers; otherwise they pass their prompts on once they are computed."""
    holders: Callable[[Request], Collection[int]] | None = None
    """Returns the numbers of all engines that have cached any leading page of a prompt, as they have reported. To ask changes
    nothing. None if that is not known. Only for policies with ``needs_cached_pages``."""
    leading: Callable[[Request], Leading] | None = None
    """Returns how many leading pages of a prompt each engine has cached, as they have reported, by the engine's position in
    ``engines``. None if that is not known. Only for policies with ``needs_cached_pages``."""
    changes: Callable[[], set[int]] | None = None
    """Returns a new set, to which the router adds the number of each engine that is sent a request or ends one: those whose
    ``outstanding_requests`` and ``outstanding_tokens`` have changed. The policy empties it. None if nobody notes that."""
    prefill_s: Callable[[int, int], float] | None = None
    """Returns the seconds in which an engine that does nothing else computes tokens ``start ... tokens - 1`` of a prompt, given
    (start, tokens), with all tokens before cached. None if that is not known."""
    decode_step_s: float = 0.0
    """Seconds of a decode step of a single request: the time to read the weights."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Seeded; the policy's only source of randomness."""
