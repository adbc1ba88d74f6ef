"""How a configuration is started on vLLM, SGLang and LMCache: flags by their names, sizes in the units that they have."""

from functools import cache
from typing import Any

import pytest
import yaml

from kvsim.plans.build import build_run
from kvsim.results.observed import ServerFacts
from kvsim.servers.simulated import overrides_of
from kvsim.settings.configuration import compose_with_choices
from kvsim.sweeps.engine_flags import SERVERS, host_copies, starts, without_server
from kvsim.sweeps.engine_setup import Setup
from tests.docs.modules import ROOT
from tests.servers.shapes import shape

GIB = 2**30
TWO = ("model=llama3_8b", "hardware=h100", "hardware.gpus=2", "tiers.gpu.capacity=auto")


@cache
def started(*overrides: str, cpu: int = 0, disk: int = 0) -> dict[str, dict[str, Any]]:
    """By server, with these bytes of CPU memory and disk for each engine."""
    return {one["server"]: one for one in starts(setup_of(*overrides, cpu=cpu, disk=disk))}


def setup_of(*overrides: str, cpu: int = 0, disk: int = 0) -> Setup:
    tiers = (f"tiers.cpu.capacity={cpu}B", f"tiers.disk.capacity={disk}B")
    words = (*TWO, *overrides, *(tier for tier, n_bytes in zip(tiers, (cpu, disk), strict=True) if n_bytes))
    config, choices = compose_with_choices(words)
    plan = build_run(config, command="simulate", overrides=words, choices=choices)
    return Setup(plan=plan, cpu_bytes=cpu, disk_bytes=disk)


def flags(command: str) -> dict[str, str]:
    """The flags of a command with their values; empty for one without."""
    lines = [line.strip(" \\") for line in command.splitlines()[1:]]
    return {flag: value for flag, _, value in (line.partition(" ") for line in lines)}


def test_a_gpu_tier_alone_has_both_engines_and_no_lower_tier() -> None:
    found = started()
    assert list(found) == ["vLLM", "SGLang"]
    assert flags(found["vLLM"]["command"]) == {
        "--tensor-parallel-size": "2", "--gpu-memory-utilization": "0.9", "--block-size": "16", "--max-num-seqs": "256",
        "--max-num-batched-tokens": "8192", "--scheduling-policy": "fcfs", "--enable-prefix-caching": "",
    }  # fmt: skip
    assert "hicache" not in found["SGLang"]["command"] and found["vLLM"]["notes"] == []


def test_stages_and_groups_of_experts_have_their_flags() -> None:
    stages = started("hardware.gpus=8", "hardware.pipeline_parallel=2")
    vllm, sglang = flags(stages["vLLM"]["command"]), flags(stages["SGLang"]["command"])
    assert (vllm["--tensor-parallel-size"], vllm["--pipeline-parallel-size"]) == ("4", "2")
    assert (sglang["--tp-size"], sglang["--pp-size"]) == ("4", "2")
    assert "--enable-expert-parallel" not in vllm and "--ep-size" not in sglang
    assert stages["SGLang"]["notes"] == ["SGLang has at most 1/2 of --max-running-requests in each of 2 micro-batches"]


SPARSE = ("model=deepseek_v3", "model.weight_dtype_bytes=1", "hardware=h200", "hardware.gpus=8")


