"""Recognises the format of a trace file by the fields of its first record."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain

from kvsim.errors import TraceError, UsageError
from kvsim.trace.aiperf_inputs import AIPerfInputs
from kvsim.trace.bailian import Bailian
from kvsim.trace.base import Trace, TraceSource
from kvsim.trace.columns import renamed
from kvsim.trace.dag import Dag
from kvsim.trace.dynamo import Dynamo
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.files import open_trace
from kvsim.trace.freeinference import FreeInference
from kvsim.trace.lcp import Lcp, is_lcp, read_header
from kvsim.trace.lengths import LOGS, Lengths
from kvsim.trace.lmcache import LMCache
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.openai import OpenAI
from kvsim.trace.prompt_spans import PromptSpans, has_prompts
from kvsim.trace.proxy_log import ProxyLog
from kvsim.trace.records import AT_LEAST_ONE, MAX_LINE_BYTES, Record, read_records
from kvsim.trace.sharegpt import ShareGPT
from kvsim.trace.spans import SPANS
from kvsim.trace.tokens import Tokens
from kvsim.trace.tracelab import TraceLab
from kvsim.trace.weka import Weka


@dataclass(frozen=True)
class Format:
    """A format of trace files."""

    name: str
    """The choice of the group ``trace``."""
    reader: type[FileTrace]
    fields: tuple[str, ...]
    """Fields that every first record of this format has; ``a.b`` is the field b of the object in a."""
    block_size: str | None = None
    """The field that has the size of blocks, if one of the first records has it."""

    is_shown: Callable[[Record], bool] | None = None
    """Tells by one of the first records that the file is of this format, where its fields alone do not."""

    def missing(self, fields: Collection[str]) -> list[str]:
        """Return the identifying fields that a record with ``fields`` lacks."""
        return [field for field in self.fields if field not in fields]


FORMATS = (
    Format("bailian", Bailian, ("chat_id", "hash_ids")),
    Format("mooncake", Mooncake, ("input_length", "hash_ids"), "block_size"),
    Format("mooncake", Mooncake, ("input_tokens", "hash_ids"), "block_size"),
    Format("mooncake", Mooncake, ("input_length", "hash_ids_rle"), "block_size"),
    Format("dynamo", Dynamo, ("schema", "event_type", "event_time_unix_ms"), "request.replay.trace_block_size"),
    Format("dynamo", Dynamo, ("event.schema", "event.event_type"), "event.request.replay.trace_block_size"),
    Format("lmcache", LMCache, ("seq_len", "chunk_hashes"), "chunk_size"),
    Format("freeinference", FreeInference, ("session_id", "harness", "requests")),
    Format("weka", Weka, ("requests",), "block_size"),
    Format("tokens", Tokens, ("token_ids",)),
    Format("sharegpt", ShareGPT, ("conversations",)),
    Format("aiperf_inputs", AIPerfInputs, ("data",)),
    Format("dag", Dag, ("session_id", "turns")),
    Format("dag", Dag, ("session_id", "orchestrator")),
    Format("proxy_log", ProxyLog, ("request", "response")),
    Format("proxy_log", ProxyLog, ("messages", "response")),
    Format("openai", OpenAI, ("custom_id", "body")),
    Format("openai", OpenAI, ("messages",)),
    Format("openai", OpenAI, ("prompt",)),
    Format("openai", OpenAI, ("text_input",)),
    Format("openai", OpenAI, ("input", "output")),
    Format("tracelab", TraceLab, ("round_idx", "prefix_len", "input_len")),
    *(Format("spans", PromptSpans, log.fields, is_shown=has_prompts) for log in SPANS),
    *(Format("lengths", Lengths, log.fields) for log in LOGS),
    Format("mooncake", Mooncake, ("session_id", "input_length")),
)
"""The first one whose fields are all there is the format of a file."""


BINARY = Format("lcp", Lcp, ())
"""The format that has no records with fields: files of it are recognised by their first bytes, or by the end of their name."""
Columns = tuple[tuple[str, str], ...]
"""Fields of a format, and what a file calls them."""
LOOKED_AT = 100
"""Records that are searched for the size of blocks."""
OPTIONAL = (
    "timestamp", "output_length", "output_tokens", "session_id", "delay", "request_id", "after", "priority", "tenant",
    "type", "turn",
)  # fmt: skip
"""Fields of several formats that identify none."""
ALIKE = 0.6
"""From which similarity on two names may be those of one field."""


def recognise(
    path: str, max_line_bytes: int = MAX_LINE_BYTES, columns: Mapping[str, str] | None = None
) -> tuple[Format, dict[str, int]]:
    """Return the format of a file, and the settings that its first record shows.

    ``columns`` are what the file calls fields. Raises TraceError for an unknown format, naming the fields found and the nearest
    format. A file is looked at once while it does not change, however many jobs of a sweep read it.
    """
    named = tuple((columns or {}).items())
    if not os.path.isfile(path):
        return _recognise(path, max_line_bytes, named)
    state = os.stat(path)
    return _recognised(os.path.abspath(path), path, max_line_bytes, named, state.st_mtime_ns, state.st_size)


@cache
def _recognised(
    _absolute: str, path: str, max_line_bytes: int, columns: Columns, _mtime_ns: int, _size: int
) -> tuple[Format, dict[str, int]]:
    return _recognise(path, max_line_bytes, columns)


def _recognise(path: str, max_line_bytes: int, columns: Columns) -> tuple[Format, dict[str, int]]:
    if _is_binary(path, max_line_bytes):
        return BINARY, {"block_tokens": read_header(path, max_line_bytes).block_tokens}
    records = read_records(path, LOOKED_AT, max_line_bytes)
    records = renamed(records, dict(columns)) if columns else records
    first = next(records)
    found = first.names()
    seen, records = [first], iter(records)
    for known in FORMATS:
        if known.missing(found):
            continue
        if known.is_shown is not None:
            seen += records
            if not any(map(known.is_shown, seen)):
                continue
        return known, _block_size(chain(seen, records), known)
    raise TraceError(path, first.line, f"unknown format: it has {_listed(first.fields)}. {_nearest(found)}; or set trace=NAME")


def _is_binary(path: str, max_line_bytes: int) -> bool:
    if path.removesuffix(".gz").removesuffix(".zst").endswith(".lcp"):
        return True
    with open_trace(path, max_line_bytes) as file:
        return is_lcp(file.part(8))


def _block_size(records: Iterable[Record], known: Format) -> dict[str, int]:
    """Return the setting with the size of blocks that one of the first records has; empty if none has it."""
    *outer, name = (known.block_size or "").split(".")
    for record in records if name else ():
        part = record
        for step in outer:
            part = Record(part.path, part.line, inner if isinstance(inner := part.fields.get(step), dict) else {})
        if part.has(name):
            return {"block_tokens": part.integer(name, AT_LEAST_ONE)}
    return {}


def format_of(source: TraceSource) -> str:
    """Return the name of the format that a source reads; empty for a generator."""
    return next((known.name for known in (*FORMATS, BINARY) if known.reader is type(source)), "")


def load_source(source: TraceSource, page_tokens: int) -> Trace:
    """Load a trace as its ``load`` does. The error of a file that another reader is for names that one."""
    try:
        return source.load(page_tokens)
    except UsageError as error:
        if not isinstance(source, FileTrace) or type(error) not in (TraceError, UsageError) or not (other := _other(source)):
            raise
        if isinstance(error, TraceError):
            path, line, problem = error.args
            raise TraceError(path, line, f"{problem}; this looks like trace={other}") from error
        own = format_of(source)
        raise TraceError(source.path, None, f"this is no file of trace={own}: it looks like trace={other}") from error


def _other(source: FileTrace) -> str:
    """Return the name of the format that a file has whose first record lacks what this one's has; empty if there is none."""
    if not os.path.isfile(source.path):
        return ""
    try:
        known, _ = recognise(source.path, source.max_line_bytes, source.columns)
        if known is BINARY:
            return "" if isinstance(source, Lcp) else BINARY.name
        found = next(source.read(1)).names()
    except TraceError:
        return ""
    own = [one for one in FORMATS if one.reader is type(source)]
    return "" if any(not one.missing(found) for one in own) else known.name


