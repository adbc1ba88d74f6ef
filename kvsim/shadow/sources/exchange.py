"""A request that passes through the proxy, and its answer: what of it a ghost needs."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.answers import AnswerReader
from kvsim.shadow.sources.prompts import Prompts, Told
from kvsim.trace.records import Record

Fields = dict[str, Any]
WHERE = "proxy"
"""What errors name in place of a file."""


@dataclass(eq=False)
class Exchange:
    """A request, as its client sent it, and as much of the answer as has passed."""

    arrival_s: float
    """Unix time."""
    path: str
    body: bytes
    session: str | None = None
    status: int = 0
    """The server's answer; 0 before it."""
    answer: AnswerReader = field(default_factory=AnswerReader)
    has_ended: bool = False
    is_complete: bool = False
    """Whether all of the answer has passed."""

    @property
    def was_served(self) -> bool:
        """Whether the server has computed the prompt or, if there is no answer yet, can be taken to do so."""
        if not self.status:
            return not self.has_ended
        return self.status == 200 and (self.answer.has_begun or not self.has_ended or self._is_unread)

    @property
    def _is_unread(self) -> bool:
        """Whether it is an answer, though nothing that is known of answers was in it."""
        return self.is_complete and not self.answer.has_failed

    def requests(self, prompts: Prompts) -> Iterator[LiveRequest]:
        """Yield the requests that it is, one for each prompt. Raises TraceError for a body that cannot be read."""
        try:
            body = Record(WHERE, None, msgspec.json.decode(self.body))
        except (ValueError, RecursionError):
            raise Record(WHERE, None, {}).error("the body is not JSON") from None
        lines = PATHS[self.path](body)
        if len(lines) == 1:
            yield from self._read(prompts, self._with_answer(lines[0]), self._told(body))
            return
        for line in lines:
            yield from self._read(prompts, line, Told(self.arrival_s, self._session(body)))

    def _read(self, prompts: Prompts, line: Fields, told: Told) -> Iterator[LiveRequest]:
        record = Record(WHERE, None, line)
        return prompts.of_tokens(record, told) if "token_ids" in line else prompts.of_text(record, told)

    def _told(self, body: Record) -> Told:
        answer = self.answer
        return Told(self.arrival_s, self._session(body), answer.cached_tokens, answer.prompt_tokens, answer.output_tokens)

    def _session(self, body: Record) -> str | None:
        own = body.fields.get("session_id") or body.fields.get("session_params")
        name = own.get("id") if isinstance(own, dict) else own
        return name if isinstance(name, str) else self.session

    def _with_answer(self, line: Fields) -> Fields:
        """Return a line with the answer where it is known."""
        answer = self.answer
        if "token_ids" in line:
            ids = answer.token_ids
            return line | {"output_token_ids": ids, "output_length": len(ids)} if ids else line
        if (text := answer.text) is None:
            return line
        messages = line["body"].get("messages")
        if messages is None:
            others = {name: value for name, value in line.items() if name != "body"}
            return others | {"prompt": line["body"]["prompt"], "output": text}
        if not messages or not isinstance(messages[-1], dict) or messages[-1].get("role") == "assistant":
            return line  # an answer that goes on
        others = {name: value for name, value in line.items() if name != "body"}
        return others | {**line["body"], "messages": [*messages, {"role": "assistant", "content": text}]}


def _completions(body: Record) -> list[Fields]:
    prompt = body.fields.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return [_line(body, one) for one in (prompt if several and isinstance(prompt, list) else [prompt])]


def _generate(body: Record) -> list[Fields]:
    name = "input_ids" if body.has("input_ids") else "text"
    prompt = body.fields.get(name)
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return [_line(body, one) for one in (prompt if several and isinstance(prompt, list) else [prompt])]


def _chat(body: Record) -> list[Fields]:
    wanted = {name: body.fields[name] for name in ("messages", "tools") if body.has(name)}
    body.items("messages")
    return [_scope(body) | {"body": wanted}]


def _line(body: Record, prompt: Any) -> Fields:
    """Return a line for a prompt of token ids or text. Raises TraceError for anything else."""
    if isinstance(prompt, list):
        return _scope(body) | {"token_ids": prompt}
    if isinstance(prompt, str):
        return _scope(body) | {"body": {"prompt": prompt}}
    raise body.error("there is no prompt of text or token ids")


def _scope(body: Record) -> Fields:
    """Return what keeps prompts apart: the model or adapter that is asked, and a salt of the cache."""
    names = {"lora": ("lora_path", "model"), "tenant": ("cache_salt", "extra_key")}
    found = {
        ours: next((value for name in theirs if isinstance(value := body.fields.get(name), str)), None)
        for ours, theirs in names.items()
    }
    return {name: value for name, value in found.items() if value is not None}


PATHS: dict[str, Callable[[Record], list[Fields]]] = {
    "/v1/completions": _completions,
    "/v1/chat/completions": _chat,
    "/generate": _generate,
}
"""Paths with prompts, and what reads their lines. Whatever else passes is not looked at."""


class InOrder:
    """Exchanges in order of their arrival: each is taken when it and all before it have ended, or after ``patience_s``."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._waiting: deque[Exchange] = deque()

    def add(self, exchange: Exchange) -> None:
        """Take up an exchange that has just begun."""
        self._waiting.append(exchange)

    def take(self, now_s: float) -> Iterator[Exchange]:
        """Yield the exchanges whose turn it is."""
        waiting = self._waiting
        while waiting and (waiting[0].has_ended or now_s - waiting[0].arrival_s >= self.patience_s):
            yield waiting.popleft()

    @property
    def under_way(self) -> int:
        """Exchanges that have not ended."""
        return sum(not exchange.has_ended for exchange in self._waiting)
