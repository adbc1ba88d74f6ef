"""A trace of prompts that a program has as tokens, instead of a file."""

import json
import marshal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.trace.base import Trace, TraceSource
from kvsim.trace.records import Record
from kvsim.trace.stored import StoredRequests
from kvsim.trace.tokens import Tokens

ALL_OF_REQUEST = attrgetter(*(each.name for each in fields(Request)))
AT_ONCE = 1024
"""Requests that are hashed together."""


@dataclass(kw_only=True)
class TokensInMemory(Tokens):
    """The lines of a ``tokens`` trace, already parsed."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def records(self) -> Iterator[Record]:
        return (Record(self.path, number, line) for number, line in enumerate(self.lines, 1))


@dataclass(kw_only=True)
class RequestsInMemory(TraceSource):
    """The requests of a trace that a program has made itself."""

    IN_MEMORY: ClassVar[bool] = True

    trace: Trace

    def load(self, page_tokens: int) -> Trace:
        if self.rate == 1:
            return self.trace
        return replace(self.trace, requests=[self._sooner(request) for request in self.trace.requests])

    def _sooner(self, request: Request) -> Request:
        resets = tuple(reset._replace(at_s=reset.at_s / self.rate) for reset in request.resets)
        return replace(request, arrival_s=request.arrival_s / self.rate, resets=resets)

    def description(self) -> dict[str, Any]:
        """Return what the configuration of a run says of the trace, which no file and no settings can load again."""
        named = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"_target_": named, "name": self.trace.name, "content": self._content, "rate": self.rate}

    @cached_property
    def _content(self) -> str:
        return content_of(self.trace)

    def page_keys(self, page_tokens: int) -> Callable[[int], bytes]:
        """Return keys that are the same for traces whose requests have the same page ids: nothing else says what a page holds."""
        paths = [(request.runs, request.output_runs, request.sample_output_runs) for request in self.trace.requests]
        name = xxhash.xxh3_128_digest(repr((type(self).__name__, page_tokens, paths)).encode())
        return lambda page: xxhash.xxh3_128_digest(name + page.to_bytes(8, "little"))


def content_of(trace: Trace) -> str:
    """Hash a trace's requests and the sizes of their pages and blocks: 32 hexadecimal digits, the same in every process.

    It takes 2 to 3 s for a million requests, a small part of what loading them takes.
    """
    content = xxhash.xxh3_128(repr((trace.page_tokens, trace.block_tokens)).encode())
    for start in range(0, len(trace.requests), AT_ONCE):
        part = list(map(ALL_OF_REQUEST, trace.requests[start : start + AT_ONCE]))
        try:
            content.update(marshal.dumps(part, 2))  # of later versions, equal values may be written differently
        except ValueError:  # resets are no plain tuples, and a program may have put in anything
            content.update(repr(part).encode())
    return content.hexdigest()


def loaded_from(trace: Trace, *origin: str) -> Trace:
    """Return the trace with the overrides that load it again, and what tells whether its requests are still those."""
    trace.origin, trace.content = origin, content_of(trace)
    return trace


def as_it_is(trace: Trace) -> Trace:
    """Return a trace whose requests are no longer those that were loaded as one that a program has made; others as they are.

    What a program has changed in requests of a long trace, which were read from its file, is lost.
    """
    if isinstance(trace.requests, StoredRequests):
        trace.requests.forget()
    is_changed = trace.content != "" and trace.content != content_of(trace)
    return replace(trace, origin=(), source=None, content="") if is_changed else trace


def source_of(trace: Trace) -> TraceSource | None:
    """Return what a trace in memory was loaded from; None for one that its ``origin`` describes."""
    return trace.source if trace.source is not None or trace.origin else RequestsInMemory(trace=trace)


def trace_from_tokens(
    prompts: Sequence[npt.ArrayLike],
    *,
    output_tokens: int | Sequence[int] | None = None,
    answers: Sequence[npt.ArrayLike] | None = None,
    arrivals_s: Sequence[float] | None = None,
    sessions: Sequence[str | int] | None = None,
    page_tokens: int = 16,
    name: str = "tokens",
) -> Trace:
    """Make a trace of prompts, each a list or an array of token ids: what ``trace=tokens`` reads from a file of the same content.

    ``output_tokens`` is the length of all answers or of each, 1 by default; ``answers`` are their tokens instead, which can then
    be cached (``rules.cache_output=true``). ``arrivals_s`` are seconds that do not decrease, counted from the first; without
    them, all requests arrive at time 0, and those with the same entry in ``sessions`` one after another.

    Raises UsageError for lists of different lengths, and TraceError, which names the number of the prompt from 1, for tokens
    that are not integers.
    """
    if output_tokens is not None and answers is not None:
        raise UsageError("trace_from_tokens: output_tokens follows from answers: leave it out")
    if len(prompts) == 0:
        raise UsageError("trace_from_tokens: there are no prompts: give at least one")
    tokens = [_listed(answer) for answer in answers] if answers is not None else None
    lengths = [len(answer) for answer in tokens] if tokens is not None else 1 if output_tokens is None else output_tokens
    columns: dict[str, Sequence[Any] | None] = {
        "token_ids": [_listed(prompt) for prompt in prompts],
        "output_length": [lengths] * len(prompts) if isinstance(lengths, int) else _listed(lengths),
        "output_token_ids": tokens,
        "timestamp": None if arrivals_s is None else [_milliseconds(arrival_s) for arrival_s in arrivals_s],
        "session_id": None if sessions is None else _listed(sessions),
    }
    given = {"output_length": "answers" if answers is not None else "output_tokens", "timestamp": "arrivals_s"}
    for key, values in columns.items():
        if values is not None and len(values) != len(prompts):
            what = given.get(key, "sessions")
            raise UsageError(f"trace_from_tokens: {what} has {len(values)} entries, but there are {len(prompts)} prompts")
    known = {key: values for key, values in columns.items() if values is not None}
    lines = [dict(zip(known, line, strict=True)) for line in zip(*known.values(), strict=True)]
    try:
        digest = xxhash.xxh3_64_hexdigest(json.dumps(lines, default=str).encode())
    except ValueError as error:  # numbers of thousands of digits
        raise UsageError(f"trace_from_tokens: {error}") from None
    path = f"<{len(lines)} prompts, {digest}>"
    source = TokensInMemory(path=path, lines=lines)
    trace = source.load(page_tokens)
    trace.name, trace.source = name, source
    return loaded_from(trace, "trace=tokens", f"trace.path='{path}'")


def _milliseconds(seconds: Any) -> Any:
    """Return seconds as milliseconds, and what is no number as it is, for the reader to refuse."""
    try:
        return 1000 * float(seconds)
    except (TypeError, ValueError, OverflowError):
        return seconds


def _listed(values: Any) -> list[Any]:
    """Return a list of Python's own numbers."""
    if isinstance(values, list):
        return values
    listed = np.asarray(values).tolist()
    return listed if isinstance(listed, list) else [listed]