def _nearest(found: Collection[str]) -> str:
    """Say which format is nearest and what it lacks; without any, list all formats.

    Of several that lack as much, it is the one whose missing fields the file may have by other names.
    """
    nearest = min(FORMATS, key=lambda known: (len(known.missing(found)) / len(known.fields), -len(_renamed(known, found))))
    missing = nearest.missing(found)
    if len(missing) < len(nearest.fields):
        named = [
            f"{own} may be its {field}: set trace.columns={{{field}: {own}}}" for field, own in _renamed(nearest, found).items()
        ]
        return "; ".join([f"The nearest format is {nearest.name}, which also has {_listed(missing)}", *named])
    names = dict.fromkeys(known.name for known in FORMATS)
    shown = (next(known for known in FORMATS if known.name == name) for name in names)
    return f"Known are {', '.join(f'{known.name} ({_listed(known.fields)})' for known in shown)}"


def _renamed(known: Format, found: Collection[str]) -> dict[str, str]:
    """Return, for the fields that a format has and a record lacks, the record's own ones with names like theirs."""
    others = [field for field in sorted(found) if field not in OPTIONAL and not any(field in other.fields for other in FORMATS)]
    alike = {field: get_close_matches(field, others, 1, ALIKE) for field in known.missing(found)}
    return {field: names[0] for field, names in alike.items() if names}


def _listed(fields: Collection[str]) -> str:
    shown = [f"{field:.40}" for field in list(fields)[:8]]
    return ", ".join(shown) + (", ..." if len(fields) > len(shown) else "") if shown else "no fields"
