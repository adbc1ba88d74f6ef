"""Logs of requests to OpenAI's API: batches, chat messages and prompts as text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvsim.trace.base import check_choice
from kvsim.trace.records import Record, shown
from kvsim.trace.text import TextTrace, Turn, conversation, kept_fields
from kvsim.trace.tokenizer import Tokenizer

REQUESTS = ("every_answer", "last_answer")
TEXTS = ("prompt", "text_input", "input", "input_ids")
"""Names of a prompt that is plain text; the second one is AIPerf's, the third one that of LMCache's agent traces, the
last one SGLang's, with token ids."""


@dataclass(kw_only=True)
class OpenAI(TextTrace):
    """Reads lines of one of these kinds, plain or compressed:

        a batch       ``{"custom_id", "method", "url", "body": {"messages": [...]}}`` or ``{"body": {"prompt"}}``: a request
        messages      ``{"messages": [...]}``: a conversation. If its last message is the assistant's, ``requests`` says which
                      answers were requests of this log: every one (the line is a whole conversation), or the last one
                      (each request was logged with its history). Otherwise the line is one request without an answer
        a prompt      ``{"prompt"}``, ``{"text_input"}`` (AIPerf) or ``{"input", "output"}``: a request, without a template

    Optional fields: ``timestamp`` (ms), ``session_id``, ``delay`` (ms), ``priority``, ``tenant``, ``lora`` as in ``Tokens``;
    ``output_length``; ``output``, the text of the answer to a prompt; ``tools`` beside ``messages``. An answer's length is, in
    this order, that of its text, ``output_length``, the ``max_tokens`` of a batch, ``output_tokens``. Content that is not text,
    such as an image, is an error.
    """

    requests: str = "every_answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("requests", self.requests, REQUESTS)

    def turns(self, record: Record, tokenizer: Tokenizer) -> Iterator[Turn]:
        body = Record(record.path, record.line, record.fields["body"]) if record.has("body") else record
        messages = read_messages(body) if body.has("messages") else None
        if messages and body is record and messages[-1]["role"] == "assistant":
            tools = body.fields.get("tools")
            yield from conversation(record, messages, tokenizer, tools, only_last=self.requests == "last_answer")
            return
        prompt, is_plain = prompt_of(body, tokenizer, messages)
        answer = text_of(record, "output") if not messages and record.has("output") else None
        length = output_tokens_of(record, body, self.output_tokens)
        yield Turn(record, prompt, answer, length, is_plain, kept_fields(record))


def prompt_of(body: Record, tokenizer: Tokenizer, messages: list[dict[str, Any]] | None = None) -> tuple[str | list[int], bool]:
    """Return the prompt of a request, and whether it is plain text, which no template has rendered.

    ``messages`` are those of ``body`` if they are read already. Raises TraceError.
    """
    if messages is None and body.has("messages"):
        messages = read_messages(body)
    if messages is not None:
        return tokenizer.render(messages, body.fields.get("tools")), False
    name = next((name for name in TEXTS if body.has(name)), None)
    if name is None:
        raise body.error("messages is missing; a request must have messages or a prompt")
    prompt = body.fields[name]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0], True
    return (body.integers(name), False) if isinstance(prompt, list) else (text_of(body, name), True)


def output_tokens_of(record: Record, body: Record, otherwise: int) -> int:
    """Return the length of an answer that the file does not contain."""
    if record.has("output_length"):
        return record.integer("output_length")
    name = body.either("max_tokens", "max_completion_tokens")
    return body.integer(name) if body.has(name) else otherwise


def read_messages(record: Record) -> list[dict[str, Any]]:
    """Return the messages of a line, with content as text. Raises TraceError."""
    messages = []
    for fields in record.items("messages"):
        message = Record(record.path, record.line, fields)
        if not isinstance(fields.get("role"), str):
            raise record.error("every message must have a role")
        messages.append({**fields, "content": _content(message)})
    if not messages:
        raise record.error("messages is empty; a request must have a prompt")
    return messages


def _content(message: Record) -> str | None:
    content = message.fields.get("content")
    if content is None or isinstance(content, str):
        return content
    parts = message.items("content")
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise message.error(f"content of type {shown(kind)} is not text; only text can be tokenized")
    return "\n".join(part["text"] for part in parts)


def text_of(record: Record, name: str) -> str:
    """Return a field that must be text. Raises TraceError."""
    value = record.fields[name]
    if not isinstance(value, str):
        raise record.error(f"{name} must be text, not {shown(value)}")
    return value
