"""Plans for models with sliding windows: what a slot of the GPU tier is, what is refused, and what a run says."""

import pytest

from kvsim.errors import UsageError
from tests.composing import plan

LAYER_BYTES = 16 * 2 * 16 * 128 * 2
"""A page of 16 tokens in one layer of Gemma 3 27B."""


def test_a_slot_is_a_block_of_one_group() -> None:
    built = plan("preset=vllm_window", "tiers.gpu.capacity=10GiB")
    assert built.page_bytes == 10 * LAYER_BYTES
    assert built.tiers[0].capacity_pages == 10 * 2**30 // (10 * LAYER_BYTES)
    own = plan("model=gemma3_27b", "page_tokens=16", "tiers.gpu.capacity=10GiB")
    assert own.page_bytes == 62 * LAYER_BYTES
    gpt_oss = plan("preset=vllm_window", "model=gpt_oss_120b")
    assert gpt_oss.page_bytes == 18 * 16 * 2 * 8 * 64 * 2


def test_auto_divides_what_the_weights_leave_into_blocks() -> None:
    """0.9 of 80 GB, less 27.01e9 weights of 2 bytes and a workspace of 2 GiB."""
    built = plan("preset=vllm_window", "tiers.gpu.capacity=auto", "hardware=h100", command="simulate")
    assert built.gpu_memory is not None
    assert built.tiers[0].capacity_pages == built.gpu_memory.kv_bytes // (10 * LAYER_BYTES)


def test_weights_and_blocks_have_to_fit() -> None:
    with pytest.raises(UsageError, match=r"tiers\.gpu\.capacity: 244\.1 GiB of KV .* do not fit"):
        plan("preset=vllm_window", "tiers.gpu.capacity=200000pages", "hardware=h200", command="simulate")


def test_a_run_says_where_the_kv_behind_windows_is_kept() -> None:
    note = "52 of 62 attention layers have a window of 1,024 tokens, but under these rules their KV is kept for the whole prompt"
    assert plan("model=gemma3_27b").model_note == plan("model=gemma3_27b", "preset=vllm").model_note == note
    assert plan("preset=vllm_window").model_note == plan().model_note == ""


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("model=llama3_8b",), "need a model with sliding windows: set model=gemma3_27b or rules=vllm"),
        (("model.sliding_window_layers=62",), "a window and none with full attention are not modelled: set rules=default"),
        (("model.sliding_window_layers=20",), "several groups of full attention for 42 layers beside 20 with a window"),
        (("tiers.cpu.capacity=1GiB",), "vLLM's rules have no cpu tier: set tiers.cpu.capacity=0"),
        (("rules.retention_tokens=-1",), "retention_tokens must be 0 or more, not -1; null keeps a place after every page"),
        (("rules.recompute_last_token=false",), "there is no such setting"),
        (("sample=10%",), "windows cannot be scaled down with the pages"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError) as error:
        plan("preset=vllm_window", *overrides)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_other_commands_are_refused() -> None:
    with pytest.raises(UsageError, match="for kvsim replay and kvsim simulate, not for kvsim validate"):
        plan("preset=vllm_window", "hardware=h100", command="validate")


def test_stages_and_real_memory_have_no_windows() -> None:
    with pytest.raises(UsageError, match=r"hardware\.pipeline_parallel=2: stages of a model in which some layers have a sliding"):
        plan("model=gemma3_27b", "hardware.gpus=2", "hardware.pipeline_parallel=2", command="simulate")
