"""GuideLLM's JSON (``benchmarks.json``): a benchmark is a run, with its requests by status.

Requests are in the order of the trace's times (``relative_timestamp``) or, where it has none, of sending.
"""

from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.results.observed import ObservedRun
from kvsim.servers.results.rows import Row, observed


class Timings(msgspec.Struct):
    """Times of a request, in seconds since 1970."""

    targeted_start: float | None = None
    resolve_start: float | None = None
    request_start: float | None = None
    first_token_iteration: float | None = None
    last_token_iteration: float | None = None
    request_end: float | None = None


class Settings(msgspec.Struct):
    """Where a request is in the trace."""

    relative_timestamp: float | None = None


class Info(msgspec.Struct):
    """What the client knows of a request."""

    timings: Timings
    settings: Settings = msgspec.field(default_factory=Settings)
    status: str = "completed"
    error: str | None = None


class Stats(msgspec.Struct):
    """A request."""

    info: Info
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class Statuses(msgspec.Struct):
    """The requests of a benchmark, by what became of them."""

    successful: list[Stats] | None = None
    errored: list[Stats] | None = None
    incomplete: list[Stats] | None = None


class Benchmark(msgspec.Struct):
    """A run."""

    requests: Statuses


def recognises(document: Mapping[str, Any]) -> bool:
    return "benchmarks" in document


def read(path: Path, documents: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> list[ObservedRun]:
    """Return the run of each benchmark. Raises UsageError for a report without any."""
    benchmarks = msgspec.convert(documents[0]["benchmarks"], list[Benchmark])
    if not benchmarks:
        raise UsageError(f"results: {path} has no benchmark")
    return [observed(path, "guidellm", [_row(one) for one in _in_order(run.requests)], requests) for run in benchmarks]


def _in_order(found: Statuses) -> list[Stats]:
    """Return the requests in the order of the trace."""
    every = [*(found.successful or ()), *(found.errored or ()), *(found.incomplete or ())]
    return sorted(every, key=_place)


def _place(one: Stats) -> tuple[float, float]:
    times, at = one.info.timings, one.info.settings.relative_timestamp
    sent_s = next((time for time in (times.targeted_start, times.request_start, times.resolve_start) if time is not None), inf)
    return (0.0 if at is None else at, sent_s)


def _row(one: Stats) -> Row:
    times = one.info.timings
    sent_s = _or_nan(times.request_start if times.request_start is not None else times.resolve_start)
    has_failed = one.info.status != "completed"
    return Row(
        sent_s=sent_s,
        ttft_s=_or_nan(times.first_token_iteration) - sent_s,
        e2e_s=_or_nan(times.last_token_iteration if times.last_token_iteration is not None else times.request_end) - sent_s,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        cached_tokens=one.cached_tokens,
        error=(one.info.error or one.info.status) if has_failed else None,
    )


def _or_nan(value: float | None) -> float:
    return nan if value is None else value
