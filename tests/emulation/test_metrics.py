"""Metrics under the engines' own names: what a router's developer scrapes."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvsim.emulation.apis.base import ApiSettings
from kvsim.emulation.apis.table import APIS
from kvsim.emulation.emulator import Emulator
from kvsim.emulation.metrics.vllm import token_buckets
from tests.servers.emulated import plan_of

VLLM_LABELS = {"model_name", "engine"}
VLLM = {
    "vllm:num_requests_running": ("gauge", VLLM_LABELS),
    "vllm:num_requests_waiting": ("gauge", VLLM_LABELS),
    "vllm:kv_cache_usage_perc": ("gauge", VLLM_LABELS),
    "vllm:prefix_cache_queries": ("counter", VLLM_LABELS),
    "vllm:prefix_cache_hits": ("counter", VLLM_LABELS),
    "vllm:external_prefix_cache_queries": ("counter", VLLM_LABELS),
    "vllm:external_prefix_cache_hits": ("counter", VLLM_LABELS),
    "vllm:num_preemptions": ("counter", VLLM_LABELS),
    "vllm:prompt_tokens": ("counter", VLLM_LABELS),
    "vllm:prompt_tokens_by_source": ("counter", VLLM_LABELS | {"source"}),
    "vllm:prompt_tokens_cached": ("counter", VLLM_LABELS),
    "vllm:prompt_tokens_cached_by_source": ("counter", VLLM_LABELS | {"source"}),
    "vllm:generation_tokens": ("counter", VLLM_LABELS),
    "vllm:request_success": ("counter", VLLM_LABELS | {"finished_reason"}),
    "vllm:request_prompt_tokens": ("histogram", VLLM_LABELS),
    "vllm:request_generation_tokens": ("histogram", VLLM_LABELS),
    "vllm:request_params_max_tokens": ("histogram", VLLM_LABELS),
    "vllm:time_to_first_token_seconds": ("histogram", VLLM_LABELS),
    "vllm:inter_token_latency_seconds": ("histogram", VLLM_LABELS),
    "vllm:request_time_per_output_token_seconds": ("histogram", VLLM_LABELS),
    "vllm:e2e_request_latency_seconds": ("histogram", VLLM_LABELS),
    "vllm:request_queue_time_seconds": ("histogram", VLLM_LABELS),
    "vllm:request_inference_time_seconds": ("histogram", VLLM_LABELS),
    "vllm:request_prefill_time_seconds": ("histogram", VLLM_LABELS),
    "vllm:request_decode_time_seconds": ("histogram", VLLM_LABELS),
    "vllm:request_num_preemptions": ("histogram", VLLM_LABELS),
    "vllm:request_prefill_kv_computed_tokens": ("histogram", VLLM_LABELS),
    "vllm:cache_config_info": (
        "gauge",
        {"block_size", "enable_prefix_caching", "engine", "num_gpu_blocks", "kv_cache_size_tokens"},
    ),
}
"""As vLLM 0.33.0 has them in v1/metrics/loggers.py; its cache_config_info has more labels."""
REQUESTS = {"model_name", "engine_type"}
SCHEDULER = REQUESTS | {"tp_rank", "pp_rank", "moe_ep_rank"}
SGLANG = {
    **{
        f"sglang:{name}": ("gauge", SCHEDULER)
        for name in (
            "num_running_reqs", "num_queue_reqs", "cache_hit_rate", "gen_throughput", "num_used_tokens", "token_usage",
            "kv_available_tokens", "kv_evictable_tokens", "max_total_num_tokens", "num_pages", "page_size", "context_len",
        )
    },
    "sglang:num_retracted_requests": ("counter", SCHEDULER),
    "sglang:queue_time_seconds": ("histogram", SCHEDULER),
    "sglang:prompt_tokens": ("counter", REQUESTS | {"is_streaming"}),
    "sglang:generation_tokens": ("counter", REQUESTS | {"is_streaming"}),
    "sglang:cached_tokens": ("counter", REQUESTS | {"cache_source"}),
    "sglang:num_requests": ("counter", REQUESTS | {"is_streaming"}),
    "sglang:num_aborted_requests": ("counter", REQUESTS),
    "sglang:prompt_tokens_histogram": ("histogram", REQUESTS),
    "sglang:uncached_prompt_tokens_histogram": ("histogram", REQUESTS),
    "sglang:generation_tokens_histogram": ("histogram", REQUESTS),
    "sglang:time_to_first_token_seconds": ("histogram", REQUESTS | {"is_streaming"}),
    "sglang:inter_token_latency_seconds": ("histogram", REQUESTS),
    "sglang:request_time_per_output_token_seconds": ("histogram", REQUESTS | {"is_streaming"}),
    "sglang:e2e_request_latency_seconds": ("histogram", REQUESTS | {"is_streaming"}),
}  # fmt: skip
"""As SGLang 0.5.23 has them in srt/observability/metrics_collector.py, without a hierarchical cache."""


KEPT = ("source", "cache_source", "finished_reason", "le")
"""Labels that tell samples of a name apart."""


def metrics_after(dialect: str, overrides: tuple[str, ...], *, speed: float = 1.0, aborts: bool = False) -> str:
    """The metrics, as text, after two requests of the same 40 tokens, with 5 and 20 tokens of answer, one after the other.

    ``aborts`` gives the second one up before it ends.
    """

    async def serve() -> str:
        emulator = Emulator(plan_of(overrides), speed)
        api = APIS[dialect](emulator, ApiSettings())
        env = emulator.cluster.env
        emulator.submit(list(range(40)), 5, is_streamed=True)
        env.run(env.now + 100)
        second = emulator.submit(list(range(40)), 20, is_streamed=True)
        if aborts:
            while second.generated < 3:
                env.step()
            emulator.abort(second)
        env.run(env.now + 100)
        assert api.metrics is not None
        return api.metrics.text()[0].decode()

    return asyncio.run(serve())


def read(text: str) -> dict[str, float]:
    """The samples of a text, by name and the labels that tell them apart."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            more = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name in KEPT]
            found["|".join([sample.name, *more])] = sample.value
    return found


