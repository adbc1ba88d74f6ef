"""vLLM (read in 0.25.1 and 0.33.0): OpenAI's completions with ``ignore_eos``, facts in ``/metrics`` and ``/server_info``."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kvsim.errors import UsageError
from kvsim.results.observed import ServerFacts
from kvsim.servers.counters import read_samples
from kvsim.servers.dialects.base import Known, kept
from kvsim.servers.dialects.openai import OpenAI, longest, model_cards
from kvsim.servers.http import Http

SETTINGS = frozenset({
    "model_config.dtype", "model_config.max_model_len", "model_config.quantization",
    "cache_config.block_size", "cache_config.cache_dtype", "cache_config.enable_prefix_caching",
    "cache_config.gpu_memory_utilization", "cache_config.kv_cache_size_tokens", "cache_config.kv_offloading_backend",
    "cache_config.kv_offloading_size", "cache_config.num_gpu_blocks", "cache_config.num_gpu_blocks_override",
    "cache_config.prefix_caching_hash_algo",
    "parallel_config.data_parallel_size", "parallel_config.distributed_executor_backend", "parallel_config.nnodes",
    "parallel_config.pipeline_parallel_size", "parallel_config.tensor_parallel_size",
    "scheduler_config.async_scheduling", "scheduler_config.enable_chunked_prefill",
    "scheduler_config.long_prefill_token_threshold", "scheduler_config.max_num_batched_tokens", "scheduler_config.max_num_seqs",
    "scheduler_config.policy", "scheduler_config.stream_interval",
    "speculative_config.method", "speculative_config.num_speculative_tokens",
    "kv_transfer_config.kv_connector", "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use",
})  # fmt: skip
"""The settings that are kept: what is read of them, and what a reader of a run wants to know."""
UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LOOKS, LOOK_S = 10, 0.2
"""How often, and how many seconds apart, the server is asked whether requests are under way."""


class Vllm(OpenAI):
    """vLLM's server."""

    engine = "vllm"
    tells_cached = "start vLLM with --enable-prompt-tokens-details"
    omits_zero = True
    last_text_may_be_empty = True

    def body(self, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        return super().body(model, prompt, output_tokens) | {"ignore_eos": True}

    async def know(self, http: Http) -> Known:
        cards = await model_cards(http)
        names = [str(card["id"]) for card in cards]
        version = (await http.get("/version")).json()
        caches = [one.labels for one in await read_samples(http) if one.name == "vllm:cache_config_info"]
        labels = caches[0] if caches else {}
        config = (await http.get("/server_info?config_format=json")).json()
        flags = flat(config.get("vllm_config")) if isinstance(config, dict) else {}
        size, blocks = _number(labels.get("block_size")), _number(labels.get("num_gpu_blocks"))
        facts = ServerFacts(
            engine=self.engine,
            version=str(version["version"]) if isinstance(version, dict) and "version" in version else None,
            model=names[0] if names else None,
            page_tokens=size,
            capacity_tokens=None if size is None or blocks is None else (blocks - 1) * size,  # one block is vLLM's own
            settings=kept(flags | {f"cache_config.{name}": value for name, value in labels.items()}, SETTINGS),
        )
        return Known(facts, names, longest(cards), engines=max(1, len(caches)))

    async def reset(self, http: Http) -> str:
        """Empty the GPU's cache, and that of a connector if there is one.

        vLLM does so only while no request runs, and does not say whether it did.
        """
        busy = await _busy(http)
        reply = await http.post("/reset_prefix_cache?reset_external=true")
        if not reply.is_good:
            raise UsageError(
                f"{http.url} cannot be told to empty its cache (HTTP {reply.status}): start vLLM with VLLM_SERVER_DEV_MODE=1, or "
                "restart it before each run and set reset=false"
            )
        return f"the cache may not have been empty: vLLM had {busy} other requests when it was to empty it" if busy else ""


async def _busy(http: Http) -> int:
    """Return how many requests the server still has, after some time for them to end."""
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(LOOK_S)
        busy = sum(one.value for one in await read_samples(http) if one.name in UNDER_WAY)
        if not busy:
            return 0
    return int(busy)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def flat(settings: object, prefix: str = "") -> dict[str, object]:
    """Return nested settings by their full names, ``scheduler_config.max_num_seqs``: numbers, words and lists of them."""
    if not isinstance(settings, dict):
        return {prefix: settings} if prefix else {}
    found: dict[str, object] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found
