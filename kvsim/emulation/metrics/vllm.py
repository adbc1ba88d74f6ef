"""vLLM's metrics (0.33.0: v1/metrics/loggers.py, buckets.py, stats.py), as far as an emulated engine knows them.

As there, the cache's counters count a prompt once, however often its request is preempted; here they do when its first token
appears. Requests that were aborted count nowhere but in what they had until then.
"""

from itertools import takewhile

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.metrics.base import Metrics
from kvsim.emulation.metrics.memory import memory_of
from kvsim.emulation.served import Served

REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
REASONS = ("stop", "length", "abort", "error", "repetition")
COMPUTED, HIT, LOADED = "local_compute", "local_cache_hit", "external_kv_transfer"
MEDIA = {"gpu": "device", "cpu": "host", "disk": "disk"}
ELSEWHERE = "external_unspecified"
"""The medium of any other tier."""
SOURCES = ("device", "host", "p2p", "disk", ELSEWHERE)


def token_buckets(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... up to ``most``."""
    series = (mantissa * 10**exponent for exponent in range(12) for mantissa in (1, 2, 5))
    return [float(value) for value in takewhile(lambda value: value <= most, series)]


class VllmMetrics(Metrics):
    """One engine's metrics. What lies below the GPU counts as a connector's."""

    def __init__(self, emulator: Emulator, model: str, longest_tokens: int | None) -> None:
        super().__init__(emulator, model, longest_tokens)
        self.labels = {"model_name": model, "engine": "0"}
        self._running = self.gauge("vllm:num_requests_running", "Requests in batches of the model")
        self._waiting = self.gauge("vllm:num_requests_waiting", "Requests that wait")
        self._usage = self.gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that requests use, 0 to 1")
        self._has_connector = len(emulator.plan.tiers) > 1
        self._retractions = 0
        self._count_tokens()
        self._time_requests(token_buckets(longest_tokens or 1_000_000))
        self._tell_config()

    def _count_tokens(self) -> None:
        counter = self.counter
        self._queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache")
        self._below_queries = counter("vllm:external_prefix_cache_queries", "Tokens looked up by the KV connector")
        self._below_hits = counter("vllm:external_prefix_cache_hits", "Tokens found by the KV connector")
        self._prompts = counter("vllm:prompt_tokens", "Prompt tokens")
        by_source = counter("vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from", ["source"])
        self._by_source = {source: by_source.labels(source=source) for source in (COMPUTED, HIT, LOADED)}
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens that were cached")
        cached = counter("vllm:prompt_tokens_cached_by_source", "Prompt tokens that were cached, by tier", ["source"])
        self._cached_by_source = {source: cached.labels(source=source) for source in SOURCES}
        self._generated = counter("vllm:generation_tokens", "Tokens generated")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions")
        success = counter("vllm:request_success", "Requests that have ended, by reason", ["finished_reason"])
        self._success = {reason: success.labels(finished_reason=reason) for reason in REASONS}

    def _time_requests(self, tokens: list[float]) -> None:
        histogram = self.histogram
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token", FIRST_TOKEN_S)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Time between tokens", TOKEN_S)
        self._tpot = histogram("vllm:request_time_per_output_token_seconds", "A request's mean time between tokens", TOKEN_S)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Time of a request", REQUEST_S)
        self._queue_s = histogram("vllm:request_queue_time_seconds", "Time that a request waited", REQUEST_S)
        self._inference_s = histogram("vllm:request_inference_time_seconds", "Time that a request ran", REQUEST_S)
        self._prefill_s = histogram("vllm:request_prefill_time_seconds", "Time of a request's prefill", REQUEST_S)
        self._decode_s = histogram("vllm:request_decode_time_seconds", "Time of a request's decoding", REQUEST_S)
        self._preempted = histogram("vllm:request_num_preemptions", "Preemptions of a request", PREEMPTIONS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", tokens)
        self._answer = histogram("vllm:request_generation_tokens", "Generated tokens of a request", tokens)
        self._computed = histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not cached, of a request", tokens)
        self._most = histogram("vllm:request_params_max_tokens", "max_tokens of a request", tokens)

    def _tell_config(self) -> None:
        plan, capacity = self.emulator.plan, self.emulator.plan.tiers[0].capacity_pages
        config = {"block_size": str(plan.page_tokens), "enable_prefix_caching": "True", "engine": "0"}
        if capacity is not None:
            config |= {"num_gpu_blocks": str(capacity + 1), "kv_cache_size_tokens": str(capacity * plan.page_tokens)}
        self.gauge("vllm:cache_config_info", "The settings of the cache", labels=config).set(1)

    # --- what happens --------------------------------------------------------------------------------------------------------

    def first_token(self, served: Served) -> None:
        prompt, names = served.request.prompt_tokens, self.emulator.tier_names
        gpu, below = served.cached_tokens[0], sum(served.cached_tokens[1:])
        self._queries.inc(prompt)
        self._hits.inc(gpu)
        if self._has_connector:
            self._below_queries.inc(prompt - gpu)
            self._below_hits.inc(below)
        self._prompts.inc(prompt)
        for source, tokens in ((COMPUTED, prompt - gpu - below), (HIT, gpu), (LOADED, below)):
            self._by_source[source].inc(tokens)
        self._cached.inc(gpu + below)
        for name, tokens in zip(names, served.cached_tokens, strict=False):
            self._cached_by_source[MEDIA.get(name, ELSEWHERE)].inc(tokens)
        self._generated.inc()
        self._ttft.observe(self.real_s(served.first_token_s - served.request.arrival_s))

    def token(self, served: Served, after_s: float) -> None:
        self._generated.inc()
        self._itl.observe(self.real_s(after_s))

    def ended(self, served: Served) -> None:
        if served.is_aborted or served.is_refused:
            return
        request, real_s = served.request, self.real_s
        self._success[served.reason].inc()
        wait_s = served.first_token_s - request.arrival_s
        self._e2e.observe(real_s(served.end_s - request.arrival_s))
        self._queue_s.observe(real_s(served.queued_s))
        self._prefill_s.observe(real_s(wait_s - served.queued_s))
        self._decode_s.observe(real_s(served.end_s - served.first_token_s))
        self._inference_s.observe(real_s(served.end_s - request.arrival_s - served.queued_s))
        if served.generated > 1:
            self._tpot.observe(real_s((served.end_s - served.first_token_s) / (served.generated - 1)))
        self._preempted.observe(served.retractions)
        self._prompt.observe(request.prompt_tokens)
        self._answer.observe(served.generated)
        self._computed.observe(request.prompt_tokens - sum(served.cached_tokens))
        self._most.observe(served.most_tokens)

    def look(self) -> None:
        emulator = self.emulator
        self._running.set(emulator.running)
        self._waiting.set(emulator.unfinished - emulator.running)
        if emulator.plan.tiers[0].capacity_pages is not None:
            self._usage.set(memory_of(emulator).usage)
        retractions = sum(engine.schedule.retractions for engine in emulator.cluster.engines)
        self._preemptions.inc(retractions - self._retractions)
        self._retractions = retractions
