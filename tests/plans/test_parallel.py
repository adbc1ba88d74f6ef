"""How an engine's GPUs share a model: what fits where, what is refused, and what follows from what."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cli import main
from kvsim.errors import NoEffect, UsageError
from kvsim.plans.gpu_memory import GpuMemory, StageMemory
from kvsim.plans.plan import Plan
from tests import composing

GIB = 2**30
H100 = ("hardware=h100", "trace.limit=4")
SPARSE = ("model=deepseek_v3", "model.weight_dtype_bytes=1", "hardware=h200", "hardware.gpus=8", "tiers.gpu.capacity=auto")
AUTO = "tiers.gpu.capacity=auto"


def plan(*overrides: str, command: str = "simulate") -> Plan:
    return composing.plan("trace.limit=4", *overrides, command=command)


@pytest.mark.parametrize(
    ("overrides", "gpus", "stage_gpus"),
    [
        ((), 1, 1),
        (("hardware.gpus=8",), 8, 8),
        (("hardware.gpus=8", "hardware.pipeline_parallel=2"), 8, 4),
        (("hardware.pipeline_parallel=2",), 2, 1),
        (("hardware.tensor_parallel=4",), 4, 4),
        (("hardware.tensor_parallel=4", "hardware.pipeline_parallel=2"), 8, 4),
        (("hardware.gpus=8", "hardware.tensor_parallel=4", "hardware.pipeline_parallel=2"), 8, 4),
    ],
)
def test_the_number_of_gpus_is_the_product_of_the_degrees(overrides: tuple[str, ...], gpus: int, stage_gpus: int) -> None:
    built = plan(*overrides)
    assert (built.hardware.gpus, built.hardware.stage_gpus) == (gpus, stage_gpus)
    assert built.config["hardware"]["gpus"] == gpus, "the record has it, too"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware.gpus=8", "hardware.pipeline_parallel=3"], "hardware.pipeline_parallel=3 does not divide gpus=8"),
        (
            ["hardware.gpus=8", "hardware.tensor_parallel=2"],
            "hardware.gpus is 8, but tensor_parallel=2 x pipeline_parallel=1",
        ),
        (["hardware.pipeline_parallel=33"], "hardware.pipeline_parallel must be at most 32, the model's layers, not 33"),
        (["hardware.pipeline_parallel=x"], "hardware.pipeline_parallel"),
        (
            ["model=nemotron_h_8b", "hardware.pipeline_parallel=2"],
            "hardware.pipeline_parallel=2: stages of a model in which some",
        ),
        (
            ["preset=vllm", "rules.loop=overlap", "hardware.pipeline_parallel=2"],
            "hardware.pipeline_parallel: vLLM's own schedule is simulated with one step at a time here, so without stages: set "
            "rules.loop=plain without a CPU tier, or rules=default",
        ),
        (
            ["preset=vllm_offload", "tiers.cpu.capacity=1GiB", "hardware.pipeline_parallel=2"],
            "hardware.pipeline_parallel: vLLM's own schedule is simulated with one step at a time here",
        ),
        (
            ["preset=sglang", "hardware.pipeline_parallel=2"],
            "hardware.pipeline_parallel: SGLang's own schedule is simulated with",
        ),
        (
            ["hardware=h200_measured", "hardware.pipeline_parallel=2"],
            "hardware.pipeline_parallel: hardware.noise was measured of",
        ),
        (["hardware=linear", "+hardware.pipeline_parallel=2"], "hardware.pipeline_parallel has no effect where step times are a"),
        (
            [*SPARSE, "hardware.gpus=6", "hardware.attention_data_parallel=true", "hardware.expert_parallel=6"],
            "hardware.expert_parallel=6 does not divide the model's 256",
        ),
        (
            ["hardware.gpus=12", "model.heads=48"],
            "hardware.gpus: 12 GPUs cannot share the model's 48 query heads and 8 KV heads evenly, which engines refuse: set a "
            "tensor parallelism of 1, 2, 4, 8, 16, 24, 48",
        ),
        (["hardware.gpus=64"], "hardware.gpus: 64 GPUs cannot share the model's 32 query heads and 8 KV heads evenly"),
        ([*SPARSE, "hardware.gpus=6"], "hardware.gpus: 6 GPUs cannot share the model's 128 query heads evenly"),
        ([*SPARSE, "hardware.expert_parallel=3"], "hardware.expert_parallel=3 does not divide the 8 tensor-parallel GPUs"),
        (
            [*SPARSE, "hardware.expert_parallel=8", "hardware.expert_imbalance=9"],
            "hardware.expert_imbalance must be at most 8, not 9: a token picks 8 of 256 experts, each once, in 8 groups",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(*overrides)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware.gpus=2", "hardware.expert_parallel=2"], "hardware.expert_parallel has no effect on a model without routed"),
        ([*SPARSE, "hardware.expert_imbalance=2"], "hardware.expert_imbalance has no effect with one group of experts: set"),
        ([*SPARSE, "hardware.expert_exchange=all2all"], "hardware.expert_exchange has no effect with one group of experts: set"),
        ([*SPARSE, "hardware.expert_parallel=8", "hardware.all2all_latency_s=1"], "hardware.all2all_latency_s has no effect"),
        (["hardware.pipeline_parallel=2", "hardware.allreduce_steps=2"], "hardware.allreduce_steps has no effect with one GPU"),
        (["hardware.interconnect_latency_s=1"], "hardware.interconnect_latency_s has no effect unless cluster.prefill and"),
        (
            [*SPARSE, "hardware.expert_parallel=8", "hardware.expert_exchange=all2all", "hardware.allreduce_bytes_per_s=null",
             "hardware.all2all_dispatch_bytes=1"],
            "hardware.all2all_dispatch_bytes has no effect without a rate: set hardware.all2all_bytes_per_s",
        ),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(NoEffect) as refused:
        plan(*overrides)
    assert str(refused.value).startswith(message)


def test_the_plain_loop_of_vllm_has_stages() -> None:
    built = plan("preset=vllm", "hardware.pipeline_parallel=2")
    assert built.rules.engine == "vLLM" and built.hardware.pipeline_parallel == 2


def test_links_and_network_cards_have_an_effect_between_stages() -> None:
    built = plan("hardware.pipeline_parallel=2", "network=connectx7", "hardware.interconnect_latency_s=2.0e-5")
    assert built.hardware.interconnect_bytes_per_s < 60e9 and built.hardware.interconnect_latency_s == 2e-5


def test_on_real_gpus_there_are_no_stages() -> None:
    with pytest.raises(UsageError, match=r"^hardware\.pipeline_parallel: on real GPUs, all of an engine's are tensor-parallel"):
        plan("hardware.pipeline_parallel=2", "substrate=hardware", "model=tiny", "tiers.gpu.capacity=100pages")


# --- memory --------------------------------------------------------------------------------------------------------------


def test_the_stage_with_the_least_room_for_its_part_of_a_page_decides_how_many_there_are() -> None:
    """Two stages of 100 bytes, 3 and 2 layers, 30 and 50 bytes of weights: 70 bytes for 3 layers, or 50 for 2.

    A page of 5 bytes, one a layer, fits 23 times on the first, and 25 times on the second.
    """
    memory = GpuMemory(
        gpus=2, memory_bytes=200, gpu_memory_utilization=1.0, weights_bytes=80, workspace_bytes=0, states_bytes=0,
        stages=[StageMemory(layers=3, weights_bytes=30), StageMemory(layers=2, weights_bytes=50)],
    )  # fmt: skip
    assert memory.kv_bytes == 70 * 5 // 3 == 116 and memory.kv_bytes // 5 == 23


@pytest.mark.parametrize("command", ["simulate", "replay"])
def test_the_gpu_tier_has_what_the_worst_stage_leaves(command: str) -> None:
    """Llama 3 8B on two GPUs: 16 layers each; the tables of embeddings are as large. So both stages have as much."""
    whole, staged = (
        plan(*H100, AUTO, "hardware.gpus=2", *more, command=command) for more in ((), ("hardware.pipeline_parallel=2",))
    )
    assert whole.gpu_memory is not None and staged.gpu_memory is not None
    assert staged.gpu_memory.weights_bytes == whole.gpu_memory.weights_bytes
    assert staged.tiers[0].capacity_pages == pytest.approx(whole.tiers[0].capacity_pages, abs=1)
    assert whole.gpu_memory.stages == [] and [stage.layers for stage in staged.gpu_memory.stages] == [16, 16]


def test_uneven_stages_have_room_for_fewer_pages() -> None:
    """DeepSeek-V3 has 61 layers: of four stages, the third has 16, all with experts, and the first three dense ones."""
    own = "hardware.attention_data_parallel=true"
    whole, staged = plan(*SPARSE, own), plan(*SPARSE, own, "hardware.pipeline_parallel=4")
    memory, copied = staged.gpu_memory, plan(*SPARSE, "hardware.pipeline_parallel=4").gpu_memory
    assert memory is not None and whole.gpu_memory is not None and copied is not None
    third = memory.stages[2]
    room = (memory.static_bytes // 4 - third.weights_bytes) * 61 // 16
    assert memory.kv_bytes == room < whole.gpu_memory.kv_bytes
    room = (copied.static_bytes // 4 - copied.stages[2].weights_bytes) * 61 // 16
    assert copied.kv_bytes == room // 2, "both GPUs of a stage have all of its latents"
    assert third.weights_bytes > copied.stages[2].weights_bytes, "or of its attention"


def test_gpus_that_exchange_tokens_have_the_shared_experts_each() -> None:
    """A shared expert of DeepSeek-V3 has 3 * 7168 * 2048 weights in each of 58 layers."""
    split = plan(*SPARSE, "hardware.expert_parallel=8")
    copied = plan(*SPARSE, "hardware.expert_parallel=8", "hardware.expert_exchange=all2all")
    assert split.gpu_memory is not None and copied.gpu_memory is not None
    assert copied.gpu_memory.weights_bytes - split.gpu_memory.weights_bytes == 7 * 58 * 3 * 7168 * 2048
    assert split.gpu_memory == plan(*SPARSE).gpu_memory


def test_a_stage_that_is_too_full_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"^tiers\.gpu\.capacity: 7\d\.\d GiB of KV and 7\.5 GiB of weights of stage 1 do not fit"
    ):
        plan(*H100, "hardware.pipeline_parallel=2", "tiers.gpu.capacity=150GiB")
    with pytest.raises(
        UsageError, match=r"^hardware\.gpus: the model's weights of stage 1 take \d+\.\d GiB, more than the 74\.5"
    ):
        plan(*SPARSE[:2], "hardware=h100", "hardware.pipeline_parallel=4", "tiers.gpu.capacity=1GiB")
    with pytest.raises(UsageError, match=r"^tiers\.gpu\.capacity=auto: no room for KV on one of the stages"):
        plan(*SPARSE[:2], "hardware=h100", "hardware.pipeline_parallel=4", AUTO)


@given(stages=st.sampled_from([1, 2, 4, 8]), gib=st.integers(1, 400))
def test_what_fits_into_stages_fits_into_all_gpus_together(stages: int, gib: int) -> None:
    words = ("model=llama3_70b", "hardware=h100", "hardware.gpus=8", f"tiers.gpu.capacity={gib}GiB")
    try:
        plan(*words, f"hardware.pipeline_parallel={stages}")
    except UsageError:
        return
    assert plan(*words).hardware.gpus == 8


@pytest.mark.parametrize("key", ["hardware.expert_imbalance=2", "hardware.all2all_latency_s=1", "hardware.expert_parallel=8"])
def test_a_replay_has_no_use_for_the_times_of_experts(key: str) -> None:
    with pytest.raises(NoEffect):
        plan(*SPARSE, key, command="replay")


def test_a_replay_counts_the_memory_of_experts_that_are_copied() -> None:
    words = ("hardware.expert_parallel=8", "hardware.expert_exchange=all2all")
    pages = [plan(*SPARSE, *more, command="replay").tiers[0].capacity_pages or 0 for more in ((), words)]
    assert pages[1] < pages[0]


# --- results -------------------------------------------------------------------------------------------------------------


def test_the_result_tells_how_gpus_share_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["hardware=h100", "hardware.tensor_parallel=2", "hardware.pipeline_parallel=2", "trace.limit=40", AUTO]
    assert main(["simulate", *words, f"output={tmp_path}"]) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    shares = record["parallel"]
    assert 0 < shares["communication"] < shares["stages"] <= 1
    assert [stage["layers"] for stage in record["gpu_memory"]["stages"]] == [16, 16]
    shown = " ".join(capsys.readouterr().out.split())
    assert "of the time in steps, a stage is busy for" in shown and "GiB of 4 GPUs in 2 stages" in shown
    assert "4x h100 · TP2 PP2" in (tmp_path / "report.html").read_text()


def test_without_stages_and_experts_nothing_is_told_of_them(tmp_path: Path) -> None:
    words = ["hardware=h100", "hardware.gpus=2", "trace.limit=40", AUTO]
    assert main(["simulate", *words, f"output={tmp_path}"]) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert "parallel" not in record and "stages" not in record["gpu_memory"]


def test_groups_of_experts_tell_their_communication(tmp_path: Path) -> None:
    words = [*SPARSE, "hardware.expert_parallel=8", "hardware.expert_exchange=all2all", "trace.limit=40"]
    assert main(["simulate", *words, f"output={tmp_path}"]) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["parallel"]["stages"] is None and 0 < record["parallel"]["communication"] < 1
