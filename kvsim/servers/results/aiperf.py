"""AIPerf's ``profile_export.jsonl``: a request a line, in the order in which they ended.

Requests are in the order in which they were issued (``session_num``). With conversations of several turns, the conversations, by
their first requests, are the trace's sessions, by theirs, and turns are turns.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.numbers import Real, shown
from kvsim.results.observed import ObservedRun
from kvsim.servers.results.rows import Row, check_count, observed

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
WARMUP = "warmup"
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Metadata(msgspec.Struct):
    """Which request a line is about; times in nanoseconds since 1970."""

    session_num: int
    request_start_ns: Nanoseconds
    request_end_ns: Nanoseconds
    conversation_id: str | None = None
    turn_index: int | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


class Value(msgspec.Struct):
    """A measure."""

    value: Any
    unit: str

    def seconds(self, value: Any) -> float:
        """Return a time in seconds; what has another unit, as it is. Raises ValidationError for what is no number."""
        if not Real().holds(value):
            raise msgspec.ValidationError(f"a measure in {self.unit} is {shown(value)}, which is no finite number")
        return value * SECONDS.get(self.unit, 1.0)

    def all_seconds(self) -> list[float]:
        """Return times in seconds, if it is a list of them."""
        return [self.seconds(value) for value in self.value] if isinstance(self.value, list) else []


class Error(msgspec.Struct):
    """Why a request failed."""

    message: str = ""
    type: str | None = None


class Line(msgspec.Struct):
    """A request."""

    metadata: Metadata
    metrics: dict[str, Value]
    error: Error | None = None

    def number(self, *names: str) -> float | None:
        """Return the first of these measures that the line has, times in seconds."""
        for name in names:
            if (found := self.metrics.get(name)) is not None and isinstance(found.value, int | float):
                return found.seconds(found.value)
        return None

    def count(self, *names: str) -> int | None:
        value = self.number(*names)
        return None if value is None else round(value)


def recognises(document: Mapping[str, Any]) -> bool:
    return "metadata" in document and "metrics" in document


def read(path: Path, documents: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> list[ObservedRun]:
    """Return the one run of a file. Raises UsageError if its requests are not those of the trace."""
    lines = msgspec.convert(documents, list[Line])
    lines = [line for line in lines if line.metadata.benchmark_phase.lower() != WARMUP]
    check_count(path, len(lines), len(requests))
    return [observed(path, "aiperf", [_row(line) for line in _in_order(path, lines, requests)], requests)]


def _in_order(path: Path, lines: Sequence[Line], requests: Sequence[Request]) -> list[Line]:
    """Return the lines in the order of the trace."""
    issued = sorted(lines, key=lambda line: line.metadata.session_num)
    if not any(line.metadata.turn_index for line in issued):
        return issued
    conversations = _numbered([line.metadata.conversation_id for line in issued])
    sessions = _numbered([request.session for request in requests])
    found = {(conversations[line.metadata.conversation_id], line.metadata.turn_index or 0): line for line in issued}
    try:
        return [found[sessions[request.session], request.turn] for request in requests]
    except KeyError as missing:
        session, turn = missing.args[0]
        raise UsageError(
            f"results: {path} has no request for turn {turn} of session {session}: choose the trace that was sent"
        ) from None


def _numbered(names: Sequence[Any]) -> dict[Any, int]:
    """Return the place of each name among the first appearances."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _row(line: Line) -> Row:
    about, gaps = line.metadata, line.metrics.get("inter_chunk_latency")
    ttft_s, e2e_s = line.number("time_to_first_token"), line.number("request_latency")
    return Row(
        sent_s=about.request_start_ns * 1e-9,
        ttft_s=nan if ttft_s is None else ttft_s,
        e2e_s=(about.request_end_ns - about.request_start_ns) * 1e-9 if e2e_s is None else e2e_s,
        gaps_s=() if gaps is None else gaps.all_seconds(),
        prompt_tokens=line.count("usage_prompt_tokens", "input_sequence_length"),
        output_tokens=line.count("usage_completion_tokens", "output_sequence_length"),
        cached_tokens=line.count("usage_prompt_cache_read_tokens"),
        error=_error(line),
    )


def _error(line: Line) -> str | None:
    if line.error is not None:
        return line.error.message or line.error.type or "failed"
    return "cancelled" if line.metadata.was_cancelled else None
