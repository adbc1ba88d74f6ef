"""SGLang's metrics (0.5.23: srt/observability/metrics_collector.py), as far as an emulated engine knows them.

As there, a request counts when it has ended. Gauges are those of the moment, which SGLang brings up to date with a batch.
"""

from collections import deque

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.metrics.base import Metrics
from kvsim.emulation.metrics.memory import memory_of
from kvsim.emulation.served import Served

TOKENS = (
    100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12500, 15000, 17500, 20000, 22500,
    25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000, 1000000, 1100000,
)  # fmt: skip
FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
REQUEST_S = (*FIRST_TOKEN_S, 600, 1200, 1800, 2400)
TOKEN_S = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200, 0.400, 0.600, 0.800,
    1.000, 2.000, 4.000, 6.000, 8.000,
)  # fmt: skip
QUEUE_S = (
    0.0, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000,
    1200, 1400, 1600, 1800, 2000, 2500, 3000,
)  # fmt: skip
MEDIA = {"gpu": "device", "cpu": "host"}
"""What SGLang calls tiers; what lies below these is storage."""
SECONDS = 5.0
"""The time over which the rate of generated tokens is measured; SGLang measures it over 40 decode steps."""


def media_of(emulator: Emulator, served: Served) -> dict[str, int]:
    """Return the cached tokens of a request by medium; storage only where there is one."""
    tiers = {"device": 0, "host": 0} | ({"storage": 0} if emulator.plan.tiers[2:] else {})
    for tier, tokens in zip(emulator.tier_names, served.cached_tokens, strict=False):
        medium = MEDIA.get(tier, "storage")
        if medium in tiers:
            tiers[medium] += tokens
    return tiers


