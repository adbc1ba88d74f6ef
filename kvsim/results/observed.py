"""What a client saw of a real server: one run of a trace's requests, whoever sent them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvsim.numbers import MOST_SECONDS

NOT_TOLD = -1
MOST_TOKENS = 1 << 40
"""The most tokens of a request, or of a server's cache, that a file may tell of: sums of them fit into 64 bits."""
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=-MOST_SECONDS, le=MOST_SECONDS)]
"""A time, or a moment on any clock, as files have it: the clocks of a client and a server may differ either way."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. None: it does not say."""

    engine: str
    """``vllm``, ``sglang``, or ``openai`` for any other server of that interface."""
    version: str | None = None
    model: str | None = None
    page_tokens: int | None = None
    capacity_tokens: int | None = None
    """Tokens that the GPU memory for KV pages takes."""
    host_capacity_tokens: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    """Its own flags, as it names them."""

    @property
    def number(self) -> tuple[int, int, int] | None:
        """Its version as numbers; None if it does not say."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.version or "")
        return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


@dataclass(frozen=True, slots=True, repr=False)
class ObservedRun:
    """One run. Arrays have one entry per request, in the order of the trace; times count from the run's first request.

    A request that failed has its reason in ``errors``, and NaN for every time that it did not reach.
    """

    source: str
    """Address of the server, or name of the file that the run was read from."""
    client: str
    """Who sent the requests: ``kvsim``, ``aiperf``, ``vllm bench``, ``sglang bench``, ``guidellm``."""
    due_s: npt.NDArray[np.float64]
    """When the request should have been sent: the trace's arrival, or when a closed loop had a place for it."""
    sent_s: npt.NDArray[np.float64]
    first_token_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    token_gaps_s: Sequence[npt.NDArray[np.float64]]
    """Per request, the time from each chunk of its answer to the next."""
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    """Prompt tokens that were not computed. NOT_TOLD where the server does not say."""
    tier_tokens: Mapping[str, npt.NDArray[np.int64]]
    """By medium (``device``, ``host``, ``storage``), the cached tokens that came from there; NOT_TOLD where the server does not
    say. Empty if it never does."""
    queued_s: npt.NDArray[np.float64]
    """Time in the server's queue, as the server says. NaN where it does not."""
    prefill_s: npt.NDArray[np.float64]
    """Time from its admission to its first token, as the server says. NaN where it does not."""
    errors: Sequence[str | None]
    facts: ServerFacts | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    """By name and labels, what the server's counters rose by during the run: ``vllm:prompt_tokens_total{model_name="m"}``."""
    speed: float = 1.0
    """Divisor of the trace's times."""
    concurrency: int | None = None
    """Requests that a closed loop kept under way; None if they arrived by the trace's times."""
    stall_s: float = 0.0
    """Longest time for which the client did nothing though it had to."""
    is_client_bound: bool = False
    """Whether the client was too slow, so that the times are not the server's; ``notes`` says how."""
    notes: Sequence[str] = ()
    """What makes the run worth less than it seems, one line each: a client that was too slow, a counter that started anew."""

    def __repr__(self) -> str:
        failed = sum(error is not None for error in self.errors)
        return f"ObservedRun({self.client}, {self.source}: {len(self.errors)} requests, {failed} failed)"

    def failures(self) -> str:
        """Return one line on the requests that failed, the most common reasons first; empty if none did."""
        reasons = Counter(error for error in self.errors if error is not None)
        if not reasons:
            return ""
        told = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        others = len(reasons) - 3
        return (
            f"{reasons.total()} of {len(self.errors)} requests failed: {told}{f'; {others} other reasons' if others > 0 else ''}"
        )

    def late_s(self, share: float = 0.99) -> float:
        """Return by how much that share of the requests was sent late at most; 0 if none was sent."""
        late = (self.sent_s - self.due_s)[~np.isnan(self.sent_s)]
        return float(np.quantile(late, share)) if len(late) else 0.0

    def admitted_s(self) -> npt.NDArray[np.float64]:
        """Return when each request was admitted, on the client's clock: before its first token, by the time that the server says,
        else after its time in the queue, else with its first token.

        The first of these is late by the way of a token back to the client, as all that the client sees of answers is, and so the
        order of admissions and ends is the server's. The second is early by the way to the server.
        """
        queued = np.where(np.isnan(self.queued_s), self.first_token_s, self.sent_s + self.queued_s)
        admitted = self.first_token_s - self.prefill_s
        return np.where(np.isnan(admitted), queued, admitted)

    def admitted(self) -> npt.NDArray[np.int64]:
        """Return the requests that succeeded in the order in which the server admitted them, as far as it is known."""
        order = np.argsort(self.admitted_s(), kind="stable")
        return order[[self.errors[number] is None for number in order]] if len(order) else order
