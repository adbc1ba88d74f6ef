"""Reads the answer of a server on its way to the client: its text or tokens, and what the server says of the request."""

import zlib
from typing import Any

import msgspec

from kvsim.servers.dialects.openai import Usage
from kvsim.servers.dialects.sglang import Meta

LONGEST_BYTES = 1 << 26
"""The most of a line, or of an answer in one piece, that is kept to be read."""
ENCODINGS = {"": None, "identity": None, "gzip": 31, "deflate": 15}
"""Content encodings that can be read, and zlib's window bits for them."""


class Message(msgspec.Struct):
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether a later prompt has it as it is."""
        return not (self.reasoning or self.reasoning_content or self.tool_calls)


class Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    """vLLM, if asked with ``return_token_ids``."""
    delta: Message | None = None
    message: Message | None = None


class Event(msgspec.Struct):
    """One event of a stream, or an answer in one piece, of OpenAI's interface or SGLang's own, as far as it is read."""

    choices: list[Choice] = []
    usage: Usage | None = None
    meta_info: Meta | None = None
    index: int = 0
    """Which answer an event of ``/generate`` is of, if there are several."""
    text: str | None = None
    output_ids: list[int] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event | list[Event]).decode


class AnswerReader:
    """Takes an answer piece by piece. Nothing in it can make it fail: what cannot be read is not known."""

    def __init__(self, content_type: str = "", encoding: str = "") -> None:
        bits = ENCODINGS.get(encoding.strip().lower(), 0)
        self._decompress = None if not bits else zlib.decompressobj(bits)
        self._is_stream = content_type.startswith("text/event-stream")
        self._begun = b""
        self._events = 0
        self._parts: list[str] = []
        self._ids: list[int] = []
        self._answers = 1
        """Answers to one prompt, of OpenAI's interface, as far as they have come."""
        self._is_readable = self._is_known = bits != 0
        """Whether anything of it can be read, and whether all of it so far is known."""
        self.has_begun = False
        """Whether a token, or the whole answer, has come."""
        self.has_failed = False
        """Whether the server says in it that something was wrong."""
        self.usage: Usage | None = None
        self.meta: Meta | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if not self._is_readable:
            self.has_begun |= bool(data)
            return
        if self._decompress is not None:
            try:
                data = self._decompress.decompress(data, LONGEST_BYTES)
            except zlib.error:
                self._give_up()
                return
        lines = [self._begun + data] if not self._is_stream else (self._begun + data).split(b"\n")
        self._begun = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())
        if len(self._begun) > LONGEST_BYTES:
            self._give_up()

    def _give_up(self) -> None:
        """Take nothing more of what cannot be read."""
        self._begun, self._is_readable, self._is_known, self.has_begun = b"", False, False, True

    def end(self) -> None:
        """Take that nothing comes any more."""
        rest, self._begun = self._begun, b""
        if not self._is_stream:
            self._take(rest.strip())
        elif rest.startswith(b"data:"):
            self._take(rest[5:].strip())

    @property
    def text(self) -> str | None:
        """The text so far; None if it is not all known or later prompts cannot have it like this."""
        return "".join(self._parts) if self._is_known and self._parts else None

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far, if the server tells them."""
        return self._ids if self._is_known else []

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, by the server's count."""
        told = self.usage or self.meta
        return told.prompt_tokens or None if told is not None else None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: by the server's count, or one for each event so far. The mean of several whose sum is told."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            one = self._answers > 1 and len(self._ids)
            return one or round(self.usage.completion_tokens / self._answers)
        if self.meta is not None:
            return self.meta.completion_tokens
        return len(self._ids) or self._events

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the server had; None if it does not say."""
        if self.meta is not None:
            return self.meta.cached_tokens
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def _take(self, content: bytes) -> None:
        if not content or content == b"[DONE]":
            return
        try:
            decoded = _decode(content)
        except (ValueError, RecursionError):
            self._is_known = False
            return
        events = decoded if isinstance(decoded, list) else [decoded]
        self.has_begun |= any(event.choices or event.meta_info is not None for event in events)
        self.has_failed |= any(event.error is not None for event in events)
        for event in events[:1]:  # the others are of other answers
            self._take_event(event)

    def _take_event(self, event: Event) -> None:
        self.usage = event.usage or self.usage
        for choice in event.choices:
            self._answers = max(self._answers, choice.index + 1)
            if choice.index == 0:
                self._take_choice(choice)
        if event.meta_info is not None and event.index == 0:
            self._take_generated(event, event.meta_info)

    def _take_choice(self, choice: Choice) -> None:
        message = choice.delta or choice.message
        is_plain = message is None or message.is_plain
        self._is_known &= is_plain
        text = choice.text if message is None else message.content
        self._events += bool(text) or not is_plain
        self._parts += [text] if text else []
        self._ids += choice.token_ids or []

    def _take_generated(self, event: Event, meta: Meta) -> None:
        """Take an event of ``/generate``, which has all of the answer so far or, if the server streams so, what is new."""
        self.meta = meta
        self._events += 1
        before = "".join(self._parts)
        if event.text is not None:
            self._parts = [event.text] if event.text.startswith(before) else [before, event.text]
        if event.output_ids is not None:
            has_all = len(event.output_ids) == meta.completion_tokens
            self._ids = event.output_ids if has_all else self._ids + event.output_ids
