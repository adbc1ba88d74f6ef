"""Single lines of traces, for logs that have no end: which reader reads a line, and what its times mean."""

from dataclasses import fields, replace
from typing import Any

from kvsim.errors import UsageError
from kvsim.trace.file_trace import FileTrace
from kvsim.trace.formats import FORMATS, Format
from kvsim.trace.mooncake import ANSWER
from kvsim.trace.openai import OpenAI
from kvsim.trace.records import AT_LEAST_ONE, Record
from kvsim.trace.tokens import Tokens

TOKEN_LINES = Tokens(path="")
"""Reads lines of token ids."""
TEXT_LINES = OpenAI(path="", requests="last_answer")
"""Reads lines of text, of which each is one request with its history."""
BLOCKS_OF_ANSWER = ANSWER
"""The field with the ids of the blocks that an answer completes."""


def reader_of(record: Record) -> FileTrace:
    """Return what reads lines like this one, each as a request of its own.

    Raises TraceError for one of no known format, and UsageError for a format whose lines do not have one request with its prompt.
    """
    names = record.names()
    known = next((one for one in FORMATS if not one.missing(names)), None)
    if known is None:
        raise record.error("unknown format: it does not have the fields of a trace with prompts")
    if not known.reader.IS_LINE:
        raise UsageError(f"log: {record.path} is a trace={known.name}, whose lines are no single requests: replay it")
    reader = known.reader(path=record.path, **_shown(known, record))
    return replace(reader, requests=TEXT_LINES.requests) if isinstance(reader, OpenAI) else reader


def _shown(known: Format, record: Record) -> dict[str, Any]:
    """Return the settings that a first line shows. Raises TraceError."""
    size = known.block_size
    has_size = size is not None and record.has(size) and any(one.name == "block_tokens" for one in fields(known.reader))
    return {"block_tokens": record.integer(size, AT_LEAST_ONE)} if size is not None and has_size else {}
