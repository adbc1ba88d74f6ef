"""OpenAI's completions with prompts of token ids, and no more."""

from typing import Any

import msgspec

from kvsim.emulation.apis.base import Api, Metric, Routes, growing, parsed, shown
from kvsim.emulation.emulator import Served
from kvsim.emulation.http_server import BadRequest, HttpRequest, Reply


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Completion(msgspec.Struct):
    """What a completion is asked with, as far as it matters here."""

    prompt: list[int]
    model: str | None = None
    max_tokens: int = 16
    stream: bool = False
    stream_options: StreamOptions | None = None


class OpenAI(Api):
    """A server with OpenAI's interface that says nothing else of itself."""

    owner = "organization"

    def routes(self) -> Routes:
        return {("POST", "/v1/completions"): self._complete}

    def metrics(self) -> list[Metric]:
        return []

    async def _complete(self, request: HttpRequest, reply: Reply) -> None:
        asked = parsed(request.body, Completion)
        if asked.model not in (None, self.settings.model):
            raise BadRequest(404, f"The model `{asked.model}` does not exist.")
        served = self.submit(asked.prompt, asked.max_tokens)
        if not asked.stream:
            async for _ in growing(served):
                pass
            await reply.whole(200, self._chunk(served, 0, len(served.answer)) | self.closing(served))
            return
        told = 0
        async for tokens in growing(served):
            await reply.event(self._chunk(served, told, tokens))
            told = tokens
        if asked.stream_options is not None and asked.stream_options.include_usage:
            await reply.event(self._head(served) | {"choices": []} | self.closing(served))
        await reply.event("[DONE]")
        await reply.end()

    def _head(self, served: Served) -> dict[str, Any]:
        number = served.request.index
        return {"id": f"cmpl-{number}", "object": "text_completion", "created": number, "model": self.settings.model}

    def _chunk(self, served: Served, begin: int, end: int) -> dict[str, Any]:
        """Return the tokens ``begin`` to ``end`` of an answer."""
        text = "".join(shown(token) for token in served.answer[begin:end])
        reason = "length" if end == len(served.answer) else None
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return self._head(served) | {"choices": [choice]}

    def closing(self, served: Served) -> dict[str, Any]:
        """Return what is said of a request at its end."""
        prompt, answer = served.request.prompt_tokens, len(served.answer)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        if self.settings.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(served.cached_tokens)}
        return {"usage": usage}
