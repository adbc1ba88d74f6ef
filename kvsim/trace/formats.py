"""Recognises the format of a trace file by the fields of its first record."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from kvsim.errors import TraceError
from kvsim.trace.bailian import Bailian
from kvsim.trace.base import TraceSource
from kvsim.trace.lengths import Lengths
from kvsim.trace.lmcache import LMCache
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.openai import OpenAI
from kvsim.trace.records import AT_LEAST_ONE, MAX_LINE_BYTES, read_records
from kvsim.trace.sharegpt import ShareGPT
from kvsim.trace.tokens import Tokens
from kvsim.trace.weka import Weka


@dataclass(frozen=True)
class Format:
    """A format of trace files."""

    name: str
    """The choice of the group ``trace``."""
    reader: type[TraceSource]
    fields: tuple[str, ...]
    """Fields that every first record of this format has."""
    block_size: str | None = None
    """The field that has the size of blocks, if the first record has it."""

    def missing(self, fields: Collection[str]) -> list[str]:
        """Return the identifying fields that a record with ``fields`` lacks."""
        return [field for field in self.fields if field not in fields]


FORMATS = (
    Format("bailian", Bailian, ("chat_id", "hash_ids")),
    Format("mooncake", Mooncake, ("input_length", "hash_ids"), "block_size"),
    Format("mooncake", Mooncake, ("input_tokens", "hash_ids"), "block_size"),
    Format("mooncake", Mooncake, ("input_length", "hash_ids_rle"), "block_size"),
    Format("lmcache", LMCache, ("seq_len", "chunk_hashes"), "chunk_size"),
    Format("weka", Weka, ("requests",), "block_size"),
    Format("tokens", Tokens, ("token_ids",)),
    Format("sharegpt", ShareGPT, ("conversations",)),
    Format("lengths", Lengths, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    Format("lengths", Lengths, ("Timestamp", "Request tokens", "Response tokens")),
    Format("openai", OpenAI, ("custom_id", "body")),
    Format("openai", OpenAI, ("messages",)),
    Format("openai", OpenAI, ("prompt",)),
    Format("openai", OpenAI, ("text_input",)),
    Format("openai", OpenAI, ("input", "output")),
    Format("lengths", Lengths, ("timestamp", "input_length")),
    Format("mooncake", Mooncake, ("session_id", "input_length")),
)
"""The first one whose fields are all there is the format of a file."""


OPTIONAL = ("timestamp", "output_length", "output_tokens", "session_id", "delay", "priority", "tenant", "type", "turn")
"""Fields of several formats that identify none."""
ALIKE = 0.6
"""From which similarity on two names may be those of one field."""


def recognise(path: str, max_line_bytes: int = MAX_LINE_BYTES) -> tuple[Format, dict[str, int]]:
    """Return the format of a file, and the settings that its first record shows.

    Raises TraceError for an unknown format, naming the fields found and the nearest format. A file is looked at once while it
    does not change, however many jobs of a sweep read it.
    """
    if not os.path.isfile(path):
        return _recognise(path, max_line_bytes)
    state = os.stat(path)
    return _recognised(os.path.abspath(path), path, max_line_bytes, state.st_mtime_ns, state.st_size)


@cache
def _recognised(_absolute: str, path: str, max_line_bytes: int, _mtime_ns: int, _size: int) -> tuple[Format, dict[str, int]]:
    return _recognise(path, max_line_bytes)


def _recognise(path: str, max_line_bytes: int) -> tuple[Format, dict[str, int]]:
    record = next(read_records(path, 1, max_line_bytes))
    found = record.fields.keys()
    for known in FORMATS:
        if not known.missing(found):
            name = known.block_size
            return known, {"block_tokens": record.integer(name, AT_LEAST_ONE)} if name and record.has(name) else {}
    raise TraceError(path, record.line, f"unknown format: it has {_listed(found)}. {_nearest(found)}; or set trace=NAME")


def format_of(source: TraceSource) -> str:
    """Return the name of the format that a source reads; empty for a generator."""
    return next((known.name for known in FORMATS if known.reader is type(source)), "")


def _nearest(found: Collection[str]) -> str:
    """Say which format is nearest and what it lacks; without any, list all formats.

    Of several that lack as much, it is the one whose missing fields the file may have by other names.
    """
    nearest = min(FORMATS, key=lambda known: (len(known.missing(found)) / len(known.fields), -len(_renamed(known, found))))
    missing = nearest.missing(found)
    if len(missing) < len(nearest.fields):
        named = [f"{own} may be its {field}: rename it" for field, own in _renamed(nearest, found).items()]
        return "; ".join([f"The nearest format is {nearest.name}, which also has {_listed(missing)}", *named])
    names = dict.fromkeys(known.name for known in FORMATS)
    shown = (next(known for known in FORMATS if known.name == name) for name in names)
    return f"Known are {', '.join(f'{known.name} ({_listed(known.fields)})' for known in shown)}"


def _renamed(known: Format, found: Collection[str]) -> dict[str, str]:
    """Return, for the fields that a format has and a record lacks, the record's own ones with names like theirs."""
    others = [field for field in found if field not in OPTIONAL and not any(field in other.fields for other in FORMATS)]
    alike = {field: get_close_matches(field, others, 1, ALIKE) for field in known.missing(found)}
    return {field: names[0] for field, names in alike.items() if names}


def _listed(fields: Collection[str]) -> str:
    shown = [f"{field:.40}" for field in list(fields)[:8]]
    return ", ".join(shown) + (", ..." if len(fields) > len(shown) else "") if shown else "no fields"
