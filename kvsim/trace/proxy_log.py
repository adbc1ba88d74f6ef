"""Logs of proxies in front of OpenAI's API: a row for each request with its body and the response to it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from kvsim.core.request import Request
from kvsim.numbers import Real
from kvsim.trace.dates import date_s, is_date
from kvsim.trace.openai import output_tokens_of, prompt_of
from kvsim.trace.page_index import PageIndex
from kvsim.trace.records import Record
from kvsim.trace.text import TextTrace, Turn, kept_fields
from kvsim.trace.tokenizer import Tokenizer

TIMES = ("timestamp", "created_at", "start_time", "startTime")
"""Names of the time; without any, it is the response's ``created``."""
SECONDS_BELOW = 1e11
"""A Unix time below this is in seconds, not in milliseconds: it would be before March 1973."""
UNIX = Real(least=0, most=1e14)


@dataclass(kw_only=True)
class ProxyLog(TextTrace):
    """Reads rows ``{"timestamp", "request": {"messages": [...]}, "response": {"choices": [...], "usage": {...}}}``.

    ``request`` and ``response`` are JSON or text of JSON, also with what matters in a ``body``; without ``request``, the row
    itself has the ``messages`` or the ``prompt``, as LiteLLM's log has them. A time (``timestamp``, ``created_at``,
    ``start_time``, ``startTime``, or the response's ``created``) is a date, or a Unix time in seconds or milliseconds;
    rows need not be sorted.

    The answer is the text of the only choice. Where there is none, such as for a tool call, or where more was generated than the
    text (reasoning), or more choices than one, its length is that in ``usage``. Rows whose response is an error are left out.
    ``limit`` counts rows.
    """

    IN_ORDER: ClassVar[bool] = False
    IS_LINE: ClassVar[bool] = False

    def turns(self, record: Record, tokenizer: Tokenizer) -> Iterator[Turn]:
        response = _object(record, "response")
        if response.has("error") or response.has("status_code") and not 200 <= response.integer("status_code") < 300:
            return
        if response.has("body"):
            response = _object(response, "body")
        body = _object(record, "request") if record.has("request") else record
        body = _object(body, "body") if body.has("body") else body
        prompt, is_plain = prompt_of(body, tokenizer)
        answer, samples, length = _answer(response)
        fields = kept_fields(record) | _time(record, response)
        if samples > 1:
            fields["n"] = samples
        otherwise = output_tokens_of(record, body, self.output_tokens)
        yield Turn(record, prompt, answer, otherwise if length is None else length, is_plain, fields)

    def _requests(self, page_tokens: int, index: PageIndex) -> Iterator[Request]:
        """Return the requests, the earliest at time 0."""
        requests = list(super()._requests(page_tokens, index))
        begin_s = min((request.arrival_s for request in requests), default=0.0)
        for request in requests:
            request.arrival_s -= begin_s
        return iter(requests)


def _object(record: Record, name: str) -> Record:
    """Return a field that must be an object, or the text of one; an empty object if it is absent."""
    value = record.fields.get(name)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value.encode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            raise record.error(f"{name} must be a JSON object or the text of one") from None
        record = Record(record.path, record.line, {name: value})
    return record.part(name) if value is not None else Record(record.path, record.line, {})


def _time(record: Record, response: Record) -> dict[str, Any]:
    """Return the field with the time of a request in milliseconds; without a time, nothing."""
    where, name = next(((record, name) for name in TIMES if record.has(name)), (response, "created"))
    if not where.has(name):
        return {}
    if is_date(where, name):
        return {"timestamp": date_s(where, name) * 1000}
    value = where.number(name, UNIX)
    return {"timestamp": value * 1000 if value < SECONDS_BELOW else value}


def _answer(response: Record) -> tuple[str | None, int, int | None]:
    """Return the text of the answer, the number of answers, and the length of each, None where it is not told."""
    choices = response.items("choices") if response.has("choices") else []
    usage = response.part("usage") if response.has("usage") else Record(response.path, response.line, {})
    name = usage.either("completion_tokens", "output_tokens")
    length = -(-usage.integer(name) // max(len(choices), 1)) if usage.has(name) else None
    if len(choices) != 1:
        return None, max(len(choices), 1), length
    choice = Record(response.path, response.line, choices[0])
    message = choice.part("message") if choice.has("message") else choice
    text = message.fields.get("content", message.fields.get("text"))
    is_whole = isinstance(text, str) and text and not any(message.has(more) for more in ("tool_calls", "reasoning_content"))
    return (text if is_whole and not _reasoned(usage) else None), 1, length


def _reasoned(usage: Record) -> bool:
    """Whether tokens were generated that the answer's text does not contain."""
    details = usage.fields.get("completion_tokens_details")
    return isinstance(details, dict) and bool(details.get("reasoning_tokens"))
