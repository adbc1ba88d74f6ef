"""SGLang's interface (0.5.23): ``/generate`` with the tiers of cached tokens, ``/server_info``, ``/flush_cache``, its metrics."""

from typing import Any

import msgspec

from kvsim.emulation.apis.base import Api, Metric, Routes, growing, parsed, shown
from kvsim.emulation.emulator import Served
from kvsim.emulation.http_server import BadRequest, HttpRequest, Reply, error_of

MEDIA = {"gpu": "device", "cpu": "host"}
"""What SGLang calls tiers; what lies below these is storage."""


class Sampling(msgspec.Struct):
    max_new_tokens: int = 128


class Generate(msgspec.Struct):
    """What ``/generate`` is asked with, as far as it matters here."""

    input_ids: list[int]
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    stream: bool = False


class Sglang(Api):
    """A server that looks like SGLang's, with one engine."""

    owner = "sglang"

    def routes(self) -> Routes:
        resets = {("POST", "/flush_cache"): self._flush} if self.settings.has_reset else {}
        return {("POST", "/generate"): self._generate, ("GET", "/server_info"): self._info, **resets}

    async def _flush(self, request: HttpRequest, reply: Reply) -> None:
        if self.emulator.empty():
            await reply.whole(200, "Cache flushed.\n", "text/plain")
        else:
            await reply.whole(400, "Cache not flushed because there are pending requests.\n", "text/plain")

    async def _info(self, request: HttpRequest, reply: Reply) -> None:
        plan = self.emulator.plan
        flags = {
            "model_path": self.settings.model,
            "served_model_name": self.settings.model,
            "page_size": plan.page_tokens,
            "max_total_num_tokens": self.capacity_tokens,
            "chunked_prefill_size": plan.engine.max_batch_tokens,
            "max_running_requests": plan.engine.max_running_requests,
            "version": "0.5.23",
            "internal_states": [],
        }
        await reply.whole(200, flags)

    async def _generate(self, request: HttpRequest, reply: Reply) -> None:
        asked = parsed(request.body, Generate)
        try:
            served = self.submit(asked.input_ids, asked.sampling_params.max_new_tokens)
            async for tokens in growing(served):
                if asked.stream:
                    await reply.event(self._so_far(served, tokens))
        except BadRequest as error:
            if not asked.stream:
                raise
            await reply.event(error_of(error.status, str(error)))
        if not asked.stream:
            await reply.whole(200, self._so_far(served, len(served.answer)))
            return
        await reply.event("[DONE]")
        await reply.end()

    def _so_far(self, served: Served, tokens: int) -> dict[str, Any]:
        """Return an answer's first tokens, and what is said of it."""
        answer = served.answer[:tokens]
        reason = {"type": "length", "length": tokens} if tokens == len(served.answer) else None
        tiers = self.media(served)
        meta: dict[str, Any] = {
            "id": str(served.request.index),
            "finish_reason": reason,
            "prompt_tokens": served.request.prompt_tokens,
            "completion_tokens": tokens,
        }
        if self.settings.tells_cached:
            meta |= {"cached_tokens": sum(tiers.values()), "cached_tokens_details": tiers if any(tiers.values()) else None}
        if self.settings.tells_times:
            meta["queue_time"] = self.queued_s(served)
        return {"text": "".join(map(shown, answer)), "output_ids": answer, "meta_info": meta}

    def media(self, served: Served) -> dict[str, int]:
        """Return the cached tokens of a request by medium; storage only where there is one."""
        tiers = {"device": 0, "host": 0} | ({"storage": 0} if self.emulator.plan.tiers[2:] else {})
        for tier, tokens in self.cached(served).items():
            medium = MEDIA.get(tier, "storage")
            if medium in tiers:
                tiers[medium] += tokens
        return tiers

    def metrics(self) -> list[Metric]:
        plan = self.emulator.plan
        served = [one for one in self.emulator.served if one.generated]
        labels = {"model_name": self.settings.model, "engine_type": "unified", "tp_rank": "0"}
        media = [self.media(one) for one in served]
        counts = [
            ("prompt_tokens", sum(one.request.prompt_tokens for one in served), {}),
            ("generation_tokens", sum(one.generated for one in served), {}),
            ("num_requests", sum(one.is_ended for one in served), {}),
            *[("cached_tokens", sum(one.get(tier, 0) for one in media), {"cache_source": tier}) for tier in ("device", "host")],
        ]
        gauges = [("max_total_num_tokens", self.capacity_tokens), ("page_size", plan.page_tokens)]
        host = next((tier.capacity_pages for tier in plan.tiers if tier.name == "cpu"), None)
        gauges += [("hicache_host_total_tokens", None if host is None else host * plan.page_tokens)]
        return [
            *[Metric(f"sglang:{name}_total", "counter", value, labels | more) for name, value, more in counts],
            *[Metric(f"sglang:{name}", "gauge", value, labels) for name, value in gauges if value is not None],
        ]
