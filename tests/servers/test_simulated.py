"""What a server says of itself, as settings of kvsim; and its requests, as they were sent."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvsim.errors import UsageError
from kvsim.results.observed import ServerFacts
from kvsim.servers import simulated
from kvsim.servers.simulated import as_played, only
from tests.report.servers.observed_runs import observed
from tests.servers.shapes import shape
from tests.workloads import make_request

VLLM = {
    "scheduler_config.max_num_batched_tokens": 2048, "scheduler_config.max_num_seqs": 64,
    "scheduler_config.async_scheduling": True, "cache_config.enable_prefix_caching": "True",
}  # fmt: skip
SGLANG = {
    "chunked_prefill_size": 4096, "max_running_requests": None, "disable_overlap_schedule": True, "schedule_policy": "dfs-weight",
    "enable_mixed_chunk": False, "hicache_write_policy": "write_back", "disable_radix_cache": False, "tp_size": 2,
}  # fmt: skip


def overrides_of(facts: ServerFacts, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    return simulated.overrides_of(facts, overrides, shape)


def facts(engine: str, settings: dict[str, Any], **more: Any) -> ServerFacts:
    return ServerFacts(engine=engine, page_tokens=16, capacity_tokens=4000, settings=settings, **more)


def test_vllm_is_played_by_its_preset_with_its_own_flags() -> None:
    found, notes = overrides_of(facts("vllm", VLLM), ["trace=synthetic"])
    assert found == [
        "preset=vllm", "engine.max_batch_tokens=2048", "engine.max_running_requests=64", "rules.loop=overlap",
        "tiers.gpu.capacity=4000tokens", "page_tokens=16",
    ]  # fmt: skip
    assert notes == []


def test_sglang_with_host_memory_is_played_by_its_hierarchical_cache() -> None:
    found, _ = overrides_of(facts("sglang", SGLANG, host_capacity_tokens=9000), [])
    assert found == [
        "preset=sglang_hicache", "engine.max_batch_tokens=4096", "rules.loop=plain", "scheduling=dfs_weight", "hardware.gpus=2",
        "placement=write_back", "tiers.gpu.capacity=4000tokens", "tiers.cpu.capacity=9000tokens", "page_tokens=16",
    ]  # fmt: skip
    without, _ = overrides_of(facts("sglang", SGLANG), [])
    assert "preset=sglang" in without and not any(line.startswith(("placement", "tiers.cpu")) for line in without)


def test_what_the_user_sets_stays_and_is_noted() -> None:
    found, notes = overrides_of(facts("vllm", VLLM), ["page_tokens=32", "preset=vllm_offload", "engine.max_batch_tokens=2048"])
    assert "page_tokens=16" not in found and "preset=vllm" not in found and "rules.loop=overlap" in found
    assert notes == ["page_tokens=32 is simulated, but the server has 16"]
    other, _ = overrides_of(facts("vllm", VLLM), ["rules=default"])
    assert not any(line.startswith(("rules", "preset")) for line in other)


def test_the_tensor_parallel_gpus_of_a_server_are_those_of_each_stage() -> None:
    settings = VLLM | {"parallel_config.tensor_parallel_size": 4, "parallel_config.pipeline_parallel_size": 2}
    found, notes = overrides_of(facts("vllm", settings), [])
    assert "hardware.gpus=4" in found and notes[0].startswith("the server has 2 pipeline stages")
    found, notes = overrides_of(facts("vllm", settings), ["hardware.pipeline_parallel=2"])
    assert "hardware.tensor_parallel=4" in found and not any(line.startswith("hardware.gpus") for line in found) and notes == []


@pytest.mark.parametrize(
    ("version", "line"),
    [("0.25.1", "rules.version=0.25.1"), ("0.19.0rc1", "rules.version=0.25.1"), ("0.26.0", ""), ("0.33.0", ""), (None, "")],
)
def test_the_version_of_a_server_is_played(version: str | None, line: str) -> None:
    found, _ = overrides_of(facts("vllm", VLLM, version=version), [])
    assert [one for one in found if one.startswith("rules.version")] == [line][: bool(line)]
    other, _ = overrides_of(facts("vllm", VLLM, version=version), ["rules=default"])
    assert not any(one.startswith("rules") for one in other)


@pytest.mark.parametrize(("version", "is_told"), [("0.5.15", True), ("0.4", True), ("0.5.16", False), ("0.5.23.post1", False)])
def test_the_version_of_an_sglang_without_host_memory_is_played(version: str, is_told: bool) -> None:
    found, _ = overrides_of(facts("sglang", SGLANG, version=version), [])
    assert ("rules.version=0.5.15" in found) == is_told
    hosted, _ = overrides_of(facts("sglang", SGLANG, version=version, host_capacity_tokens=9000), [])
    assert not any(line.startswith("rules.version") for line in hosted)


def test_an_unknown_server_has_no_preset() -> None:
    assert overrides_of(ServerFacts(engine="openai"), []) == ([], [])


@pytest.mark.parametrize(
    ("engine", "settings"),
    [("vllm", {"cache_config.enable_prefix_caching": "False"}), ("sglang", {"disable_radix_cache": True})],
)
def test_a_server_without_a_cache_is_refused(engine: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the server has its prefix cache switched off"):
        overrides_of(facts(engine, settings), [])


@pytest.mark.parametrize(
    ("engine", "settings", "note"),
    [
        (
            "vllm",
            {"kv_transfer_config.kv_connector": "OffloadingConnector"},
            "the server has a KV connector: if that offloads to",
        ),
        ("vllm", {"cache_config.kv_offloading_size": "16.0"}, "the server has a KV connector: if that offloads to the CPU, set"),
        ("vllm", {"scheduler_config.policy": "priority"}, "the server schedules by priority, but requests are sent without one"),
        ("vllm", {"scheduler_config.enable_chunked_prefill": False}, "the server does not compute prompts in chunks"),
        ("vllm", {"parallel_config.pipeline_parallel_size": 2}, "the server has 2 pipeline stages"),
        ("vllm", {"speculative_config.num_speculative_tokens": 3}, "the server speculates 3 tokens ahead"),
        ("sglang", {"schedule_policy": "lof"}, "the server schedules by lof (schedule_policy), which is not simulated"),
        ("sglang", {"schedule_policy": "random"}, "the server schedules by random (schedule_policy), which is not simulated"),
        (
            "sglang",
            {"chunked_prefill_size": -1},
            "the server does not compute prompts in chunks (chunked_prefill_size): set rules",
        ),
        ("sglang", {"pp_size": 4}, "the server has 4 pipeline stages"),
        ("sglang", {"speculative_algorithm": "EAGLE"}, "the server speculates (EAGLE), the simulation does not"),
        ("sglang", {"hicache_storage_backend": "file"}, "the server has storage below its host memory: set tiers.disk.capacity"),
        (
            "sglang",
            {"enable_hierarchical_cache": True},
            "the server has a hierarchical cache and does not say how large its host",
        ),
    ],
)
def test_what_is_not_simulated_is_noted(engine: str, settings: dict[str, Any], note: str) -> None:
    _, (found,) = overrides_of(facts(engine, settings), [])
    assert found.startswith(note)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        (
            "vllm",
            {
                "cache_config.kv_offloading_size": "None", "scheduler_config.policy": "fcfs",
                "scheduler_config.enable_chunked_prefill": True, "parallel_config.pipeline_parallel_size": 1,
                "kv_transfer_config.kv_connector": None, "speculative_config.num_speculative_tokens": None,
            },
        ),
        (
            "sglang",
            {
                "schedule_policy": "fcfs", "chunked_prefill_size": 8192, "pp_size": 1, "speculative_algorithm": None,
                "hicache_storage_backend": None, "enable_hierarchical_cache": False, "hicache_write_policy": "write_through",
            },
        ),
    ],
)  # fmt: skip
def test_a_server_with_its_defaults_needs_no_note(engine: str, settings: dict[str, Any]) -> None:
    assert overrides_of(facts(engine, settings), [])[1] == []


def test_a_host_tier_whose_size_the_user_sets_is_simulated_with_the_server_s_policy() -> None:
    flags = {"enable_hierarchical_cache": True, "hicache_write_policy": "write_back", "hicache_storage_backend": "file"}
    own = ["preset=sglang_hicache", "tiers.cpu.capacity=20GiB"]
    found, notes = overrides_of(facts("sglang", flags), [*own, "tiers.disk.capacity=1TiB"])
    assert "placement=write_back" in found and notes == []


def test_a_preset_of_another_engine_is_noted() -> None:
    assert overrides_of(facts("vllm", {}), ["preset=sglang_hicache"])[1] == [
        "the server is vllm, but preset=sglang_hicache is simulated"
    ]
    assert overrides_of(facts("sglang", {}), ["preset=sglang_hicache"])[1] == []
    assert overrides_of(facts("sglang", {}), ["preset=marconi"])[1] == [], "one of no engine"


def test_vllm_with_cpu_offloading_is_played_by_its_preset_for_it() -> None:
    connector = {
        "kv_transfer_config.kv_connector": "OffloadingConnector",
        "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use": 16 * 2**30,
    }
    found, notes = overrides_of(facts("vllm", connector), [])
    assert {"preset=vllm_offload", "tiers.cpu.capacity=16GiB"} <= set(found) and notes == []


BYTES, CONNECTOR = "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use", "kv_transfer_config.kv_connector"
MLA, HEADS, STAGED = "model=deepseek_v3", "model=llama3_8b", "hardware.pipeline_parallel=2"
EXECUTOR, NODES = "parallel_config.distributed_executor_backend", "parallel_config.nnodes"


@pytest.mark.parametrize(
    ("gpus", "version", "more", "overrides", "copies"),
    [
        (8, "0.33.0", {}, [HEADS], 1),
        (16, "0.33.0", {}, [HEADS], 2),
        (8, "0.33.0", {EXECUTOR: "mp", NODES: 1}, [MLA], 1),
        (8, None, {}, [MLA], 1),
        (8, "0.27.0", {}, [MLA], 1),
        (8, "0.26.0", {}, [MLA], 8),
        (8, "0.33.0", {CONNECTOR: "SimpleCPUOffloadConnector"}, [MLA], 8),
        (8, "0.33.0", {EXECUTOR: "ray"}, [MLA], 8),
        (8, "0.33.0", {EXECUTOR: "mp", NODES: 2}, [MLA], 8),
        (8, "0.33.0", {}, [MLA, STAGED], 8),
        (2, "0.33.0", {}, ["model=kimi_linear_48b"], 2),
    ],
)
def test_the_cpu_memory_of_a_vllm_has_a_copy_of_the_kv_for_each_gpu_that_keeps_one(
    gpus: int, version: str | None, more: dict[str, Any], overrides: list[str], copies: int
) -> None:
    """8 KV heads on 16 GPUs are there twice, latents on each GPU; in one memory for all, latents are there once."""
    settings = {CONNECTOR: "OffloadingConnector", BYTES: 16 * 2**30, "parallel_config.tensor_parallel_size": gpus, **more}
    found, notes = overrides_of(facts("vllm", settings, version=version), overrides)
    assert f"tiers.cpu.capacity={16 // copies}GiB" in found
    line = f"cpu_bytes_to_use is 16 GiB for {copies} copies of the KV, of which a simulation counts one: {16 // copies} GiB"
    assert notes == [line] * (copies > 1)


def test_a_size_in_bytes_is_kept_to_the_byte() -> None:
    settings = {BYTES: 16 * 2**30 + 7.0, "parallel_config.tensor_parallel_size": 16}
    assert f"tiers.cpu.capacity={8 * 2**30 + 3}B" in overrides_of(facts("vllm", settings), [HEADS])[0]
    for size in (0, -1, True, "16", float("inf"), float("nan"), 10**400):
        assert not any(line.startswith("tiers.cpu") for line in overrides_of(facts("vllm", {BYTES: size}), [])[0])


def test_a_cpu_tier_that_the_user_sets_needs_no_note_on_copies() -> None:
    settings = {BYTES: 16 * 2**30, "parallel_config.tensor_parallel_size": 16}
    found, notes = overrides_of(facts("vllm", settings), [HEADS, "tiers.cpu.capacity=16GiB"])
    assert not any(line.startswith("tiers.cpu") for line in found)
    assert notes == ["tiers.cpu.capacity=16GiB is simulated, but the server has 8GiB"]


REQUESTS = [
    make_request([0], index=0, arrival_s=10.0),
    make_request([1], index=1, arrival_s=14.0),
    make_request([2], index=2, arrival_s=20.0, after=0, delay_s=2.0),
]


def test_a_client_that_keeps_the_trace_s_times_is_simulated_by_them() -> None:
    run = observed([0] * 3, sent_s=[0.0, 2.0, 7.0])
    run = type(run)(**{name: getattr(run, name) for name in run.__dataclass_fields__} | {"speed": 2.0})
    played, note = as_played(REQUESTS, run)
    assert [(one.arrival_s, one.after, one.delay_s) for one in played] == [(0, -1, 0), (2, -1, 0), (5, 0, 1)] and note == ""


def test_any_other_client_is_simulated_by_when_it_sent_requests() -> None:
    run = observed([0] * 3, sent_s=[0.0, 1.0, float("nan")])
    run.due_s[:] = np.array([0.0, 1.0, 3.0])
    played, note = as_played(REQUESTS, run)
    assert [(one.arrival_s, one.after) for one in played] == [(0, -1), (1, -1), (3, -1)]
    assert note.startswith("The client did not keep the trace's times")


def test_a_request_of_a_closed_loop_follows_the_one_whose_place_it_took() -> None:
    """Two places. The first request ends at 5, the second at 3 (each takes 2 s after its first token)."""
    requests = [make_request([number], index=number, arrival_s=50.0 - number) for number in range(4)]
    run = observed([0] * 4, sent_s=[0.0, 0.0, 3.5, 5.0], ttft_s=[3.0, 1.0, 4.0, 4.0])
    run = type(run)(**{name: getattr(run, name) for name in run.__dataclass_fields__} | {"concurrency": 2})
    played, note = as_played(requests, run)
    assert [(one.arrival_s, one.after, one.delay_s) for one in played] == [(0, -1, 0), (0, -1, 0), (3.5, 1, 0.5), (5, 0, 0)]
    assert note.startswith("Simulated requests arrive when the one has ended")


def test_requests_that_were_never_served_are_not_simulated() -> None:
    kept = only(REQUESTS, [False, True, True])
    assert [(one.index, one.runs, one.after) for one in kept] == [(0, ((1, 1),), -1), (1, ((2, 1),), -1)]
    assert [one.after for one in only(REQUESTS, [True, False, True])] == [-1, 0]


def test_a_request_waits_for_those_of_its_predecessors_that_were_served() -> None:
    first, second, third, _ = (make_request([number], index=number) for number in range(4))
    join = make_request([3], index=3, after=0, joins=(1, 2))
    kept = [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
    found = [only([first, second, third, join], [bool(one) for one in each])[-1].predecessors for each in kept]
    assert found == [(0, 1, 2), (0, 1), (0,), ()]
