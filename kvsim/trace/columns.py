"""Fields of a file by other names: ``columns`` says what the file calls the fields of its format."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from kvsim.errors import TraceError
from kvsim.suggest import closest
from kvsim.trace.records import Record

FIELDS = frozenset((
    "timestamp", "created_time", "session_id", "delay", "delay_ms", "priority", "tenant", "lora", "n", "turn", "type",
    "persistent", "retention", "decode_retention",
    "images", "multimodal", "note", "reset", "context_mode", "input_length", "input_tokens",
    "output_length", "output_tokens", "hash_ids", "hash_ids_rle", "output_hash_ids", "block_size", "token_ids",
    "output_token_ids", "chat_id", "parent_chat_id", "requests", "id", "seq_len", "chunk_hashes", "chunk_size",
    "request_id", "model_name", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "Timestamp", "Request tokens",
    "Response tokens", "Session ID", "Log Type", "custom_id", "body", "messages", "tools", "prompt", "text_input",
    "input", "input_ids", "output", "max_tokens", "max_completion_tokens", "conversations", "request", "response",
    "created_at", "start_time", "startTime", "data", "schema", "event_type", "event_time_unix_ms", "event",
    "agent_context", "metadata", "metrics", "error", "input_lens", "output_lens", "start_times", "errors",
    "resourceSpans", "attributes", "startTimeUnixNano", "after", "turns", "orchestrator", "rounds", "spawns",
    "pre_session_spawns", "week", "user_id", "harness", "input_len", "output_len", "arrival_time", "round_idx",
    "tool_wait_after_ms", "prefix_len",
))  # fmt: skip
"""Names of the fields of all formats, by which ``columns`` may be given."""


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ValueError unless all names are those of fields, and no two of them are the same field of a file."""
    seen: dict[str, str] = {}
    for known, own in columns.items():
        if known not in FIELDS:
            raise ValueError(f"columns: no format has a field {known}{closest(known, sorted(FIELDS))}")
        if not isinstance(own, str) or not own:
            raise ValueError(f"columns must name a field of the file for {known}, not {own!r}")
        if own in seen:
            raise ValueError(f"columns: {seen[own]} and {known} cannot both be {own}")
        seen[own] = known


def renamed(records: Iterator[Record], columns: Mapping[str, str]) -> Iterator[Record]:
    """Yield the records of a file with the fields by the names of their format.

    ``a.b`` in the file is the field b of the object in a. Raises TraceError if the first record lacks one of the file's fields,
    and for a record that has a field by the format's name, too.
    """
    first = next(records, None)
    if first is None:
        return
    for own in columns.values():
        if _value(first.fields, own) is None and own not in first.fields:
            found = ", ".join(f"{name:.40}" for name in list(first.fields)[:8])
            raise _problem(first, f"there is no field {own}; the first record has {found or 'no fields'}")
    yield from (_renamed(record, columns) for record in chain([first], records))


def _renamed(record: Record, columns: Mapping[str, str]) -> Record:
    fields = {name: value for name, value in record.fields.items() if name not in columns.values()}
    for known, own in columns.items():
        if known in fields:
            raise _problem(record, f"{known} is {own}, but there is a field {known}, too: leave {known} out of it")
    found = {known: _value(record.fields, own) for known, own in columns.items()}
    return type(record)(record.path, record.line, fields | {name: value for name, value in found.items() if value is not None})


def _value(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field, or one inside an object; None if it is absent."""
    if name in fields:
        return fields[name]
    outer, _, inner = name.partition(".")
    value = fields.get(outer)
    return _value(value, inner) if inner and isinstance(value, dict) else None


def _problem(record: Record, problem: str) -> TraceError:
    return record.error(f"trace.columns: {problem}")
