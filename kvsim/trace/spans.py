"""Spans of OpenTelemetry with the attributes of generative AI: what they are, and the lengths and times of their requests.

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
    for span in spans_of(record):
        attributes = attributes_of(span)
        prompt = next((name for name in PROMPT if attributes.has(name)), None)
        if prompt is None or not is_of_model(attributes):
            continue
        prompt_tokens = count(attributes, prompt, whole(attributes.fields[prompt]), max_tokens)
        if not prompt_tokens:
            continue
        output = next((name for name in OUTPUT if attributes.has(name)), None)
        model = next((name for name in MODELS if attributes.has(name)), None)
        yield Asked(
            arrival_s=begin_s(span),
            prompt_tokens=prompt_tokens,
            output_tokens=count(attributes, output, whole(attributes.fields[output]), max_tokens) if output else 1,
            session=attributes.name(SESSION) if attributes.has(SESSION) else None,
            kind=str(attributes.name(model)) if model else "",
        )


def is_of_model(attributes: Record) -> bool:
    """Whether a span is that of a request to a model, as far as it says what it is."""
    return attributes.fields.get(OPERATION) in (None, *OPERATIONS)


def spans_of(record: Record) -> Iterator[Record]:
    """Yield the spans of a line."""
    if not record.has("resourceSpans"):
        yield record
        return
    for resource in parts_of(record, "resourceSpans"):
        for scope in parts_of(resource, "scopeSpans"):
            yield from parts_of(scope, "spans")


def parts_of(record: Record, name: str) -> Iterator[Record]:
    """Yield the objects in a list, none if it is absent."""
    for fields in record.items(name) if record.has(name) else ():
        yield Record(record.path, record.line, fields)


def attributes_of(span: Record) -> Record:
    """Return the attributes of a span or an event: an object, or OTLP's list of keys and values. Raises TraceError."""
    found = span.fields.get("attributes")
    if not isinstance(found, list):
        return span.part("attributes") if span.has("attributes") else Record(span.path, span.line, {})
    pairs = ((part.name("key"), part.part("value").fields) for part in parts_of(span, "attributes") if part.has("value"))
    try:
        return Record(span.path, span.line, {key: _plain(value) for key, value in pairs})
    except RecursionError:
        raise span.error("attributes are nested too deeply") from None


def _plain(value: object) -> Any:
    """Return a value of OTLP as JSON has it: ``{"stringValue": ...}``, a list in ``arrayValue``, an object in ``kvlistValue``."""
    kind, found = next(iter(value.items()), ("", None)) if isinstance(value, dict) else ("", value)
    inner = found.get("values") if isinstance(found, dict) else None
    if kind == "arrayValue":
        return [_plain(one) for one in inner] if isinstance(inner, list) else []
    if kind == "kvlistValue":
        pairs = [one for one in inner if isinstance(one, dict)] if isinstance(inner, list) else []
        return {str(one.get("key")): _plain(one.get("value")) for one in pairs}
    return found


def begin_s(span: Record) -> float:
    """Return when a span began, in seconds from 1970. Raises TraceError."""
    if not span.has("startTimeUnixNano"):
        return stamp(span, "start_time", 1.0)
    value = {"startTimeUnixNano": whole(span.fields["startTimeUnixNano"])}
    return Record(span.path, span.line, value).integer("startTimeUnixNano", NANOSECONDS) / 1e9


def whole(value: Any) -> Any:
    """Return a whole number that is text, as 64-bit integers are in OTLP; anything else as it is."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value


OF_SPANS = "a log of OpenTelemetry's spans"
SPANS = (
    LengthLog(OF_SPANS, ("resourceSpans",), read),
    LengthLog(OF_SPANS, ("attributes", "startTimeUnixNano"), read),
    LengthLog(OF_SPANS, ("attributes", "start_time"), read),
)
