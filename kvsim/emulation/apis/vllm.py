"""vLLM's interface (0.33.0): completions with its extras, its ``/metrics``, and what VLLM_SERVER_DEV_MODE=1 adds."""

from collections.abc import Sequence
from typing import Any

from kvsim.emulation.apis.base import Routes
from kvsim.emulation.apis.openai import OpenAI
from kvsim.emulation.http_server import HttpRequest, Reply
from kvsim.emulation.metrics.vllm import VllmMetrics
from kvsim.emulation.served import Served


class Vllm(OpenAI):
    """A server that looks like vLLM's, with one engine. What lies below the GPU counts as a connector's."""

    engine, owner = "vllm", "vllm"
    metrics_of = VllmMetrics

    def routes(self) -> Routes:
        developers = {("POST", "/reset_prefix_cache"): self._reset, ("GET", "/server_info"): self._info}
        always = {("GET", "/version"): self._version, ("GET", "/ping"): self._health, ("GET", "/load"): self._load}
        return {**super().routes(), **always, **(developers if self.settings.has_reset else {})}

    async def _version(self, request: HttpRequest, reply: Reply) -> None:
        await reply.whole(200, {"version": "0.33.0"})

    async def _load(self, request: HttpRequest, reply: Reply) -> None:
        await reply.whole(200, {"server_load": self.emulator.unfinished})

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

    def closing(self, served: Sequence[Served], copies: int) -> dict[str, Any]:
        said = super().closing(served, copies)
        if not self.settings.tells_times:
            return said
        return {**said, "metrics": {"queue_time_ms": self.queued_s(served[0]) * 1000}}