class SglangMetrics(Metrics):
    """One engine's metrics: those of its scheduler, and those of its tokenizer's process, which have fewer labels."""

    def __init__(self, emulator: Emulator, model: str, longest_tokens: int | None) -> None:
        super().__init__(emulator, model, longest_tokens)
        of_requests = {"model_name": model, "engine_type": "unified"}
        self._retractions = 0
        self._recent: deque[tuple[float, int]] = deque()
        """(seconds, tokens): when tokens were generated in the last few seconds."""
        self.labels = of_requests | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._tell_memory(longest_tokens)
        self.labels = of_requests
        self._count_requests()

    def _tell_memory(self, longest_tokens: int | None) -> None:
        gauge, plan, size = self.gauge, self.emulator.plan, self.emulator.plan.page_tokens
        self._running = gauge("sglang:num_running_reqs", "Requests that run")
        self._waiting = gauge("sglang:num_queue_reqs", "Requests in the queue")
        self._hit_rate = gauge("sglang:cache_hit_rate", "Share of prompt tokens that were cached, of the last prompt computed")
        self._rate = gauge("sglang:gen_throughput", "Tokens generated per second")
        self._used = gauge("sglang:num_used_tokens", "Tokens of memory that requests use")
        self._usage = gauge("sglang:token_usage", "Share of the memory that requests use")
        self._available = gauge("sglang:kv_available_tokens", "Tokens of memory that are free")
        self._evictable = gauge("sglang:kv_evictable_tokens", "Tokens of memory that are cached, and that no request uses")
        self._retracted = self.counter("sglang:num_retracted_requests", "Retractions")
        self._queue_s = self.histogram("sglang:queue_time_seconds", "Time that a request waited", QUEUE_S)
        capacities = {tier.name: tier.capacity_pages for tier in plan.tiers}
        if capacities["gpu"] is not None:
            gauge("sglang:max_total_num_tokens", "Tokens that the memory holds").set(capacities["gpu"] * size)
            gauge("sglang:num_pages", "Pages that the memory holds").set(capacities["gpu"])
        gauge("sglang:page_size", "Tokens of a page").set(size)
        if longest_tokens is not None:
            gauge("sglang:context_len", "The most tokens of a prompt and its answer").set(longest_tokens)
        if capacities.get("cpu"):
            gauge("sglang:hicache_host_total_tokens", "Tokens that the host's memory holds").set((capacities["cpu"] or 0) * size)
            self._host_used = gauge("sglang:hicache_host_used_tokens", "Tokens that the host's memory has")

    def _count_requests(self) -> None:
        counter, histogram, streamed = self.counter, self.histogram, ["is_streaming"]
        self._prompts = counter("sglang:prompt_tokens", "Prompt tokens", streamed)
        self._generated = counter("sglang:generation_tokens", "Generated tokens", streamed)
        self._cached = counter("sglang:cached_tokens", "Prompt tokens that were cached, by source", ["cache_source"])
        self._requests = counter("sglang:num_requests", "Requests that have ended", streamed)
        self._aborted = counter("sglang:num_aborted_requests", "Requests that were aborted")
        self._prompt = histogram("sglang:prompt_tokens_histogram", "Prompt tokens of a request", TOKENS)
        self._computed = histogram("sglang:uncached_prompt_tokens_histogram", "Prompt tokens not cached, of a request", TOKENS)
        self._answer = histogram("sglang:generation_tokens_histogram", "Generated tokens of a request", TOKENS)
        self._ttft = histogram("sglang:time_to_first_token_seconds", "Time to first token", FIRST_TOKEN_S, streamed)
        self._itl = histogram("sglang:inter_token_latency_seconds", "Time between tokens", TOKEN_S)
        self._tpot = histogram(
            "sglang:request_time_per_output_token_seconds", "A request's mean time between tokens", TOKEN_S, streamed
        )
        self._e2e = histogram("sglang:e2e_request_latency_seconds", "Time of a request", REQUEST_S, streamed)

    # --- what happens --------------------------------------------------------------------------------------------------------

    def first_token(self, served: Served) -> None:
        waited_s = served.first_token_s - served.request.arrival_s
        self._ttft.labels(is_streaming=_word(served)).observe(self.real_s(waited_s))
        self._queue_s.observe(self.real_s(served.queued_s))
        self._hit_rate.set(sum(served.cached_tokens) / served.request.prompt_tokens)
        self._count(served.first_token_s)

    def token(self, served: Served, after_s: float) -> None:
        self._itl.observe(self.real_s(after_s))
        self._count(served.last_token_s)

    def _count(self, now_s: float) -> None:
        if self._recent and self._recent[-1][0] == now_s:
            now_s, tokens = self._recent.pop()
            self._recent.append((now_s, tokens + 1))
        else:
            self._recent.append((now_s, 1))
            self._leave_out(now_s)

    def _leave_out(self, now_s: float) -> None:
        """Forget the tokens that were generated too long ago."""
        while self._recent and self._recent[0][0] < now_s - SECONDS * self.emulator.speed:
            self._recent.popleft()

    def ended(self, served: Served) -> None:
        if served.is_refused:
            return
        if served.is_aborted:
            self._aborted.inc()
            return
        request, real_s, streamed = served.request, self.real_s, _word(served)
        self._prompts.labels(is_streaming=streamed).inc(request.prompt_tokens)
        self._generated.labels(is_streaming=streamed).inc(served.generated)
        self._requests.labels(is_streaming=streamed).inc()
        for medium, tokens in media_of(self.emulator, served).items():
            if tokens:
                self._cached.labels(cache_source=medium).inc(tokens)
        self._prompt.observe(request.prompt_tokens)
        self._computed.observe(request.prompt_tokens - sum(served.cached_tokens))
        self._answer.observe(served.generated)
        self._e2e.labels(is_streaming=streamed).observe(real_s(served.end_s - request.arrival_s))
        if served.generated > 1:
            per_token_s = (served.end_s - served.first_token_s) / (served.generated - 1)
            self._tpot.labels(is_streaming=streamed).observe(real_s(per_token_s))

    def look(self) -> None:
        emulator, size = self.emulator, self.emulator.plan.page_tokens
        self._running.set(emulator.running)
        self._waiting.set(emulator.unfinished - emulator.running)
        self._leave_out(emulator.cluster.env.now)
        self._rate.set(sum(tokens for _, tokens in self._recent) / SECONDS)
        retractions = sum(engine.schedule.retractions for engine in emulator.cluster.engines)
        self._retracted.inc(retractions - self._retractions)
        self._retractions = retractions
        if emulator.plan.tiers[0].capacity_pages is None:
            return
        memory = memory_of(emulator)
        self._used.set(memory.used * size)
        self._usage.set(memory.usage)
        self._available.set(memory.free * size)
        self._evictable.set(memory.evictable * size)
        host = [tier for cache in emulator.cluster.caches for tier in cache.tiers if tier.name == "cpu"]
        if host:
            self._host_used.set(sum(tier.pool.capacity - tier.pool.free for tier in host) * size)


def _word(served: Served) -> str:
    return "true" if served.is_streamed else "false"
