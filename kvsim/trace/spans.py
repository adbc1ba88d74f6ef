"""Spans of OpenTelemetry with the attributes of generative AI: lengths and times of the requests to models.

A line is what OTLP's file exporter writes (``resourceSpans``), or one span, as the SDKs' exporters to the console write it.
The attributes are those of the semantic conventions for generative AI (open-telemetry/semantic-conventions, docs/gen-ai) and,
in parentheses, of their earlier versions, which vLLM's spans also have.
"""

from collections.abc import Iterator
from typing import Any

from kvsim.numbers import Whole
from kvsim.trace.dates import stamp
from kvsim.trace.length_logs import Asked, LengthLog, count
from kvsim.trace.records import Record

PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
SESSION = "gen_ai.conversation.id"
MODELS = ("gen_ai.response.model", "gen_ai.request.model")
OPERATION = "gen_ai.operation.name"
OPERATIONS = ("chat", "text_completion", "generate_content")
"""Operations that are a request to a model; an agent's span has the sum of its requests, and they have spans of their own."""
NANOSECONDS = Whole(0, 2**63 - 1)


def read(record: Record, max_tokens: int) -> Iterator[Asked]:
    """Yield the requests of a line, one for each span of a model's answer. The number of prompt tokens includes cached ones."""
    for span in _spans(record):
        attributes = _attributes(span)
        prompt = next((name for name in PROMPT if attributes.has(name)), None)
        if prompt is None or attributes.fields.get(OPERATION) not in (None, *OPERATIONS):
            continue
        prompt_tokens = count(attributes, prompt, _whole(attributes.fields[prompt]), max_tokens)
        if not prompt_tokens:
            continue
        output = next((name for name in OUTPUT if attributes.has(name)), None)
        model = next((name for name in MODELS if attributes.has(name)), None)
        yield Asked(
            arrival_s=_begin_s(span),
            prompt_tokens=prompt_tokens,
            output_tokens=count(attributes, output, _whole(attributes.fields[output]), max_tokens) if output else 1,
            session=attributes.name(SESSION) if attributes.has(SESSION) else None,
            kind=str(attributes.name(model)) if model else "",
        )


def _spans(record: Record) -> Iterator[Record]:
    if not record.has("resourceSpans"):
        yield record
        return
    for resource in _parts(record, "resourceSpans"):
        for scope in _parts(resource, "scopeSpans"):
            yield from _parts(scope, "spans")


def _parts(record: Record, name: str) -> Iterator[Record]:
    """Yield the objects in a list, none if it is absent."""
    for fields in record.items(name) if record.has(name) else ():
        yield Record(record.path, record.line, fields)


def _attributes(span: Record) -> Record:
    """Return the attributes of a span: an object, or OTLP's list of keys and values."""
    found = span.fields.get("attributes")
    if not isinstance(found, list):
        return span.part("attributes") if span.has("attributes") else Record(span.path, span.line, {})
    pairs = ((part.name("key"), part.part("value").fields) for part in _parts(span, "attributes") if part.has("value"))
    return Record(span.path, span.line, {key: next(iter(value.values()), None) for key, value in pairs})


def _begin_s(span: Record) -> float:
    if not span.has("startTimeUnixNano"):
        return stamp(span, "start_time", 1.0)
    value = {"startTimeUnixNano": _whole(span.fields["startTimeUnixNano"])}
    return Record(span.path, span.line, value).integer("startTimeUnixNano", NANOSECONDS) / 1e9


def _whole(value: Any) -> Any:
    """Return a whole number that is text, as 64-bit integers are in OTLP; anything else as it is."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value


OF_SPANS = "a log of OpenTelemetry's spans"
SPANS = (
    LengthLog(OF_SPANS, ("resourceSpans",), read),
    LengthLog(OF_SPANS, ("attributes", "startTimeUnixNano"), read),
    LengthLog(OF_SPANS, ("attributes", "start_time"), read),
)
