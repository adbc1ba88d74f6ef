"""SGLang's exported metrics (``--export-metrics-to-file``): a line for each request that has ended, in a file for each hour.

Read in SGLang 0.5.23 (``srt/observability/request_metrics_exporter.py``): ``request_parameters`` is the request as JSON in a
text, with ``text`` or ``input_ids`` unless ``--log-requests-level`` leaves them out; beside it are the fields of ``meta_info``.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.prompts import Prompts, Told
from kvsim.trace.records import Record

SCOPES = {"lora_path": "lora", "lora_id": "lora", "extra_key": "tenant"}
"""What keeps prompts apart, and the name of it in a trace of tokens."""


def read_export(prompts: Prompts, record: Record, told: Told) -> Iterator[LiveRequest]:
    """Yield the request of a line; nothing for one that was given up before its first token. Raises TraceError."""
    try:
        asked = Record(record.path, record.line, msgspec.json.decode(str(record.name("request_parameters"))))
    except (ValueError, RecursionError):
        raise record.error("request_parameters is not JSON") from None
    output_tokens = record.integer("completion_tokens") if record.has("completion_tokens") else 0
    reason = record.fields.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort" and not output_tokens:
        return
    told = told._replace(
        session=_session(asked.fields),
        cached_tokens=record.integer("cached_tokens") if record.has("cached_tokens") else None,
        prompt_tokens=record.integer("prompt_tokens") if record.has("prompt_tokens") else None,
        output_tokens=output_tokens,
    )
    scope = {ours: asked.fields[name] for name, ours in SCOPES.items() if isinstance(asked.fields.get(name), str)}
    if asked.has("input_ids"):
        yield from prompts.of_tokens(_line(record, scope | {"token_ids": asked.integers("input_ids")}), told)
    elif isinstance(asked.fields.get("text"), str):
        yield from prompts.of_text(_line(record, scope | {"prompt": asked.fields["text"], "output_length": output_tokens}), told)
    else:
        raise record.error(
            "request_parameters has neither text nor input_ids: start SGLang without --log-requests, or with its level 2"
        )


def _line(record: Record, fields: dict[str, Any]) -> Record:
    return Record(record.path, record.line, fields)


def _session(asked: dict[str, Any]) -> str | None:
    """Return the session that a request names."""
    session = asked.get("session_params")
    name = session.get("id") if isinstance(session, dict) else asked.get("session_id")
    return name if isinstance(name, str) else None
