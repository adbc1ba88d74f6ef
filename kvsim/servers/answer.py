"""What a client has seen of one request so far."""

from dataclasses import dataclass, field
from math import nan

from kvsim.results.observed import NOT_TOLD


class Failed(Exception):
    """A request has failed; the message is its line in ``ObservedRun.errors``."""


@dataclass(slots=True)
class Answer:
    """One request: what it was sent as, and what has come back. Times are those of the client's clock."""

    prompt_tokens: int
    """Those that it was sent with; the server's own count replaces them."""
    due_s: float = nan
    sent_s: float = nan
    end_s: float = nan
    chunk_times_s: list[float] = field(default_factory=list)
    """When each part of the answer arrived that had a token."""
    output_tokens: int = 0
    cached_tokens: int = NOT_TOLD
    tier_tokens: dict[str, int] = field(default_factory=dict)
    queued_s: float = nan
    prefill_s: float = nan
    error: str | None = None
