"""OpenAI's completions, as any server speaks them: prompts of token ids, streamed answers, usage at the end."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from kvsim.errors import UsageError
from kvsim.results.observed import NOT_TOLD, ServerFacts
from kvsim.servers.answer import Answer, Failed
from kvsim.servers.dialects.base import Dialect, Known
from kvsim.servers.http import Http, message_of


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class Timing(msgspec.Struct):
    """vLLM's metrics of a request, with ``--enable-per-request-metrics``."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    """From its admission, not from its arrival."""


class Chunk(msgspec.Struct):
    """One event of a stream, as far as it is read."""

    choices: list[Choice] = []
    usage: Usage | None = None
    metrics: Timing | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class OpenAI(Dialect):
    """A server of which no more is known than its interface: it says nothing of its cache, and cannot be told to empty it.

    Nothing makes such a server ignore an end-of-sequence token, so answers may be shorter than asked.
    """

    engine = "openai"
    path = "/v1/completions"
    tells_cached = "it must send usage.prompt_tokens_details.cached_tokens"
    last_text_may_be_empty: ClassVar[bool] = False
    """Whether an event that ends an answer at its length brings a token even without text."""

    def body(self, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: bytes, answer: Answer) -> bool:
        chunk = _decode(event)
        if chunk.error is not None:
            raise Failed(f"the server failed: {message_of(msgspec.json.encode({'error': chunk.error}).decode())}")
        if chunk.usage is not None:
            _read_usage(chunk.usage, answer)
        if chunk.metrics is not None:
            _read_times(chunk.metrics, answer)
        brings = any(self._brings(choice) for choice in chunk.choices)
        if brings and chunk.usage is None:
            answer.output_tokens += 1
        return brings

    def _brings(self, choice: Choice) -> bool:
        """Return whether an event brings a token, which may be a part of a character and have no text of its own yet."""
        is_at_length = choice.finish_reason == "length"
        return bool(choice.text) or choice.finish_reason is None or (is_at_length and self.last_text_may_be_empty)

    async def know(self, http: Http) -> Known:
        cards = await model_cards(http)
        names = [str(card["id"]) for card in cards]
        return Known(ServerFacts(engine=self.engine, model=names[0] if names else None), names, longest(cards))

    async def reset(self, http: Http) -> str:
        raise UsageError(f"{http.url} cannot be told to empty its cache: restart it before each run, and set reset=false")


def _read_usage(usage: Usage, answer: Answer) -> None:
    """Take the server's own counts."""
    if usage.prompt_tokens:
        answer.prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        answer.output_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    told = None if details is None else details.cached_tokens
    answer.cached_tokens = NOT_TOLD if told is None else told


def _read_times(metrics: Timing, answer: Answer) -> None:
    """Take the server's own times."""
    if metrics.queue_time_ms is not None:
        answer.queued_s = metrics.queue_time_ms / 1000
    if metrics.time_to_first_token_ms is not None:
        answer.prefill_s = metrics.time_to_first_token_ms / 1000


async def model_cards(http: Http) -> list[dict[str, Any]]:
    """Return what ``/v1/models`` lists; nothing if the server has no such list. Raises UsageError if it does not answer."""
    reply = await http.get("/v1/models")
    if reply.status in (401, 403):
        raise UsageError(f"{http.url} wants a key (HTTP {reply.status}): set KVSIM_API_KEY")
    found = reply.json() if reply.is_good else None
    cards = found.get("data") if isinstance(found, dict) else None
    return [card for card in cards if isinstance(card, dict) and "id" in card] if isinstance(cards, list) else []


def longest(cards: Sequence[dict[str, Any]]) -> int | None:
    """Return the most tokens of a prompt and its answer, as vLLM and SGLang say in their lists of models."""
    found = cards[0].get("max_model_len") if cards else None
    return found if isinstance(found, int) else None
