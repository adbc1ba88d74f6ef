"""What a client's file says of each request, and the run that this makes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path

import numpy as np

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.numbers import MOST_SECONDS, Real, Whole, refusal
from kvsim.results.observed import MOST_TOKENS, NOT_TOLD, ObservedRun

OF_TOKENS, OF_SECONDS = Whole(0, MOST_TOKENS), Real(-MOST_SECONDS, MOST_SECONDS)
"""What counts and times in files of clients may be."""
ARRIVALS_STAND_IN = "the file does not say when requests were sent: the trace's arrivals stand in"


@dataclass(slots=True, kw_only=True)
class Row:
    """A request, with times in seconds. None and NaN: the file does not say."""

    sent_s: float = nan
    ttft_s: float = nan
    """Time to first token, from sending it."""
    e2e_s: float = nan
    """Time to the end of its answer, from sending it."""
    gaps_s: Sequence[float] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    queued_s: float = nan
    prefill_s: float = nan
    error: str | None = None


def observed(path: Path, client: str, rows: Sequence[Row], requests: Sequence[Request]) -> ObservedRun:
    """Return the run of rows that are in the order of the trace's requests. Raises UsageError if there are more or fewer, and for
    numbers that cannot be.

    Servers leave out cached tokens that are 0, so a request of which nothing is said has 0 if others are said to have some. What
    a client says of the times of a failed request is left out: some write 0.
    """
    check_count(path, len(rows), len(requests))
    for number, row in enumerate(rows):
        _check(path, number, row)
    has_failed = np.array([row.error is not None for row in rows])
    sent_s, notes = _sent(rows, requests)
    cached = _counts([row.cached_tokens for row in rows], has_failed)
    media = dict.fromkeys(medium for row in rows for medium in row.tier_tokens)
    lengths = _filled([row.prompt_tokens for row in rows], [request.prompt_tokens for request in requests])
    errors = [row.error for row in rows]
    notes += other_lengths(lengths, errors, requests)
    return ObservedRun(
        source=str(path),
        client=client,
        due_s=sent_s,
        sent_s=sent_s,
        first_token_s=sent_s + np.array([row.ttft_s if row.error is None else nan for row in rows]),
        end_s=sent_s + np.array([row.e2e_s if row.error is None else nan for row in rows]),
        token_gaps_s=[np.array(row.gaps_s, dtype=np.float64) for row in rows],
        prompt_tokens=lengths,
        output_tokens=_filled([row.output_tokens for row in rows], [request.output_tokens for request in requests]),
        cached_tokens=cached,
        tier_tokens={medium: _counts([row.tier_tokens.get(medium, 0) for row in rows], has_failed) for medium in media},
        queued_s=np.array([row.queued_s for row in rows]),
        prefill_s=np.array([row.prefill_s for row in rows]),
        errors=errors,
        notes=notes,
    )


def check_count(path: Path, rows: int, requests: int) -> None:
    """Raise UsageError unless a file has as many requests as the trace."""
    if rows != requests:
        hint = f"set trace.limit={rows}" if rows < requests else "choose the trace that was sent, and no trace.limit"
        raise UsageError(f"results: {path} has {rows} requests, but the trace has {requests}: {hint}")


def _check(path: Path, number: int, row: Row) -> None:
    """Raise UsageError for a count or a time that cannot be; NaN is none at all."""
    counts = {"prompt tokens": row.prompt_tokens, "output tokens": row.output_tokens, "cached tokens": row.cached_tokens}
    counts |= {f"tokens from {medium}": tokens for medium, tokens in row.tier_tokens.items()}
    for name, count in counts.items():
        if count is not None and not OF_TOKENS.holds(count):
            raise UsageError(f"results: {path}: {refusal(f'request {number}: {name}', OF_TOKENS, count)}")
    times_s = {"sent at": row.sent_s, "time to first token": row.ttft_s, "time to its end": row.e2e_s}
    times_s |= {"time in the queue": row.queued_s, "time of prefill": row.prefill_s}
    for name, seconds in [*times_s.items(), *(("time between tokens", gap_s) for gap_s in row.gaps_s)]:
        if not (isnan(seconds) or OF_SECONDS.holds(seconds)):
            raise UsageError(f"results: {path}: {refusal(f'request {number}: {name}', OF_SECONDS, seconds)}")


def _sent(rows: Sequence[Row], requests: Sequence[Request]) -> tuple[np.ndarray, list[str]]:
    """Return when each request was sent, counted from the first one, and a note if the file does not say that."""
    sent_s = np.array([row.sent_s for row in rows], dtype=np.float64)
    if np.isnan(sent_s).all():
        arrivals = np.array([request.arrival_s for request in requests], dtype=np.float64)
        return arrivals - arrivals.min(initial=np.inf), [ARRIVALS_STAND_IN]
    return sent_s - np.nanmin(sent_s), []


def _counts(values: Sequence[int | None], has_failed: np.ndarray) -> np.ndarray:
    """Return counts, NOT_TOLD of requests that failed and, if no value is known, of all."""
    if all(value is None for value in values):
        return np.full(len(values), NOT_TOLD, dtype=np.int64)
    return np.where(has_failed, NOT_TOLD, np.array([value or 0 for value in values], dtype=np.int64))


def _filled(values: Sequence[int | None], expected: Sequence[int]) -> np.ndarray:
    """Return values, those that are not known as they are expected to be."""
    return np.array([one if value is None else value for value, one in zip(values, expected, strict=True)], dtype=np.int64)


def other_lengths(lengths: np.ndarray, errors: Sequence[str | None], requests: Sequence[Request]) -> list[str]:
    """Return a note if prompts of requests that succeeded are not as long as in the trace."""
    expected = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
    difference = np.where([error is None for error in errors], np.abs(lengths - expected), 0)
    if not difference.any():
        return []
    number, most = np.count_nonzero(difference), int(difference.max())
    return [f"{number} prompts are not as long as in the trace, by up to {most} tokens: hits differ for that alone"]
