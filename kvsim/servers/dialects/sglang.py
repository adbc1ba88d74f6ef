"""SGLang (0.5.15, 0.5.23): ``/generate`` with ``input_ids``, which tells the tier of cached tokens; facts in ``/server_info``."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvsim.errors import UsageError
from kvsim.results.observed import ServerFacts
from kvsim.servers.answer import Answer, Failed
from kvsim.servers.counters import read_samples
from kvsim.servers.dialects.base import Dialect, Known, kept
from kvsim.servers.dialects.openai import longest, model_cards
from kvsim.servers.http import Http, message_of

SETTINGS = frozenset({
    "version", "dtype", "kv_cache_dtype", "quantization", "context_length", "page_size", "mem_fraction_static",
    "max_total_num_tokens", "max_total_tokens", "tp_size", "dp_size", "pp_size",
    "chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "enable_mixed_chunk", "disable_overlap_schedule",
    "disable_radix_cache", "radix_eviction_policy", "schedule_conservativeness", "schedule_policy", "stream_interval",
    "speculative_algorithm", "speculative_num_draft_tokens",
    "enable_hierarchical_cache", "hicache_io_backend", "hicache_mem_layout", "hicache_ratio", "hicache_size",
    "hicache_storage_backend", "hicache_storage_prefetch_policy", "hicache_write_policy",
})  # fmt: skip
"""The flags that are kept: what is read of them, and what a reader of a run wants to know."""
RUNNING = "effective_max_running_requests_per_dp"
"""Among the state of each of a server's engines: the most requests that it runs."""
TIERS = ("device", "host", "storage")
WAITS_S = 30
"""How long a flush waits for running requests, such as the warm-up's last."""


class Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    cached_tokens_details: dict[str, Any] | None = None
    """By tier; null if there are none."""
    queue_time: float | None = None
    """Seconds; with ``--enable-metrics``."""
    finish_reason: dict[str, Any] | None = None


class Event(msgspec.Struct):
    """One event of a stream, as far as it is read; counts are those of the answer so far."""

    meta_info: Meta | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


class Sglang(Dialect):
    """SGLang's server."""

    engine = "sglang"
    path = "/generate"
    tells_cached = "/generate always says it; this server is no SGLang that kvsim knows"

    def body(self, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}

    def read(self, event: bytes, answer: Answer) -> bool:
        told = _decode(event)
        if told.error is not None:
            raise Failed(f"the server failed: {message_of(msgspec.json.encode({'error': told.error}).decode())}")
        if told.meta_info is None:
            return False
        meta = told.meta_info
        if meta.finish_reason is not None and meta.finish_reason.get("type") == "abort":
            raise Failed(f"the server gave the request up: {message_of(str(meta.finish_reason.get('message', '')))}")
        brings = meta.completion_tokens > answer.output_tokens
        answer.prompt_tokens = meta.prompt_tokens or answer.prompt_tokens
        answer.output_tokens = meta.completion_tokens
        if meta.cached_tokens is not None:
            answer.cached_tokens = meta.cached_tokens
            answer.tier_tokens = _tiers(meta.cached_tokens_details or {})
        if meta.queue_time is not None:
            answer.queued_s = meta.queue_time
        return brings

    async def know(self, http: Http) -> Known:
        cards = await model_cards(http)
        flags = await _flags(http)
        names = [str(card["id"]) for card in cards]
        host = [sample.value for sample in await read_samples(http) if sample.name == "sglang:hicache_host_total_tokens"]
        facts = ServerFacts(
            engine=self.engine,
            version=str(flags["version"]) if "version" in flags else None,
            model=names[0] if names else None,
            page_tokens=_whole(flags, "page_size"),
            capacity_tokens=_whole(flags, "max_total_num_tokens"),
            host_capacity_tokens=int(host[0]) if host and host[0] else None,
            settings=kept(flags, SETTINGS),
        )
        return Known(facts, names, longest(cards), engines=_whole(flags, "dp_size") or 1)

    async def reset(self, http: Http) -> str:
        """Empty the caches on GPU and host; one in storage stays."""
        reply = await http.post(f"/flush_cache?timeout={WAITS_S}")
        if not reply.is_good:
            raise UsageError(f"{http.url} has not emptied its cache (HTTP {reply.status}): {message_of(reply.text)}")
        return ""


async def _flags(http: Http) -> dict[str, Any]:
    """Return what the server says of its settings, in one object with what it says of its memory."""
    for path in ("/server_info", "/get_server_info"):  # the second is the older name
        reply = await http.get(path)
        found = reply.json() if reply.is_good else None
        if isinstance(found, dict):
            return resolved(found)
    return {}


def resolved(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's flags with how many requests it runs at once: of the flag it says null if it chose that itself."""
    states = flags.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    running = _whole(state, RUNNING)
    return {**flags, **({} if running is None else {"max_running_requests": running})}


def _tiers(details: Mapping[str, Any]) -> dict[str, int]:
    return {tier: details[tier] for tier in TIERS if isinstance(details.get(tier), int)}


def _whole(flags: Mapping[str, Any], name: str) -> int | None:
    value = flags.get(name)
    return value if isinstance(value, int) else None
