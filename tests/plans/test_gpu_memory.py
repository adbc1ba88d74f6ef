"""What fits into an engine's GPUs, and how large its GPU tier is by itself."""

import json
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from tests import composing

GIB = 2**30
LLAMA_WEIGHTS = 8_029_995_008 * 2
"""Matrices of Llama 3 8B in bf16."""


def plan(*overrides: str, command: str = "simulate") -> Plan:
    return composing.plan(*overrides, command=command)


@pytest.mark.parametrize("command", ["simulate", "replay"])
def test_the_gpu_tier_takes_what_the_weights_leave(command: str) -> None:
    built = plan("tiers.gpu.capacity=auto", "hardware=h100", "hardware.gpus=2", command=command)
    room = int(2 * 80e9 * 0.9) - LLAMA_WEIGHTS - 2 * 2 * GIB
    assert built.gpu_memory is not None and built.gpu_memory.kv_bytes == room
    assert built.tiers[0].capacity_pages == room // (16 * 131_072)


DEEPSEEK = ("model=deepseek_v3", "hardware=h200", "hardware.gpus=8")
TOKEN_BYTES = 61 * (512 + 64) * 2
"""A latent and the part of keys that all heads share, in each of DeepSeek-V3's layers."""


def test_each_gpu_has_all_of_a_latent() -> None:
    one = plan("tiers.gpu.capacity=auto", *DEEPSEEK)
    assert one.gpu_memory is not None and one.gpu_memory.kv_copies == 8
    room = one.gpu_memory.static_bytes - one.gpu_memory.weights_bytes
    assert one.gpu_memory.kv_bytes == room // 8
    assert one.tiers[0].capacity_pages == room // 8 // (16 * TOKEN_BYTES) == 36_353
    own = plan("tiers.gpu.capacity=auto", *DEEPSEEK, "hardware.attention_data_parallel=true")
    assert own.gpu_memory is not None
    query, latent = 1536 * (7168 + 128 * 192), 7168 * 576 + 512 * 128 * 256
    attention, embeddings = 61 * (query + latent + 128 * 128 * 7168), 129_280 * 7168
    assert own.gpu_memory.weights_bytes - one.gpu_memory.weights_bytes == 7 * (attention + embeddings), "of 1 byte each"
    assert own.tiers[0].capacity_pages == (room - 7 * (attention + embeddings)) // (16 * TOKEN_BYTES)


def test_copies_of_kv_must_fit_too() -> None:
    plan("tiers.gpu.capacity=40GiB", *DEEPSEEK)
    with pytest.raises(UsageError, match=r"^tiers\.gpu\.capacity: 640\.0 GiB of KV, with a copy on each of 8 GPUs and"):
        plan("tiers.gpu.capacity=80GiB", *DEEPSEEK)
    plan("tiers.gpu.capacity=80GiB", *DEEPSEEK, "hardware.attention_data_parallel=true")


def test_attention_of_own_requests_needs_copies_to_spare() -> None:
    with pytest.raises(UsageError, match=r"^hardware\.attention_data_parallel has no effect where no KV is on several GPUs"):
        plan("hardware=h100", "hardware.gpus=8", "hardware.attention_data_parallel=true")


def test_its_settings_are_heeded() -> None:
    whole = "tiers.gpu.gpu_memory_utilization=1"
    pages = plan("tiers.gpu.capacity=auto", "hardware=h100", whole, "tiers.gpu.workspace=0").tiers[0].capacity_pages
    assert pages == (80_000_000_000 - LLAMA_WEIGHTS) // (16 * 131_072)


