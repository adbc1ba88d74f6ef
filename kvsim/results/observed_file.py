"""Files of observed runs (``.jsonl.gz``), written and read back without loss.

The first line is a ``Head``: the run. Then comes a ``Line`` for each request, in the order of the trace. Times are seconds since
the run's first request; what is not known is null or absent. A reader of another program needs no more than gzip and JSON.
"""

import gzip
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from math import isnan, nan
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.results.observed import NOT_TOLD, ObservedRun, Seconds, ServerFacts, Tokens
from kvsim.results.schema import Count, Finite, Number

SCHEMA = 1
LONGEST_LINE_BYTES = 1 << 26
"""A longer line is none of a request."""


class Facts(msgspec.Struct, omit_defaults=True):
    """``ServerFacts``, with the same fields."""

    engine: str
    version: str | None = None
    model: str | None = None
    page_tokens: Tokens | None = None
    capacity_tokens: Tokens | None = None
    host_capacity_tokens: Tokens | None = None
    settings: dict[str, object] = {}


class Head(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first line: everything of an ``ObservedRun`` that is no array, with the same names, and these."""

    kvsim_observed: int
    """The version of this schema, 1."""
    requests: Count
    """The number of lines that follow."""
    source: str
    client: str
    facts: Facts | None = None
    counters: dict[str, Finite] = {}
    speed: Number = 1.0
    concurrency: Count | None = None
    stall_s: Seconds = 0.0
    is_client_bound: bool = False
    notes: list[str] = []


class Line(msgspec.Struct, omit_defaults=True):
    """A request: its entries in the arrays of an ``ObservedRun``, with the same names in the singular."""

    due_s: Seconds | None = None
    sent_s: Seconds | None = None
    first_token_s: Seconds | None = None
    end_s: Seconds | None = None
    token_gaps_s: list[Seconds] = []
    prompt_tokens: Tokens = 0
    output_tokens: Tokens = 0
    cached_tokens: Tokens | None = None
    tier_tokens: dict[str, Tokens] = {}
    queued_s: Seconds | None = None
    prefill_s: Seconds | None = None
    error: str | None = None


def write_observed(path: Path, run: ObservedRun) -> None:
    """Write a run to a file. Raises UsageError if it cannot be written; an earlier file is then still there."""
    encode = msgspec.json.Encoder().encode
    with replacing(path) as file, gzip.open(file, "wb") as packed:
        packed.write(encode(_head(run)) + b"\n")
        for number in range(len(run.errors)):
            packed.write(encode(_line(run, number)) + b"\n")


def _head(run: ObservedRun) -> Head:
    facts = run.facts
    return Head(
        kvsim_observed=SCHEMA,
        requests=len(run.errors),
        source=run.source,
        client=run.client,
        facts=None if facts is None else Facts(**{name: getattr(facts, name) for name in Facts.__struct_fields__}),
        counters=dict(run.counters),
        speed=run.speed,
        concurrency=run.concurrency,
        stall_s=run.stall_s,
        is_client_bound=run.is_client_bound,
        notes=list(run.notes),
    )


def _line(run: ObservedRun, number: int) -> Line:
    cached = int(run.cached_tokens[number])
    return Line(
        due_s=_or_null(run.due_s[number]),
        sent_s=_or_null(run.sent_s[number]),
        first_token_s=_or_null(run.first_token_s[number]),
        end_s=_or_null(run.end_s[number]),
        token_gaps_s=run.token_gaps_s[number].tolist(),
        prompt_tokens=int(run.prompt_tokens[number]),
        output_tokens=int(run.output_tokens[number]),
        cached_tokens=None if cached == NOT_TOLD else cached,
        tier_tokens={tier: int(tokens[number]) for tier, tokens in run.tier_tokens.items() if tokens[number] != NOT_TOLD},
        queued_s=_or_null(run.queued_s[number]),
        prefill_s=_or_null(run.prefill_s[number]),
        error=run.errors[number],
    )


def _or_null(seconds: np.float64) -> float | None:
    return None if isnan(seconds) else float(seconds)


def read_observed(path: Path) -> ObservedRun:
    """Read a run. Raises UsageError for a file that is no such run, is damaged or is of another version."""
    try:
        with gzip.open(path, "rb") as packed:
            head = msgspec.json.decode(_next_line(packed), type=Head)
            decode = msgspec.json.Decoder(Line).decode
            lines = [decode(line) for line in iter(partial(_next_line, packed), b"")]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise UsageError(f"{path}: not an observed run of kvsim: {error}") from None
    if head.kvsim_observed != SCHEMA:
        raise UsageError(f"{path}: an observed run of schema {head.kvsim_observed}, but this version of kvsim reads {SCHEMA}")
    if len(lines) != head.requests:
        raise UsageError(f"{path}: has {len(lines)} of its {head.requests} requests")
    return _run(head, lines)


def _next_line(packed: gzip.GzipFile) -> bytes:
    """Return the next line, b"" at the end. Raises ValueError for one that is too long."""
    line = packed.readline(LONGEST_LINE_BYTES)
    if len(line) == LONGEST_LINE_BYTES:
        raise ValueError(f"a line has {LONGEST_LINE_BYTES} bytes or more")
    return line


def _run(head: Head, lines: Sequence[Line]) -> ObservedRun:
    tiers = dict.fromkeys([tier for line in lines for tier in line.tier_tokens])
    return ObservedRun(
        source=head.source,
        client=head.client,
        due_s=_times(line.due_s for line in lines),
        sent_s=_times(line.sent_s for line in lines),
        first_token_s=_times(line.first_token_s for line in lines),
        end_s=_times(line.end_s for line in lines),
        token_gaps_s=[np.array(line.token_gaps_s, dtype=np.float64) for line in lines],
        prompt_tokens=_counts(line.prompt_tokens for line in lines),
        output_tokens=_counts(line.output_tokens for line in lines),
        cached_tokens=_counts(NOT_TOLD if line.cached_tokens is None else line.cached_tokens for line in lines),
        tier_tokens={tier: _counts(line.tier_tokens.get(tier, NOT_TOLD) for line in lines) for tier in tiers},
        queued_s=_times(line.queued_s for line in lines),
        prefill_s=_times(line.prefill_s for line in lines),
        errors=[line.error for line in lines],
        facts=None if head.facts is None else ServerFacts(**msgspec.structs.asdict(head.facts)),
        counters=head.counters,
        speed=head.speed,
        concurrency=head.concurrency,
        stall_s=head.stall_s,
        is_client_bound=head.is_client_bound,
        notes=head.notes,
    )


def _times(values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    return np.array([nan if value is None else value for value in values], dtype=np.float64)


def _counts(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)
