"""The common part of traces that contain prompts as text: it is tokenized, and then read as a trace of tokens is."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar, NamedTuple

from kvsim.errors import TraceError, UsageError
from kvsim.numbers import Whole, check_settings
from kvsim.trace.base import OF_MAX_TOKENS, Trace
from kvsim.trace.byte_tokens import BYTES, NOTE, open_tokenizer
from kvsim.trace.records import Record
from kvsim.trace.tokenizer import TemplateError, Tokenizer, model_files
from kvsim.trace.tokens import Tokens

CHUNK = 2_000
"""Prompts that are tokenized together."""
KEPT = ("timestamp", "created_time", "session_id", "delay", "delay_ms", "priority", "tenant", "lora", "n")
"""Fields of a line that mean what they mean in a trace of tokens."""


class Turn(NamedTuple):
    """A request as text."""

    record: Record
    """The line that it comes from."""
    prompt: str | list[int]
    """Text, or token ids."""
    answer: str | None
    """The text of the answer; None if the file does not contain it."""
    output_tokens: int
    """The length of an answer that the file does not contain."""
    is_plain: bool
    """Whether the prompt is not rendered by a template, so that the tokenizer puts its own tokens in front."""
    fields: dict[str, Any]
    """Fields of a trace of tokens: when the request arrives, whose it is."""


@dataclass(kw_only=True)
class TextTrace(Tokens):
    """Tokenizes the text of a file with the tokenizer and the chat template in the folder ``tokenizer``.

    ``tokenizer`` may also be ORG/NAME, a model in the local cache of Hugging Face, or ``bytes``: about 4 bytes a token
    (``Trace.note``).

    The tokens of an answer are those of its text and one more, which ends it and has no KV. Answers that the file does not
    contain have ``output_tokens`` tokens, unless it tells their length.
    """

    LIMITS_LINES: ClassVar[bool] = True
    """Whether ``limit`` counts lines of the file; otherwise, it counts requests."""

    tokenizer: str | None = None
    output_tokens: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(0, self.max_tokens), "output_tokens", hint=OF_MAX_TOKENS)

    def load(self, page_tokens: int) -> Trace:
        trace = super().load(page_tokens)
        trace.note = NOTE if self.tokenizer == BYTES else ""
        return trace

    @abstractmethod
    def turns(self, record: Record, tokenizer: Tokenizer) -> Iterator[Turn]:
        """Yield the requests of a line. Raises TraceError, and TemplateError for a conversation that the template refuses."""

    def files(self) -> list[str]:
        """Return the file and those of the tokenizer."""
        return [self.path, *(model_files(self.tokenizer) if self.tokenizer else ())]

    def records(self) -> Iterator[Record]:
        """Yield a line of a trace of tokens for each request."""
        if self.tokenizer is None:
            next(self.read(1))
            raise UsageError(
                "trace.tokenizer is missing: this file contains text; set trace.tokenizer=DIR, a folder with a model's "
                "tokenizer.json and chat template, trace.tokenizer=ORG/NAME, a model in the Hugging Face cache, or "
                "trace.tokenizer=bytes for a first look, at about 4 bytes a token"
            )
        tokenizer = open_tokenizer(self.tokenizer)
        turns = self._all_turns(tokenizer)
        first = next(turns, None)
        if first is None:
            raise TraceError(self.path, None, "no conversation has a prompt: it contains no requests")
        turns = chain([first], turns)
        while chunk := list(islice(turns, CHUNK)):
            yield from tokenized(chunk, tokenizer)

    def _all_turns(self, tokenizer: Tokenizer) -> Iterator[Turn]:
        left = None if self.LIMITS_LINES else self.limit
        for record in self.read(self.limit if self.LIMITS_LINES else None):
            try:
                for turn in islice(self.turns(record, tokenizer), left):
                    yield turn
                    left = None if left is None else left - 1
            except TemplateError as error:
                raise record.error(str(error)) from None
            if left == 0:
                return


def tokenized(turns: Sequence[Turn], tokenizer: Tokenizer) -> Iterator[Record]:
    """Yield each request as a line of a trace of tokens."""
    tokenizer.encode_all(_texts(turns))
    for turn in turns:
        yield _tokenized(turn, tokenizer)


def _texts(turns: Sequence[Turn]) -> Iterator[str]:
    for turn in turns:
        if isinstance(turn.prompt, str):
            yield turn.prompt
        if turn.answer is not None:
            yield turn.answer


def _tokenized(turn: Turn, tokenizer: Tokenizer) -> Record:
    """Return a request as a line of a trace of tokens."""
    tokens = tokenizer.encode(turn.prompt) if isinstance(turn.prompt, str) else turn.prompt
    fields = {**turn.fields, "token_ids": tokenizer.begin + tokens if turn.is_plain else tokens}
    if turn.answer is None:
        fields["output_length"] = turn.output_tokens
    else:
        answer = tokenizer.encode_answer(turn.prompt, turn.answer)
        fields["output_token_ids"] = [*answer, 0] if answer else []
        fields["output_length"] = len(fields["output_token_ids"])
    return Record(turn.record.path, turn.record.line, fields)


def kept_fields(record: Record) -> dict[str, Any]:
    """Return the fields of a line that say when its request arrives and whose it is."""
    return {name: record.fields[name] for name in KEPT if record.has(name)}


def conversation(
    record: Record, messages: list[dict[str, Any]], tokenizer: Tokenizer, tools: Any = None, *, only_last: bool = False
) -> Iterator[Turn]:
    """Yield a request for each answer in a conversation, and one for what comes after the last answer.

    The prompt of a request is the conversation before its answer. Each waits for the answer before it, the first for the line's
    timestamp. With ``only_last``, only the last request was made here. An answer that is missing at the end has no tokens.
    """
    roles = [message["role"] for message in messages]
    ends = [at for at in range(1, len(roles)) if roles[at] == "assistant" and roles[at - 1] != "assistant"]
    if roles[-1] != "assistant":
        ends.append(len(roles))
    fields = kept_fields(record)
    session = {"session_id": fields.get("session_id", f"line {record.path}:{record.line}")}
    for number, end in enumerate(ends[-1:] if only_last else ends):
        prompt = tokenizer.render(messages[:end], tools)
        answer = _answer(messages, end, prompt, tokenizer, tools) if end < len(messages) else ""
        own = fields if only_last else session if number else {**fields, **session}
        yield Turn(record, prompt, answer, 0, False, own)


def _answer(messages: list[dict[str, Any]], end: int, prompt: str, tokenizer: Tokenizer, tools: Any) -> str:
    """Return the text of the answer at position ``end``: its content or, for tool calls, what the template makes of it."""
    message = messages[end]
    if not message.get("tool_calls"):
        return str(message.get("content") or "")
    whole = tokenizer.render(messages[: end + 1], tools, with_prompt=False)
    return whole.removeprefix(prompt) if whole.startswith(prompt) else str(message.get("content") or "")
