"""Small observed runs: every number in them can be checked by hand."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvsim.results.observed import NOT_TOLD, ObservedRun


def observed(
    cached: Sequence[int] | None,
    *,
    ttft_s: Sequence[float] | None = None,
    sent_s: Sequence[float] | None = None,
    prompt: int = 100,
    output: int = 5,
    token_s: float = 0.5,
    failed: Sequence[int] = (),
    tiers: Mapping[str, Sequence[int]] | None = None,
    counters: Mapping[str, float] | None = None,
    queued_s: Sequence[float] | None = None,
    requests: int = 4,
) -> ObservedRun:
    """Requests of 100 prompt tokens, a second apart, each with five tokens at 0.5 s a token after its first one."""
    number = requests if cached is None else len(cached)
    sent = np.arange(number, dtype=float) if sent_s is None else np.array(sent_s, dtype=float)
    first = sent + (np.ones(number) if ttft_s is None else np.array(ttft_s, dtype=float))
    return ObservedRun(
        source="http://server",
        client="kvsim",
        due_s=sent,
        sent_s=sent,
        first_token_s=first,
        end_s=first + (output - 1) * token_s,
        token_gaps_s=[np.empty(0)] * number,
        prompt_tokens=np.full(number, prompt),
        output_tokens=np.full(number, output),
        cached_tokens=np.full(number, NOT_TOLD) if cached is None else np.array(cached),
        tier_tokens={name: np.array(tokens) for name, tokens in (tiers or {}).items()},
        queued_s=np.full(number, np.nan) if queued_s is None else np.array(queued_s, dtype=float),
        prefill_s=np.full(number, np.nan),
        errors=["refused" if place in failed else None for place in range(number)],
        counters=counters or {},
    )