def test_a_latent_has_as_many_tokens_as_fit_on_each_gpu() -> None:
    tokens = 61 * (512 + 64) * 2 * 16 * 1000  # of a thousand pages
    found = started(*SPARSE, f"tiers.gpu.capacity={tokens}B", cpu=2 * tokens)
    vllm, sglang = flags(found["vLLM"]["command"]), flags(found["SGLang"]["command"])
    assert int(vllm["--kv-cache-memory-bytes"]) == tokens, "each GPU has all"
    assert float(vllm["--kv-offloading-size"]) == pytest.approx(2 * tokens / GIB, abs=0.01), "vLLM's GPUs share one copy"
    assert sglang["--max-total-tokens"] == "16000" and sglang["--hicache-size"] == str(2 * tokens // 10**9)


def copies_of(*overrides: str, cpu: int = 0, disk: int = 0) -> int:
    return host_copies(setup_of(*overrides, cpu=cpu, disk=disk))


def test_host_memory_has_a_copy_of_each_gpu_but_latents_once_where_gpus_share_them() -> None:
    """vLLM and LMCache keep latents once, SGLang on each GPU; KV heads of which several GPUs have a copy, all do."""
    assert copies_of(*SPARSE, cpu=16 * GIB) == copies_of(*SPARSE, cpu=16 * GIB, disk=GIB) == 1
    assert copies_of(*SPARSE, "preset=sglang_hicache", cpu=16 * GIB) == 8
    assert copies_of(*SPARSE, "hardware.pipeline_parallel=2", cpu=16 * GIB) == 4
    assert copies_of(*SPARSE, "hardware.attention_data_parallel=true", cpu=16 * GIB) == 1
    assert copies_of("hardware.gpus=16", cpu=16 * GIB) == 2 and copies_of("hardware.gpus=8", cpu=16 * GIB) == 1
    assert copies_of("model=kimi_linear_48b", "hardware.gpus=2", "rules=vllm_hybrid", "page_tokens=64", cpu=16 * GIB) == 2
    found = started(*SPARSE, cpu=16 * GIB)
    expected = "SGLang needs 128 GiB of CPU memory for each engine (8 x the KV), and the price has 16 GiB"
    assert [expected in one["notes"] for one in found.values()] == [False, False, True, False]


@pytest.mark.parametrize(
    "overrides",
    [
        ("hardware.gpus=8",),
        ("hardware.gpus=16",),
        SPARSE,
        (*SPARSE, "hardware.pipeline_parallel=2"),
        ("model=kimi_linear_48b", "hardware.gpus=2", "rules=vllm_hybrid", "page_tokens=64"),
    ],
)
def test_a_vllm_that_was_started_with_the_flags_is_simulated_with_the_cpu_memory_of_the_plan(overrides: tuple[str, ...]) -> None:
    """What ``kvsim plan`` writes is what ``kvsim validate`` reads."""
    found = flags(started(*overrides, cpu=16 * GIB)["vLLM"]["command"])
    settings = {
        "kv_transfer_config.kv_connector": "OffloadingConnector",
        "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use": float(found["--kv-offloading-size"]) * GIB,
        "parallel_config.tensor_parallel_size": int(found["--tensor-parallel-size"]),
    }
    stages = int(found.get("--pipeline-parallel-size", 1))
    words = [*(line for line in overrides if not line.startswith("hardware.")), f"hardware.pipeline_parallel={stages}"]
    facts = ServerFacts(engine="vllm", version="0.33.0", settings=settings)
    assert "tiers.cpu.capacity=16GiB" in overrides_of(facts, words, shape)[0]


def test_the_first_worker_of_lmcache_alone_keeps_latents() -> None:
    found = started(*SPARSE, cpu=16 * GIB, disk=64 * GIB)["vLLM with LMCache"]
    file = yaml.safe_load(found["files"]["lmcache.yaml"])
    assert (file["max_local_cpu_size"], file["max_local_disk_size"]) == (16, 64)
    assert file["extra_config"] == {"save_only_first_rank": True}
    staged = started(*SPARSE, "hardware.pipeline_parallel=2", cpu=61 * GIB)["vLLM with LMCache"]
    file = yaml.safe_load(staged["files"]["lmcache.yaml"])
    assert file["max_local_cpu_size"] == 31 and file["extra_config"] == {"save_only_first_rank": False}


def test_copies_of_kv_heads_share_the_drive() -> None:
    """16 GPUs and 8 KV heads: each worker has 1/16 of the drive, and all of them together two copies of half of what was said."""
    found = started("hardware.gpus=16", cpu=16 * GIB, disk=64 * GIB)
    file = yaml.safe_load(found["vLLM with LMCache"]["files"]["lmcache.yaml"])
    assert (file["max_local_cpu_size"], file["max_local_disk_size"]) == (2, 4) and "extra_config" not in file
    note = (
        "GPUs write 2 copies of the KV to the drive and read them all: it holds 32 GiB of KV, at 1/2 of its rates; the "
        "simulation had 64 GiB at full rates, so what the drive brings is too good"
    )
    assert len(found) == 3 and all(note in one["notes"] for one in found.values())


def test_latents_are_in_sglang_s_files_once_also_with_stages_and_in_lmcache_s_for_each_worker() -> None:
    found = started(*SPARSE, "hardware.pipeline_parallel=2", cpu=64 * GIB, disk=64 * GIB)
    told = {name: [line for line in one["notes"] if "to the drive" in line] for name, one in found.items()}
    assert told["SGLang"] == []
    assert all("4 copies of the KV to the drive" in told[name][0] for name in ("vLLM with LMCache", "SGLang with LMCache"))
    alone = started(*SPARSE, cpu=64 * GIB, disk=64 * GIB)
    assert not any("to the drive" in line for one in alone.values() for line in one["notes"])


def test_attention_of_own_requests_has_flags_of_sglang() -> None:
    found = started(*SPARSE, "hardware.attention_data_parallel=true")
    sglang = flags(found["SGLang"]["command"])
    assert "--enable-dp-attention" in sglang and (sglang["--tp-size"], sglang["--dp-size"]) == ("8", "8")
    assert found["vLLM"]["notes"] == ["vLLM has attention_data_parallel as --data-parallel-size=8, with one GPU for each rank"]


def test_tokens_that_are_sent_to_their_experts_need_a_backend() -> None:
    summed = started(*SPARSE, "hardware.expert_parallel=8")
    assert "--enable-expert-parallel" in flags(summed["vLLM"]["command"]) and summed["vLLM"]["notes"] == []
    assert flags(summed["SGLang"]["command"])["--ep-size"] == "8" and "--moe-a2a-backend" not in summed["SGLang"]["command"]
    sent = started(*SPARSE, "hardware.expert_parallel=8", "hardware.expert_exchange=all2all")
    assert flags(sent["SGLang"]["command"])["--moe-a2a-backend"] == "deepep"
    assert sent["vLLM"]["notes"][0].startswith("vLLM sends tokens to their experts only with --data-parallel-size above 1")
    fewer = started(*SPARSE, "hardware.expert_parallel=4")["vLLM"]["notes"]
    assert fewer == ["vLLM spreads experts over all 8 GPUs; the simulation had 4 groups of experts"]


def test_a_gpu_of_the_largest_stage_has_more_of_a_page() -> None:
    """DeepSeek-V3 has 61 layers: four stages of 2 GPUs have up to 16 of them. Both GPUs have all of these latents."""
    found = started(*SPARSE, "hardware.pipeline_parallel=4", "tiers.gpu.capacity=61GiB", cpu=61 * GIB)
    capacity = 61 * GIB // (16 * 61 * 576 * 2) * (16 * 61 * 576 * 2)
    assert flags(found["vLLM"]["command"])["--kv-cache-memory-bytes"] == str(capacity * 16 // 61)
    assert flags(found["SGLang"]["command"])["--hicache-size"] == str(16 * GIB // 10**9)


def test_the_share_for_weights_and_kv_is_what_utilization_leaves_of_the_workspace() -> None:
    """0.9 of 2 x 80 GB, less 2 x 2 GiB of workspace, is 0.873 of the memory."""
    expected = (0.9 * 160e9 - 2 * 2 * GIB) / 160e9
    assert flags(started()["SGLang"]["command"])["--mem-fraction-static"] == f"{expected:.3f}" == "0.873"


def test_a_given_capacity_is_given_to_the_engine() -> None:
    """Llama 3 8B has 131,072 bytes of KV per token: 10 GiB are 81,920 tokens, 5 GiB on each of 2 GPUs."""
    found = started("tiers.gpu.capacity=10GiB")
    assert flags(found["vLLM"]["command"])["--kv-cache-memory-bytes"] == str(5 * GIB)
    assert flags(found["SGLang"]["command"])["--max-total-tokens"] == "81920"
    assert "--gpu-memory-utilization" not in found["vLLM"]["command"] and "--mem-fraction" not in found["SGLang"]["command"]


def test_sizes_are_of_an_engine_or_of_each_gpu_and_in_the_units_of_the_server() -> None:
    """200 GiB are 107.4 GB for each of 2 GPUs, of which SGLang takes whole ones, and 100 GiB for each of LMCache's workers."""
    found = started(cpu=200 * GIB, disk=1024 * GIB)
    assert list(found) == ["vLLM with LMCache", "SGLang", "SGLang with LMCache"], "vLLM's own offloading has no disk"
    sglang = flags(found["SGLang"]["command"])
    assert sglang["--hicache-size"] == "107" and sglang["--hicache-write-policy"] == "write_through"
    assert sglang["--hicache-storage-backend"] == "file"
    assert yaml.safe_load(found["vLLM with LMCache"]["files"]["lmcache.yaml"]) == {
        "chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 100, "cache_policy": "LRU", "local_disk": "file:///mnt/kv",
        "max_local_disk_size": 512,
    }  # fmt: skip
    assert found["vLLM with LMCache"]["command"].startswith("LMCACHE_CONFIG_FILE=lmcache.yaml vllm serve MODEL")
    assert flags(started(cpu=200 * GIB)["vLLM"]["command"])["--kv-offloading-size"] == "200"


def test_what_a_server_does_not_have_is_told() -> None:
    notes = started("eviction=arc", "scheduling=longest_prefix", "placement=write_back", cpu=200 * GIB)
    assert notes["vLLM"]["notes"] == [
        "scheduling=longest_prefix is not among what vLLM has (fcfs, priority)",
        "eviction=arc is not among what vLLM has (lru)",
        "placement=write_back is not among what vLLM has (write_through, store_threshold)",
        "eviction@tiers.cpu.eviction=arc is eviction_policy of kv_connector_extra_config in --kv-transfer-config",
    ]
    sglang = notes["SGLang"]
    assert (
        flags(sglang["command"])["--schedule-policy"] == "lpm"
        and flags(sglang["command"])["--hicache-write-policy"] == "write_back"
    )
    assert "--radix-eviction-policy" not in sglang["command"]
    assert any(note.startswith("eviction=arc is not among") for note in sglang["notes"])


def test_no_server_moves_pages_during_tool_calls() -> None:
    for name, server in started("prefetch=tool_calls", cpu=200 * GIB, disk=500 * GIB).items():
        assert f"prefetch=tool_calls moves pages during tool calls, which {name} does not" in server["notes"]
        assert not any("prefetch=tool_calls is not among" in note for note in server["notes"])


def test_a_host_pool_that_sglang_refuses_is_told() -> None:
    assert started(cpu=20 * GIB)["SGLang"]["notes"][-1].startswith("SGLang refuses a host pool that is no larger than the pool")
    assert not any("refuses" in note for note in started(cpu=200 * GIB)["SGLang"]["notes"])


def test_less_than_a_gb_of_host_memory_is_no_size_for_sglang() -> None:
    found = started("tiers.gpu.capacity=1GiB", cpu=1500 * 2**20)["SGLang"]
    assert "--hicache-size" not in flags(found["command"])
    assert found["notes"][-1].startswith("--hicache-size is in whole GB for each GPU, and this configuration has less")


def test_the_rules_of_an_engine_are_those_of_its_server() -> None:
    assert list(started("preset=vllm_offload", cpu=200 * GIB)) == ["vLLM", "vLLM with LMCache"]
    assert list(started("preset=sglang")) == ["SGLang"]
    assert started("preset=vllm_offload", "placement.k=3", cpu=200 * GIB)["vLLM"]["notes"] == [
        "placement.k=3 is store_threshold of kv_connector_extra_config in --kv-transfer-config"
    ]


def test_engines_of_a_host_that_shared_a_tier_have_each_their_part() -> None:
    notes = started("cluster.engines=2", cpu=200 * GIB)["vLLM"]["notes"]
    assert notes == ["engines of a host shared the cpu tier in the simulation; here each has its part"]
    assert started("cluster.engines=2", "tiers.cpu.scope=engine", cpu=200 * GIB)["vLLM"]["notes"] == []


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_flags_that_presets_name_too_have_the_same_names(engine: str) -> None:
    """docs/engine_defaults.yaml was read in the engines' own files."""
    tables = yaml.safe_load((ROOT / "docs" / "engine_defaults.yaml").read_text())
    of_engine = [preset for preset in tables["presets"].values() if tables["engines"][preset["engine"]]["name"] == engine]
    rows = [row for preset in of_engine for part in preset["rows"] for row in (part if isinstance(part, list) else [part])]
    named = {row["flag"] for row in rows if row["flag"].startswith("--")}
    mine = {flag for server in SERVERS if server.engine == engine for flag in server.flags}
    assert len(mine & named) >= 6
    own = {"--tensor-parallel-size", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-transfer-config", "--tp-size",
           "--mem-fraction-static", "--max-total-tokens", "--hicache-size", "--enable-lmcache",
           "--pipeline-parallel-size", "--enable-expert-parallel", "--pp-size", "--ep-size", "--moe-a2a-backend",
           "--enable-dp-attention", "--dp-size"}  # fmt: skip
    assert mine - named <= own


def test_a_disk_that_is_not_below_the_cpu_has_no_server() -> None:
    words = (*TWO, "tiers.cpu.capacity=20GiB", "tiers.disk.capacity=1TiB", "tiers.disk.below=gpu")
    config, choices = compose_with_choices(words)
    plan = build_run(config, command="simulate", overrides=words, choices=choices)
    setup = Setup(plan=plan, cpu_bytes=20 * GIB, disk_bytes=1024 * GIB)
    assert starts(setup) == []
    assert without_server(setup) == ["no server is named: none has the disk tier directly below the gpu tier"]


def test_a_disk_below_the_cpu_has_one() -> None:
    assert started(cpu=200 * GIB, disk=1024 * GIB)
