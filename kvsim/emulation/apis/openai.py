"""OpenAI's completions and chat, as servers of open models have them: prompts of token ids or, with a tokenizer, text."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvsim.emulation.apis.base import Api, Prompt, Routes, Wanted, complete, parsed
from kvsim.emulation.apis.merged import merged
from kvsim.emulation.http_server import BadRequest, HttpRequest, Reply
from kvsim.emulation.served import Extras, Served

CHAT_TOKENS = 128
"""Tokens of an answer in a chat whose client does not say how long it may be; a real model ends such answers itself."""


Prompts = str | list[int | str | list[int]]
"""A prompt as text or token ids, or several of them."""

SESSION_HEADER = "x-session-id"
"""Names the session of a request, as vLLM has it."""


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(msgspec.Struct):
    """What completions and chats are asked with, as far as it matters here."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    def extras(self, headers: Mapping[str, str]) -> Extras:
        """Return what is said of the request besides."""
        reports_hits = (self.vllm_xargs or {}).get("kv_cache_report_mode") == "full"
        return Extras(self.cache_salt or None, self.session_id or headers.get(SESSION_HEADER), reports_hits)

    def wanted(self, default: int) -> Wanted:
        """Return how long an answer shall be."""
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return Wanted(most, self.min_tokens, default, self.ignore_eos)


class Completion(Asked, kw_only=True):
    prompt: Prompts
    echo: bool | None = False


class Chat(Asked, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class Text(msgspec.Struct):
    """What ``/tokenize`` is asked with."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None


class Form:
    """How an answer is written: one of completions, one of chats."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def opening(self) -> dict[str, Any] | None:
        """Return the choice that a stream begins with; None: nothing."""
        return None

    def choice(self, text: str, *, is_part: bool) -> dict[str, Any]:
        """Return what a choice has of an answer, or of a part of it."""
        return {"text": text}


class ChatForm(Form):
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def choice(self, text: str, *, is_part: bool) -> dict[str, Any]:
        return {"delta": {"content": text}} if is_part else {"message": {"role": "assistant", "content": text}}


COMPLETION, CHAT = Form(), ChatForm()


class OpenAI(Api):
    """A server with OpenAI's interface that says nothing else of itself."""

    engine, owner = "openai", "organization"

    def routes(self) -> Routes:
        return {
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/tokenize"): self._tokenize,
        }

    async def _complete(self, request: HttpRequest, reply: Reply) -> None:
        asked = parsed(request.body, Completion)
        if asked.echo:
            raise BadRequest(400, "echo: prompts are not repeated here: leave it out")
        await self._serve(
            asked, [self.tokens_of(prompt) for prompt in prompts_of(asked.prompt)], COMPLETION, 16, request.headers, reply
        )

    async def _chat(self, request: HttpRequest, reply: Reply) -> None:
        asked = parsed(request.body, Chat)
        tokens = self.chat_tokens(asked.messages, asked.tools)
        await self._serve(asked, [tokens], CHAT, CHAT_TOKENS, request.headers, reply)

    async def _tokenize(self, request: HttpRequest, reply: Reply) -> None:
        asked = parsed(request.body, Text)
        if asked.messages is None:
            tokens = self.texts.tokens(asked.prompt or "")
        else:
            tokens = self.chat_tokens(asked.messages)
        await reply.whole(200, {"count": len(tokens), "max_model_len": self.longest_tokens, "tokens": tokens})

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Return the tokens of a conversation. Raises BadRequest for one that cannot be rendered."""
        try:
            return self.texts.chat(messages, tools)
        except ValueError as error:
            raise BadRequest(400, str(error)) from None

    async def _serve(
        self,
        asked: Asked,
        prompts: Sequence[list[int]],
        form: Form,
        default: int,
        headers: Mapping[str, str],
        reply: Reply,
    ) -> None:
        self.check_model(asked.model)
        wanted, copies = asked.wanted(default), 1 if asked.n is None else asked.n
        extras = asked.extras(headers)
        with self.taken(prompts, wanted, copies=copies, is_streamed=bool(asked.stream), extras=extras) as served:
            if asked.stream:
                await self._stream(served, copies, asked.stream_options or StreamOptions(), form, reply)
                return
            await complete(served)
            choices = [self._choice(at, one, 0, len(one.answer), form) for at, one in enumerate(served)]
            await reply.whole(200, self._head(served[0], form, form.whole) | {"choices": choices} | self.closing(served, copies))

    async def _stream(self, served: Sequence[Served], copies: int, options: StreamOptions, form: Form, reply: Reply) -> None:
        head = self._head(served[0], form, form.part)
        async for at, told, tokens in merged(served):
            if not told and (opening := form.opening()) is not None:
                await reply.event(head | {"choices": [_finished(at, None) | opening]})
            chunk = head | {"choices": [self._choice(at, served[at], told, tokens, form, is_part=True)]}
            await reply.event(chunk | ({"usage": self.usage(served, copies)} if options.continuous_usage_stats else {}))
        if options.include_usage:
            await reply.event(head | {"choices": []} | self.closing(served, copies))
        await reply.event("[DONE]")
        await reply.end()

    def _head(self, served: Served, form: Form, kind: str) -> dict[str, Any]:
        number = served.number
        return {"id": f"{form.prefix}-{number}", "object": kind, "created": number, "model": self.settings.model}

    def _choice(self, at: int, served: Served, begin: int, end: int, form: Form, *, is_part: bool = False) -> dict[str, Any]:
        """Return the tokens ``begin`` to ``end`` of an answer."""
        reason = served.reason if end == len(served.answer) else None
        return _finished(at, reason) | form.choice(self.shown(served.answer[begin:end]), is_part=is_part)

    def usage(self, served: Sequence[Served], copies: int) -> dict[str, Any]:
        """Return the tokens of answers so far; a prompt counts once for its ``copies``."""
        prompts = served[::copies]
        prompt, answer = sum(one.request.prompt_tokens for one in prompts), sum(one.generated for one in served)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        if self.settings.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(sum(one.cached_tokens) for one in prompts)}
        return usage

    def closing(self, served: Sequence[Served], copies: int) -> dict[str, Any]:
        """Return what is said of answers at their end."""
        return {"usage": self.usage(served, copies)}


def _finished(at: int, reason: str | None) -> dict[str, Any]:
    return {"index": at, "logprobs": None, "finish_reason": reason, "stop_reason": None}


def prompts_of(given: Prompts) -> list[Prompt]:
    """Return one prompt or several as a list. Raises BadRequest for what is neither."""
    if isinstance(given, str):
        return [given]
    tokens = [one for one in given if isinstance(one, int)]
    prompts = [one for one in given if not isinstance(one, int)]
    if tokens and prompts or not given:
        raise BadRequest(400, "prompt: a text, a list of token ids, or a list of such prompts is expected")
    return prompts or [tokens]
