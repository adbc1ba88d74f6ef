"""vLLM's interface (0.33.0): completions with its extras, its ``/metrics``, and what VLLM_SERVER_DEV_MODE=1 adds."""

from typing import Any

from kvsim.emulation.apis.base import Metric, Routes
from kvsim.emulation.apis.openai import OpenAI
from kvsim.emulation.emulator import Served
from kvsim.emulation.http_server import HttpRequest, Reply


class Vllm(OpenAI):
    """A server that looks like vLLM's, with one engine. What lies below the GPU counts as a connector's."""

    owner = "vllm"

    def routes(self) -> Routes:
        developers = {("POST", "/reset_prefix_cache"): self._reset, ("GET", "/server_info"): self._info}
        return {**super().routes(), ("GET", "/version"): self._version, **(developers if self.settings.has_reset else {})}

    async def _version(self, request: HttpRequest, reply: Reply) -> None:
        await reply.whole(200, {"version": "0.33.0"})

    async def _reset(self, request: HttpRequest, reply: Reply) -> None:
        """Empty the cache. As vLLM, do not say if requests under way have prevented it."""
        self.emulator.empty()
        await reply.whole(200)

    async def _info(self, request: HttpRequest, reply: Reply) -> None:
        plan = self.emulator.plan
        scheduler = {
            "max_num_batched_tokens": plan.engine.max_batch_tokens,
            "max_num_seqs": plan.engine.max_running_requests,
        }
        await reply.whole(200, {"vllm_config": {"scheduler_config": scheduler}, "vllm_env": {}, "system_env": {}})

    def closing(self, served: Served) -> dict[str, Any]:
        if not self.settings.tells_times:
            return super().closing(served)
        prefill_s = served.first_token_s - served.request.arrival_s - served.queued_s
        times = {"queue_time_ms": self.queued_s(served) * 1000, "time_to_first_token_ms": prefill_s / self.emulator.speed * 1000}
        return super().closing(served) | {"metrics": times}

    def metrics(self) -> list[Metric]:
        served = [one for one in self.emulator.served if one.generated]
        labels = {"model_name": self.settings.model, "engine": "0"}
        prompts = sum(one.request.prompt_tokens for one in served)
        gpu = sum(one.cached_tokens[0] for one in served)
        below = sum(sum(one.cached_tokens[1:]) for one in served)
        ended = sum(one.is_ended for one in served)
        tokens = sum(one.generated for one in served)
        counts = [
            ("prefix_cache_queries", prompts, {}),
            ("prefix_cache_hits", gpu, {}),
            ("external_prefix_cache_queries", prompts - gpu, {}),
            ("external_prefix_cache_hits", below, {}),
            ("prompt_tokens", prompts, {}),
            ("prompt_tokens_by_source", prompts - gpu - below, {"source": "local_compute"}),
            ("prompt_tokens_by_source", gpu, {"source": "local_cache_hit"}),
            ("prompt_tokens_by_source", below, {"source": "external_kv_transfer"}),
            ("generation_tokens", tokens, {}),
            ("request_success", ended, {"finished_reason": "length"}),
        ]
        counters = [Metric(f"vllm:{name}_total", "counter", value, labels | more) for name, value, more in counts]
        running = Metric("vllm:num_requests_running", "gauge", self.emulator.unfinished, labels)
        return [*counters, running, Metric("vllm:cache_config_info", "gauge", 1.0, self._cache_config())]

    def _cache_config(self) -> dict[str, str]:
        plan = self.emulator.plan
        blocks = plan.tiers[0].capacity_pages
        known = {} if blocks is None else {"num_gpu_blocks": str(blocks + 1)}  # one is vLLM's own
        return known | {"block_size": str(plan.page_tokens), "enable_prefix_caching": "True", "engine": "0"}
