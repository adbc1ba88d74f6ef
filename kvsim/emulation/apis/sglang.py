"""SGLang's interface (0.5.23): ``/generate`` with the tiers of cached tokens, ``/server_info``, ``/flush_cache``, its metrics.

Its completions and chats are OpenAI's.
"""

from typing import Any

import msgspec

from kvsim.emulation.apis.base import Prompt, Routes, Wanted, complete, parsed
from kvsim.emulation.apis.merged import merged
from kvsim.emulation.apis.openai import OpenAI
from kvsim.emulation.http_server import BadRequest, HttpRequest, Reply
from kvsim.emulation.metrics.sglang import SglangMetrics, media_of
from kvsim.emulation.served import Extras, Served


class Sampling(msgspec.Struct):
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1


class Generate(msgspec.Struct):
    """What ``/generate`` is asked with, as far as it matters here."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: Sampling | None = None
    stream: bool = False
    cache_salt: str | None = None
    session_id: str | None = None


class Sglang(OpenAI):
    """A server that looks like SGLang's, with one engine."""

    engine, owner = "sglang", "sglang"
    metrics_of = SglangMetrics

    def routes(self) -> Routes:
        resets = {(method, "/flush_cache"): self._flush for method in ("POST", "GET")} if self.settings.has_reset else {}
        info = {("GET", path): self._info for path in ("/server_info", "/get_server_info")}
        model = {("GET", path): self._model for path in ("/model_info", "/get_model_info")}
        asks = {("POST", "/generate"): self._generate, ("GET", "/health_generate"): self._health}
        return {**super().routes(), **asks, **info, **model, **resets}

    def error(self, status: int, message: str) -> dict[str, Any]:
        return {"object": "error", **super().error(status, message)["error"]}

    async def _flush(self, request: HttpRequest, reply: Reply) -> None:
        if self.emulator.empty():
            await reply.whole(200, "Cache flushed.\n", "text/plain")
        else:
            await reply.whole(400, "Cache not flushed because there are pending requests.\n", "text/plain")

    async def _model(self, request: HttpRequest, reply: Reply) -> None:
        texts = None if self.settings.texts is None else self.settings.texts.folder
        await reply.whole(200, {"model_path": self.settings.model, "tokenizer_path": texts, "is_generation": True})

    async def _info(self, request: HttpRequest, reply: Reply) -> None:
        plan = self.emulator.plan
        flags = {
            "model_path": self.settings.model,
            "served_model_name": self.settings.model,
            "page_size": plan.page_tokens,
            "max_total_num_tokens": self.capacity_tokens,
            "chunked_prefill_size": plan.engine.max_batch_tokens,
            "max_running_requests": None,
            "version": "0.5.23",
            "internal_states": [{"effective_max_running_requests_per_dp": plan.engine.max_running_requests}],
        }
        await reply.whole(200, flags)

    async def _generate(self, request: HttpRequest, reply: Reply) -> None:
        asked = parsed(request.body, Generate)
        prompts, is_batch = _prompts(asked)
        sampling = asked.sampling_params or Sampling()
        wanted = Wanted(sampling.max_new_tokens, sampling.min_new_tokens, 128, sampling.ignore_eos)
        tokens = [self.tokens_of(prompt) for prompt in prompts]
        extras = Extras(asked.cache_salt or None, asked.session_id)
        with self.taken(tokens, wanted, copies=sampling.n, is_streamed=asked.stream, extras=extras) as served:
            is_list = is_batch or sampling.n > 1
            if asked.stream:
                async for at, _, so_far in merged(served):
                    await reply.event(self._so_far(served[at], so_far) | ({"index": at} if is_list else {}))
                await reply.event("[DONE]")
                await reply.end()
                return
            await complete(served)
            answers = [self._so_far(one, len(one.answer)) for one in served]
            await reply.whole(200, answers if is_list else answers[0])

    def _so_far(self, served: Served, tokens: int) -> dict[str, Any]:
        """Return an answer's first tokens, and what is said of it."""
        answer = served.answer[:tokens]
        ended = (
            {"type": served.reason, "length": tokens} if served.reason == "length" else {"type": served.reason, "matched": None}
        )
        tiers = media_of(self.emulator, served)
        meta: dict[str, Any] = {
            "id": str(served.number),
            "finish_reason": ended if tokens == len(served.answer) else None,
            "prompt_tokens": served.request.prompt_tokens,
            "completion_tokens": tokens,
        }
        if self.settings.tells_cached:
            meta |= {"cached_tokens": sum(tiers.values()), "cached_tokens_details": tiers if any(tiers.values()) else None}
        if self.settings.tells_times:
            meta["queue_time"] = self.queued_s(served)
        return {"text": self.shown(answer), "output_ids": answer, "meta_info": meta}


def _prompts(asked: Generate) -> tuple[list[Prompt], bool]:
    """Return the prompts of a request, and whether it has a list of them. Raises BadRequest."""
    if asked.text is not None:
        return (list(asked.text), True) if isinstance(asked.text, list) else ([asked.text], False)
    given = asked.input_ids or []
    tokens, lists = [one for one in given if isinstance(one, int)], [one for one in given if isinstance(one, list)]
    if bool(tokens) == bool(lists):
        raise BadRequest(400, "input_ids or text: a prompt, or a list of them, is expected")
    return ([*lists], True) if lists else ([tokens], False)