def test_states_with_room_of_their_own_are_left_out() -> None:
    settings = ("model=nemotron_h_8b", "hardware=h100", "tiers.gpu.capacity=auto")
    shared, apart = plan(*settings), plan(*settings, "tiers.gpu.states=64states")
    assert shared.gpu_memory is not None and apart.gpu_memory is not None
    assert shared.gpu_memory.kv_bytes - apart.gpu_memory.kv_bytes == 64 * shared.model.state_bytes
    with pytest.raises(UsageError, match=r"^tiers\.gpu\.states is unlimited, which leaves no room for tiers\.gpu\.capacity=auto"):
        plan(*settings, "tiers.gpu.states=unlimited")


def test_each_engine_has_gpus_of_its_own() -> None:
    alone, four = plan("tiers.gpu.capacity=auto"), plan("tiers.gpu.capacity=auto", "cluster.engines=4")
    assert alone.tiers[0].capacity_pages == four.tiers[0].capacity_pages


def test_the_result_tells_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "trace.sessions=4", "tiers.gpu.capacity=auto", "hardware.gpus=2", f"output={tmp_path}"]) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["tiers"]["gpu"]["capacity_pages"] == record["gpu_memory"]["kv_bytes"] // record["page_bytes"]
    assert "KV, 15.0 GiB weights, 4.0 GiB workspace: 0.9 of 262.6 GiB of 2 GPUs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tiers.gpu.capacity=400GiB"], "tiers.gpu.capacity: 400.0 GiB of KV and 15.0 GiB of weights do not fit into the"),
        (
            ["hardware=h100", "tiers.gpu.capacity=40GiB", "engine.lora.max_loras=32", "engine.lora.adapter_bytes=1000000000"],
            "tiers.gpu.capacity: 40.0 GiB of KV, 29.8 GiB of LoRA adapters and 15.0 GiB of weights do not fit into the 74.5 GiB "
            "of 1 GPU (hardware.gpus): set it lower, or to auto, set engine.lora.max_loras lower, or set hardware.gpus higher",
        ),
        (["model=llama3_70b"], "hardware.gpus: the model's weights take 131.4 GiB, more than the 131.3 GiB of 1 GPU"),
        (["model=llama3_70b", "tiers.gpu.capacity=auto"], "tiers.gpu.capacity=auto: no room for KV: 131.4 GiB of weights"),
        (["tiers.cpu.capacity=auto"], "tiers.cpu.capacity: auto is the size of a GPU tier"),
        (["tiers.gpu.capacity=auto", "tiers.gpu.workspace=2"], "tiers.gpu.workspace must be a size such as 2GiB"),
        (["tiers.gpu.capacity=auto", "tiers.gpu.gpu_memory_utilization=0"], "tiers.gpu.gpu_memory_utilization must be above 0"),
        (["tiers.gpu.capacity=auto", "tiers.gpu.gpu_memory_utilization=much"], "tiers.gpu.gpu_memory_utilization must be a"),
        (["tiers.gpu.workspace=1GiB"], "tiers.gpu.workspace has no effect on a capacity given as a number"),
    ],
)  # fmt: skip
def test_what_does_not_fit_ends_with_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(*overrides)
    assert str(error.value).startswith(message)


def test_what_fits_exactly_passes() -> None:
    assert plan("tiers.gpu.capacity=400GiB", "hardware.gpus=8")
    pages = (141_000_000_000 - LLAMA_WEIGHTS) // (16 * 131_072)
    assert plan(f"tiers.gpu.capacity={pages}pages")
    with pytest.raises(UsageError, match="do not fit"):
        plan(f"tiers.gpu.capacity={pages + 1}pages")


def test_a_replay_has_no_gpus_unless_they_decide_the_size() -> None:
    assert plan("tiers.gpu.capacity=400GiB", command="replay")
    for key in ("hardware.gpus=2", "hardware.flops_per_s=1e12"):
        with pytest.raises(UsageError, match="has no effect on kvsim replay"):
            plan(key, command="replay")
    with pytest.raises(UsageError, match=r"^hardware\.flops_per_s has no effect on kvsim replay"):
        plan("tiers.gpu.capacity=auto", "hardware.flops_per_s=1e12", command="replay")
