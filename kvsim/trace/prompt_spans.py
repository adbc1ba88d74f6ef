"""Spans of OpenTelemetry that have the prompts of the requests to models, as messages or as text.

Where instrumentations put them, in this order (open-telemetry/semantic-conventions, docs/gen-ai, and what came before it):

    attributes, or those of an event     ``gen_ai.input.messages``, ``gen_ai.output.messages``, ``gen_ai.system_instructions``,
                                         ``gen_ai.tool.definitions``, as JSON, text of JSON or OTLP's lists
    the same, earlier                    ``gen_ai.prompt`` and ``gen_ai.completion``: text of JSON, or text
    numbered attributes                  ``gen_ai.prompt.0.role``, ``gen_ai.prompt.0.content``, ``gen_ai.completion.0.content``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import msgspec

from kvsim.core.request import Request
from kvsim.trace.base import Trace
from kvsim.trace.openai import read_messages
from kvsim.trace.page_index import PageIndex
from kvsim.trace.records import Record, shown
from kvsim.trace.spans import OUTPUT, SESSION, attributes_of, begin_s, is_of_model, parts_of, spans_of, whole
from kvsim.trace.text import TextTrace, Turn
from kvsim.trace.tokenizer import Tokenizer

INPUTS = ("gen_ai.input.messages", "gen_ai.prompt")
OUTPUTS = ("gen_ai.output.messages", "gen_ai.completion")
SYSTEM, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
ERROR = "error.type"
TEXT, CALL, RESPONSE = "text", "tool_call", "tool_call_response"
"""Types of the parts of a message that can be tokenized."""
REASONING = "reasoning"
"""The type of a part that is left out of prompts, as engines' templates leave it out."""


class Said(NamedTuple):
    """What a span tells of a request."""

    attributes: Record
    """Those of the span and of its events."""
    prompt: str | list[dict[str, Any]]
    """Text, or messages as OpenAI's API has them."""


@dataclass(kw_only=True)
class PromptSpans(TextTrace):
    """Reads spans of requests to models that have their prompts; a line is a span, or what OTLP's file exporter writes.

    A conversation's system instructions come first, then its messages. Parts of messages that are not text, calls of tools or
    their responses are an error. The answer is the text of the only output message. Where it has more than text (calls of
    tools, reasoning), or there are several, its length is that in ``gen_ai.usage.output_tokens``. Spans of agents and tools, of
    failed requests (``error.type``) and without a prompt are left out; ``Trace.note`` counts the last. Spans need not be sorted.
    ``limit`` counts requests.
    """

    IN_ORDER: ClassVar[bool] = False
    IS_LINE: ClassVar[bool] = False
    LIMITS_LINES: ClassVar[bool] = False

    def load(self, page_tokens: int) -> Trace:
        self._without_prompt = 0
        trace = super().load(page_tokens)
        left_out = f"spans of requests without a prompt, left out: {self._without_prompt}" if self._without_prompt else ""
        trace.note = "; ".join(filter(None, (trace.note, left_out)))
        return trace

    def turns(self, record: Record, tokenizer: Tokenizer) -> Iterator[Turn]:
        for span in spans_of(record):
            attributes = _all_attributes(span)
            if not is_of_model(attributes) or attributes.has(ERROR):
                continue
            said = _said(attributes)
            if said is None:
                self._without_prompt += any(name.startswith("gen_ai.usage.") for name in attributes.fields)
                continue
            yield self._turn(span, said, tokenizer)

    def _turn(self, span: Record, said: Said, tokenizer: Tokenizer) -> Turn:
        attributes, messages = said
        answer, samples, length = _answer(attributes)
        fields: dict[str, Any] = {"timestamp": begin_s(span) * 1000}
        if attributes.has(SESSION):
            fields["session_id"] = attributes.name(SESSION)
        if samples > 1:
            fields["n"] = samples
        tokens = self.output_tokens if length is None else length
        if isinstance(messages, str):
            return Turn(span, messages, answer, tokens, True, fields)
        prompt = tokenizer.render(messages, _json(attributes.fields.get(TOOLS)))
        return Turn(span, prompt, answer, tokens, False, fields)

    def _requests(self, page_tokens: int, index: PageIndex) -> Iterator[Request]:
        """Return the requests, the earliest at time 0, and the turns of sessions numbered by time: spans end in any order."""
        requests = list(super()._requests(page_tokens, index))
        begin = min((request.arrival_s for request in requests), default=0.0)
        turns: dict[int, int] = {}
        for request in sorted(requests, key=lambda request: request.arrival_s):
            request.arrival_s -= begin
            if request.session >= 0:
                request.turn = turns.get(request.session, 0)
                turns[request.session] = request.turn + 1
        return iter(requests)


