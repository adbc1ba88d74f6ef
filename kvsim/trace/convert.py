"""Writes a trace in Mooncake's format, without anything that reveals a prompt."""

import gzip
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

from msgspec.json import Encoder

from kvsim.core.request import Request
from kvsim.pages.extents import Extent
from kvsim.trace.base import Trace
from kvsim.trace.retention import fields_of


def as_lines(trace: Trace, *, packed: bool) -> Iterator[bytes]:
    """Yield the lines of a trace whose pages become blocks; ``packed`` writes extents of ids instead of ids.

    The id of a block is a number in the order in which blocks first appear, and tenants and sessions are numbered in the same
    way: nothing that is written depends on what a prompt contains, except what it shares with others. A trace whose requests all
    arrive at time 0, or after others, has no timestamps. A request that waits for others than the turn before it names them in
    ``after``, by their numbers (``request_id``), which is kvsim's own.
    """
    encode = Encoder().encode
    is_timed = any(request.after < 0 and request.arrival_s for request in trace.requests)
    last: dict[int, Request] = {}
    named = _named(trace.requests)
    tenants: dict[str, int] = {}
    turns: dict[int, int] = {}
    for request in trace.requests:
        for reset in request.resets:
            at = {} if reset.at_s != reset.at_s else {"timestamp": _milliseconds(reset.at_s)}
            yield encode({"reset": reset.mode, **at}) + b"\n"
        fields: dict[str, Any] = {"timestamp": _milliseconds(request.arrival_s)} if is_timed else {}
        if not request.index:
            fields["block_size"] = trace.page_tokens
            fields |= {"note": trace.note} if trace.note else {}
        if request.session >= 0:
            fields["session_id"] = request.session
        if request.index in named:
            fields["request_id"] = request.index
        if not _follows(request, last.get(request.session)) and (request.after >= 0 or not is_timed):
            fields["after"] = list(request.predecessors)
        if request.after >= 0 and (is_timed or request.delay_s):
            fields["delay"] = _milliseconds(request.delay_s)
        fields |= _described(request, tenants, turns, packed=packed)
        if request.session >= 0:
            last[request.session] = request
        yield encode(fields) + b"\n"


def _follows(request: Request, before: Request | None) -> bool:
    """Return whether a request waits for the turn before it and no other; for none if it is the first turn."""
    return request.predecessors == (() if before is None else (before.index,))


def _named(requests: Iterable[Request]) -> set[int]:
    """Return the indices of the requests that others name, because they wait for others than the turn before them."""
    last: dict[int, Request] = {}
    named: set[int] = set()
    for request in requests:
        if not _follows(request, last.get(request.session)):
            named.update(request.predecessors)
        if request.session >= 0:
            last[request.session] = request
    return named


def _described(request: Request, tenants: dict[str, int], turns: dict[int, int], *, packed: bool) -> dict[str, Any]:
    """Return the fields of a request other than its times, without optional ones at their defaults."""
    fields: dict[str, Any] = {"input_length": request.prompt_tokens, "output_length": request.output_tokens}
    fields["hash_ids_rle" if packed else "hash_ids"] = _packed(request.runs) if packed else _ids(request.runs)
    turn = turns.get(request.session, 0)
    if request.session >= 0:
        turns[request.session] = turn + 1
    if request.turn != turn:
        fields["turn"] = request.turn + 1
    optional = {
        "type": request.kind,
        "tenant": tenants.setdefault(request.tenant, len(tenants) + 1) if request.tenant else None,
        "lora": request.adapter,
        "priority": request.priority,
        "persistent": request.persistent,
        "images": request.images,
        "n": request.samples if request.samples > 1 else None,
    }
    fields |= {name: value for name, value in optional.items() if value} | fields_of(request.retention, request.prompt_tokens)
    if request.output_runs is not None:
        answers = [_ids(extents) for extents in (request.output_runs, *request.sample_output_runs)]
        fields["output_hash_ids"] = answers if request.samples > 1 else answers[0]
    return fields


def _ids(extents: tuple[Extent, ...]) -> list[int]:
    return [page for start, pages in extents for page in range(start, start + pages)]


def _packed(extents: tuple[Extent, ...]) -> list[int]:
    return [number for extent in extents for number in extent]


def _milliseconds(seconds: float) -> float | int:
    """Return milliseconds, rounded to picoseconds: a whole number of them stays one."""
    value = round(seconds * 1000, 9)
    return int(value) if value.is_integer() else value


@contextmanager
def compressed(name: str, file: BinaryIO) -> Iterator[IO[bytes]]:
    """Compress what is written to a file as its name says: ``.gz``, ``.zst`` or not at all."""
    if name.endswith(".gz"):
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as stream:
            yield cast(IO[bytes], stream)
    elif name.endswith(".zst"):
        import zstandard

        with zstandard.ZstdCompressor(level=9).stream_writer(file, closefd=False) as stream:
            yield cast(IO[bytes], stream)
    else:
        yield file