@pytest.mark.parametrize(
    ("dialect", "overrides", "expected"),
    [
        ("vllm", ("preset=vllm", "tiers.gpu.capacity=100pages"), VLLM),
        ("sglang", ("preset=sglang", "page_tokens=16", "tiers.gpu.capacity=100pages"), SGLANG),
    ],
)
def test_names_types_and_labels_are_the_engines(
    dialect: str, overrides: tuple[str, ...], expected: dict[str, tuple[str, set[str]]]
) -> None:
    families = {
        family.name: (family.type, {name for sample in family.samples for name in sample.labels} - {"le"})
        for family in text_string_to_metric_families(metrics_after(dialect, overrides))
        if not family.name.endswith("_created")
    }
    assert families == expected


def test_vllms_counters_count_tokens_and_requests() -> None:
    seen = read(metrics_after("vllm", ("preset=vllm", "tiers.gpu.capacity=100pages")))
    assert seen["vllm:prefix_cache_queries_total"] == seen["vllm:prompt_tokens_total"] == 80
    assert seen["vllm:prefix_cache_hits_total"] == seen["vllm:prompt_tokens_by_source_total|source=local_cache_hit"] == 32
    assert seen["vllm:prompt_tokens_by_source_total|source=local_compute"] == 48
    assert seen["vllm:prompt_tokens_cached_by_source_total|source=device"] == 32
    assert seen["vllm:external_prefix_cache_queries_total"] == 0, "there is no connector"
    assert seen["vllm:generation_tokens_total"] == seen["vllm:request_generation_tokens_sum"] == 25
    assert seen["vllm:inter_token_latency_seconds_count"] == 23
    assert seen["vllm:request_success_total|finished_reason=length"] == 2
    assert seen["vllm:time_to_first_token_seconds_count"] == seen["vllm:e2e_request_latency_seconds_count"] == 2
    assert seen["vllm:kv_cache_usage_perc"] == seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0


def test_times_are_those_that_clients_measure() -> None:
    overrides = ("preset=vllm", "tiers.gpu.capacity=100pages")
    real, fast = read(metrics_after("vllm", overrides)), read(metrics_after("vllm", overrides, speed=10.0))
    name = "vllm:e2e_request_latency_seconds_sum"
    assert fast[name] == pytest.approx(real[name] / 10) and real[name] > 0


def test_tokens_of_tiers_below_the_gpu_are_the_connectors() -> None:
    async def serve() -> dict[str, float]:
        plan = plan_of(("preset=vllm_offload", "tiers.gpu.capacity=8pages", "tiers.cpu.capacity=40pages"))
        emulator = Emulator(plan)
        api = APIS["vllm"](emulator, ApiSettings())
        env = emulator.cluster.env
        for first in (0, 1000, 0):
            emulator.submit(list(range(first, first + 100)), 2)
            env.run(env.now + 100)
        assert api.metrics is not None
        return read(api.metrics.text()[0].decode())

    seen = asyncio.run(serve())
    below = seen["vllm:external_prefix_cache_hits_total"]
    assert below > 0 and below == seen["vllm:prompt_tokens_cached_by_source_total|source=host"]
    assert seen["vllm:external_prefix_cache_queries_total"] == 300 - seen["vllm:prefix_cache_hits_total"]


def test_a_request_that_was_given_up_is_no_success() -> None:
    seen = read(metrics_after("vllm", ("preset=vllm", "tiers.gpu.capacity=100pages"), aborts=True))
    assert seen["vllm:e2e_request_latency_seconds_count"] == 1 and seen["vllm:time_to_first_token_seconds_count"] == 2
    assert seen["vllm:kv_cache_usage_perc"] == seen["vllm:num_requests_running"] == 0


def test_sglangs_counters_count_requests_that_have_ended() -> None:
    overrides = ("preset=sglang", "page_tokens=16", "tiers.gpu.capacity=100pages")
    seen, given_up = read(metrics_after("sglang", overrides)), read(metrics_after("sglang", overrides, aborts=True))
    assert seen["sglang:prompt_tokens_total"] == 80 and seen["sglang:generation_tokens_total"] == 25
    assert seen["sglang:cached_tokens_total|cache_source=device"] == 32
    assert seen["sglang:cache_hit_rate"] == pytest.approx(32 / 40)
    assert seen["sglang:num_used_tokens"] == seen["sglang:token_usage"] == 0
    assert seen["sglang:kv_available_tokens"] + seen["sglang:kv_evictable_tokens"] == 1600
    assert given_up["sglang:num_requests_total"] == given_up["sglang:num_aborted_requests_total"] == 1


def test_buckets_of_tokens_are_1_2_5() -> None:
    assert token_buckets(100) == [1, 2, 5, 10, 20, 50, 100] and token_buckets(99)[-1] == 50