def has_prompts(record: Record) -> bool:
    """Whether one of a line's spans has a prompt. Raises TraceError."""
    return any(
        is_of_model(attributes) and (_first(attributes, INPUTS) is not None or "gen_ai.prompt.0.content" in attributes.fields)
        for attributes in map(_all_attributes, spans_of(record))
    )


def _all_attributes(span: Record) -> Record:
    """Return the attributes of a span and of its events; those of the span come first."""
    found: dict[str, Any] = {}
    for event in parts_of(span, "events"):
        found |= attributes_of(event).fields
    return Record(span.path, span.line, found | attributes_of(span).fields)


def _said(attributes: Record) -> Said | None:
    """Return what a span says of a request's prompt; None if it has none. Raises TraceError."""
    name = _first(attributes, INPUTS)
    found = _numbered(attributes, "gen_ai.prompt") if name is None else _json(attributes.fields[name])
    if not found:
        return None
    if isinstance(found, str):
        return Said(attributes, found)
    messages = _messages(attributes, name or "gen_ai.prompt", found)
    instructions = _json(attributes.fields.get(SYSTEM))
    if instructions:
        parts = [{"type": TEXT, "content": instructions}] if isinstance(instructions, str) else instructions
        messages = [*_messages(attributes, SYSTEM, [{"role": "system", "parts": parts}]), *messages]
    return Said(attributes, messages)


def _first(attributes: Record, names: Sequence[str]) -> str | None:
    return next((name for name in names if attributes.has(name)), None)


def _json(value: Any) -> Any:
    """Return what a text of JSON stands for, if it is a list or an object; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(value.encode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return value
    return value


def _numbered(attributes: Record, name: str) -> list[dict[str, Any]]:
    """Return the messages of numbered attributes, up to the first that is missing."""
    found: list[dict[str, Any]] = []
    while (role := attributes.fields.get(f"{name}.{len(found)}.role")) is not None:
        found.append({"role": role, "content": _json(attributes.fields.get(f"{name}.{len(found)}.content"))})
    return found


def _messages(record: Record, name: str, value: Any) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API has them. Raises TraceError."""
    value = value.get("messages", [value]) if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise record.error(f"{name} must be a list of messages, not {shown(value)}")
    whole = [one for message in value for one in (_of_parts(record, name, message) if "parts" in message else [message])]
    return read_messages(Record(record.path, record.line, {"messages": whole}))


def _of_parts(record: Record, name: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message of parts as OpenAI's API has it; one with several responses of tools as several."""
    parts = message["parts"]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise record.error(f"{name}: parts must be a list of objects, not {shown(parts)}")
    kinds = [part.get("type") for part in parts]
    if strange := next((kind for kind in kinds if kind not in (TEXT, CALL, RESPONSE, REASONING)), None):
        raise record.error(f"{name}: content of type {shown(strange)} is not text; only text can be tokenized")
    texts = [str(part.get("content") or "") for part in parts if part.get("type") == TEXT]
    calls = [_call(part) for part in parts if part.get("type") == CALL]
    responses = [_response(part) for part in parts if part.get("type") == RESPONSE]
    own = {"role": message.get("role"), "content": "\n".join(texts)} | ({"tool_calls": calls} if calls else {})
    return [*([own] if texts or calls or not responses else []), *responses]


def _call(part: dict[str, Any]) -> dict[str, Any]:
    function = {"name": part.get("name"), "arguments": part.get("arguments")}
    return {"id": part.get("id"), "type": "function", "function": function}


def _response(part: dict[str, Any]) -> dict[str, Any]:
    content = part.get("response", part.get("result"))
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return {"role": "tool", "tool_call_id": part.get("id"), "content": text}


def _answer(attributes: Record) -> tuple[str | None, int, int | None]:
    """Return the text of the answer, the number of answers, and the length of each, None where it is not told."""
    name = _first(attributes, OUTPUTS)
    found = _numbered(attributes, "gen_ai.completion") if name is None else _json(attributes.fields[name])
    messages = [found] if isinstance(found, str | dict) else found if isinstance(found, list) else []
    samples = max(len(messages), 1)
    output = _first(attributes, OUTPUT)
    counted = None
    if output is not None:
        counted = Record(attributes.path, attributes.line, {output: whole(attributes.fields[output])}).integer(output)
    text = _text(messages[0]) if len(messages) == 1 else None
    return text or None, samples, None if counted is None else -(-counted // samples)


def _text(message: Any) -> str | None:
    """Return the text of an answer; None if it is not all that was generated."""
    if isinstance(message, str):
        return message
    if not isinstance(message, dict) or message.get("tool_calls"):
        return None
    parts = message.get("parts", message.get("content", message.get("text")))
    if isinstance(parts, str) or not isinstance(parts, list):
        return parts if isinstance(parts, str) else None
    if not all(isinstance(part, dict) and part.get("type") == TEXT for part in parts):
        return None
    return "\n".join(str(part.get("content", part.get("text")) or "") for part in parts)
