"""Figures of published models, recomputed by hand from their shapes."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from kvsim.model.spec import ModelSpec

CONF = Path(__file__).parent.parent.parent / "conf" / "model"
TINY: dict[str, Any] = {"layers": 2, "hidden_size": 4, "vocabulary": 10, "heads": 2, "kv_heads": 1, "head_dim": 2, "mlp_width": 8}
TINY_EXPERTS: dict[str, Any] = TINY | {"mlp_width": 0, "routed_experts": 4, "experts_per_token": 1, "expert_width": 8}
TINY_HYBRID: dict[str, Any] = TINY | {
    "recurrent_layers": 1,
    "state_heads": 2,
    "state_key_dim": 3,
    "state_value_dim": 4,
    "recurrent_in_width": 7,
    "recurrent_inner_parameters": 11,
    "conv_channels": 5,
    "conv_width": 4,
    "state_flops_per_element": 5.0,
    "state_dtype_bytes": 4,
    "kernel_chunk_tokens": 64,
}


def published(name: str) -> ModelSpec:
    settings = OmegaConf.load(CONF / f"{name}.yaml")
    assert isinstance(settings, DictConfig) and settings.pop("_target_") == "kvsim.model.ModelSpec"
    spec = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelSpec), settings))
    assert isinstance(spec, ModelSpec)
    return spec


@pytest.mark.parametrize("path", sorted(path for path in CONF.glob("*.yaml") if path.stem != "hf"), ids=lambda path: path.stem)
def test_every_model_file_gives_every_figure(path: Path) -> None:
    model = published(path.stem)
    assert model.page_bytes(16) == 16 * model.kv_bytes_per_token > 0
    assert 0 < model.active_parameters <= model.parameters
    assert 0 < model.weight_bytes(1) <= model.weight_bytes(1000) <= model.parameters * model.weight_dtype_bytes
    assert 0 < model.prefill_flops(1, 0) < model.prefill_flops(1, 1000) < model.prefill_flops(1001, 0)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama3_8b", 32 * 2 * 8 * 128 * 2),
        ("llama3_70b", 80 * 2 * 8 * 128 * 2),
        ("qwen3_32b", 64 * 2 * 8 * 128 * 2),
        ("qwen3_30b_a3b", 48 * 2 * 4 * 128 * 2),
        ("deepseek_v3", 61 * (512 + 64) * 2),
        ("qwen3_coder_30b", 48 * 2 * 4 * 128 * 2),
        ("qwen3_next_80b", 12 * 2 * 2 * 256 * 2),
        ("nemotron_h_8b", 4 * 2 * 8 * 128 * 2),
        ("jamba_1_5_mini", 4 * 2 * 8 * 128 * 2),
        ("kimi_linear_48b", 7 * (512 + 64) * 2),
        ("marconi_7b", 4 * 2 * 4096 * 2),
        ("gemma3_27b", 62 * 2 * 16 * 128 * 2),
        ("gpt_oss_20b", 24 * 2 * 8 * 64 * 2),
        ("gpt_oss_120b", 36 * 2 * 8 * 64 * 2),
    ],
)
def test_kv_bytes_per_token_are_layers_by_cached_elements_by_two_bytes(name: str, kv_bytes: int) -> None:
    assert published(name).kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3_8b", 8.03),
        ("llama3_70b", 70.6),
        ("qwen3_32b", 32.8),
        ("qwen3_30b_a3b", 30.5),
        ("deepseek_v3", 671.0),
        ("qwen3_coder_30b", 30.5),
        ("qwen3_next_80b", 79.7),
        ("nemotron_h_8b", 8.10),
        ("jamba_1_5_mini", 51.6),
        ("kimi_linear_48b", 49.1),
        ("gemma3_27b", 27.0),
        ("gpt_oss_20b", 20.9),
        ("gpt_oss_120b", 116.8),
    ],
)
def test_parameters_are_the_published_number(name: str, billions: float) -> None:
    assert published(name).parameters == pytest.approx(billions * 1e9, rel=0.002)


def test_active_parameters_of_deepseek_v3_are_the_published_36_6_billion() -> None:
    assert published("deepseek_v3").active_parameters == pytest.approx(36.6e9, rel=0.002)


def test_active_parameters_of_qwen3_30b_a3b_are_the_published_3_3_billion() -> None:
    """With the lm_head, without the table of embeddings."""
    assert published("qwen3_30b_a3b").active_parameters == pytest.approx(3.3e9, rel=0.1)


def test_flops_of_a_layer_of_qwen3_coder_are_those_printed_for_1024_tokens_at_two_depths() -> None:
    """0.13 and 1.22 TFLOP: Liu, "Computation-aware caching for KV cache", section 3, the cost model of arXiv:2609.28870."""
    model = published("qwen3_coder_30b")
    assert [round(model.prefill_flops(1024, start) / 48 / 1e12, 2) for start in (0, 65_536)] == [0.13, 1.22]


@pytest.mark.parametrize(
    ("name", "state_bytes"),
    [
        ("qwen3_next_80b", 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)),
        ("nemotron_h_8b", 24 * (128 * 64 * 128 * 4 + 10240 * 3 * 2)),
        ("jamba_1_5_mini", 28 * (8192 * 16 * 4 + 8192 * 3 * 2)),
        ("kimi_linear_48b", 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)),
        ("marconi_7b", 24 * (2 * 4096 * 128 + 2 * (2 * 4096 + 2 * 128) * 4)),
        ("llama3_8b", 0),
    ],
)
def test_a_state_is_a_matrix_per_head_and_the_inputs_of_the_convolution(name: str, state_bytes: int) -> None:
    model = published(name)
    assert model.state_bytes == state_bytes
    assert model.is_hybrid == (state_bytes > 0)


@pytest.mark.parametrize(("name", "billions"), [("jamba_1_5_mini", 12.0), ("kimi_linear_48b", 3.0), ("qwen3_next_80b", 3.5)])
def test_active_parameters_of_hybrids_are_near_the_published_number(name: str, billions: float) -> None:
    assert published(name).active_parameters == pytest.approx(billions * 1e9, rel=0.05)


def test_flops_of_marconis_reference_model_are_those_of_its_paper() -> None:
    model, width, state = published("marconi_7b"), 4096, 128
    mamba = 12 * width**2 + 16 * width * state
    attention, mlp = 8 * width**2, 16 * width**2
    convolution = 2 * 5 * (2 * width + 2 * state)
    assert model.linear_flops_per_token == 24 * (mamba + convolution) + 4 * attention + 28 * mlp
    assert convolution < 0.001 * mamba, "which the paper leaves out of its formula"
    assert model.attention_flops_per_pair == 4 * 4 * width, "4 L^2 D over all pairs of a layer; ours are causal, half as many"


def test_states_of_marconis_reference_model_are_those_of_its_figure_3b() -> None:
    """10,000 tokens with a state after every 16th."""
    model = published("marconi_7b")
    assert 625 * model.state_bytes + 10_000 * model.kv_bytes_per_token == pytest.approx(17.4e9, rel=0.001)


def test_recurrent_layers_cost_their_matrices_and_the_recurrence() -> None:
    model = ModelSpec(**TINY_HYBRID)
    attention, mlp = 4 * 4 + 2 * 4 * 2 + 4 * 4, 3 * 4 * 8
    recurrent = 4 * 7 + 11 + 5 * 4 + 2 * 4 * 4
    assert model.linear_flops_per_token == 2 * (attention + recurrent + 2 * mlp) + 2 * 3 * 4 * 5
    assert model.kv_bytes_per_token == 2 * 2 * 2, "one layer has attention"
    assert model.state_bytes == 2 * 3 * 4 * 4 + 5 * 3 * 2


@pytest.mark.parametrize(("page_tokens", "grid"), [(16, 64), (64, 64), (512, 512), (48, 192)])
def test_states_are_saved_where_pages_and_kernel_chunks_end_together(page_tokens: int, grid: int) -> None:
    assert ModelSpec(**TINY_HYBRID).checkpoint_grid_tokens(page_tokens) == grid


def test_a_tied_table_is_counted_once() -> None:
    untied, tied = ModelSpec(**TINY), ModelSpec(**TINY, tied_embeddings=True)
    assert untied.parameters - tied.parameters == 10 * 4
    assert untied.active_parameters == tied.active_parameters == tied.parameters


def test_a_token_costs_two_flops_per_weight_and_the_head_only_where_it_is_sampled() -> None:
    model = ModelSpec(**TINY)
    attention, mlp = 4 * 4 + 2 * 4 * 2 + 4 * 4, 3 * 4 * 8
    assert model.linear_flops_per_token == 2 * 2 * (attention + mlp)
    assert model.sampling_flops_per_token == 2 * 10 * 4


def test_a_pair_of_tokens_costs_four_flops_per_element_of_all_query_heads() -> None:
    llama = published("llama3_8b")
    assert llama.attention_flops_per_pair == llama.decode_attention_flops_per_pair == 4 * 32 * 32 * 128


def test_latent_attention_prefills_naively_and_decodes_absorbed() -> None:
    model = published("deepseek_v3")
    assert model.attention_flops_per_pair == 2 * 61 * 128 * ((128 + 64) + 128)
    assert model.decode_attention_flops_per_pair == 2 * 61 * 128 * ((512 + 64) + 512)
    assert model.prefix_flops_per_token == 2 * 61 * 512 * 128 * (128 + 128)


def test_a_prefill_meets_the_cached_tokens_and_its_own_earlier_ones() -> None:
    model = ModelSpec(**TINY)
    pairs = (10 + 1) + (10 + 2) + (10 + 3)
    expected = 3 * model.linear_flops_per_token + pairs * model.attention_flops_per_pair
    assert model.prefill_flops(3, 10) == expected


def test_chunks_of_a_prefill_add_up_to_the_whole() -> None:
    model = published("llama3_8b")
    assert model.prefill_flops(600, 0) + model.prefill_flops(400, 600) == pytest.approx(model.prefill_flops(1000, 0))


def test_latents_of_the_cached_prefix_are_expanded_again() -> None:
    model = published("deepseek_v3")
    extra = model.prefill_flops(1, 100) - model.prefill_flops(1, 0)
    assert extra == pytest.approx(100 * (model.attention_flops_per_pair + model.prefix_flops_per_token))


def test_a_dense_model_reads_its_active_weights_whatever_the_batch() -> None:
    model = published("llama3_8b")
    assert model.weight_bytes(1) == model.weight_bytes(4096) == 2 * model.active_parameters


def test_a_batch_reads_the_expected_number_of_distinct_experts() -> None:
    model = ModelSpec(**TINY_EXPERTS)
    one_expert_bytes = 2 * 3 * 4 * 8
    shared_by_all = model.weight_bytes(0)
    assert model.weight_bytes(1) - shared_by_all == pytest.approx(2 * 1.0 * one_expert_bytes)
    assert model.weight_bytes(2) - shared_by_all == pytest.approx(2 * 1.75 * one_expert_bytes)
    assert model.weight_bytes(1000) - shared_by_all == pytest.approx(2 * 4 * one_expert_bytes)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (TINY, {"layers": 0}, "layers must be at least 1, not 0"),
        (TINY, {"weight_dtype_bytes": float("nan")}, "weight_dtype_bytes must be a finite number above 0, not nan"),
        (TINY, {"mlp_width": -1}, "mlp_width must be 0 or more, not -1"),
        (TINY, {"mlp_width": 0}, "mlp_width must be above 0 in a model with dense layers, not 0"),
        (TINY, {"kv_heads": 0}, "kv_heads must be above 0, not 0: grouped-query attention requires"),
        (TINY, {"heads": 3, "kv_heads": 2}, "kv_heads=2 must divide heads=3"),
        (TINY, {"rope_dim": 4}, "rope_dim is 4 but has no effect with grouped-query attention: leave it out"),
        (TINY, {"kv_latent_dim": 4}, "nope_dim must be above 0, not 0: latent attention requires"),
        (TINY, {"query_latent_dim": 4}, "query_latent_dim is 4 but has no effect with grouped-query attention: leave it out"),
        (TINY, {"mlp_matrices": 1}, "mlp_matrices must be 3 .* or 2 .*, not 1"),
        (TINY, {"state_heads": 4}, "state_heads is 4 but has no effect without recurrent_layers: set both"),
        (TINY, {"kernel_chunk_tokens": 0}, "kernel_chunk_tokens must be at least 1, not 0"),
        (
            TINY_HYBRID,
            {"recurrent_layers": 2},
            "recurrent_layers must be below layers=2, not 2: some must have attention",
        ),
        (TINY_HYBRID, {"state_key_dim": 0}, "state_key_dim must be above 0, not 0: recurrent_layers requires it"),
        (TINY_HYBRID, {"conv_width": 0}, "conv_width=0 with conv_channels=5: set both or neither"),
        (TINY, {"shared_experts": 1}, "shared_experts is 1 but has no effect without routed_experts"),
        (TINY, {"dense_layers": 1}, "dense_layers is 1 but has no effect without routed_experts"),
        (TINY, {"sliding_window_layers": 1}, "sliding_window_tokens=0 with sliding_window_layers=1: set both or neither"),
        (TINY, {"sliding_window_layers": 1, "sliding_window_tokens": 1}, "sliding_window_tokens must be at least 2, not 1"),
        (TINY, {"sliding_window_layers": 3, "sliding_window_tokens": 8}, "sliding_window_layers must be at most 2, .*, not 3"),
        (TINY_EXPERTS, {"experts_per_token": 5}, "experts_per_token must be 1 to 4, not 5"),
        (TINY_EXPERTS, {"expert_width": 0}, "expert_width must be above 0, not 0"),
        (TINY_EXPERTS, {"dense_layers": 3}, "dense_layers must be at most layers=2, not 3"),
        (TINY_EXPERTS, {"mlp_width": 8}, "mlp_width must be 0 in a model without dense layers, not 8"),
    ],
)
def test_a_bad_setting_is_named_with_its_remedy(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(**(base | change))


def test_gpus_have_copies_of_kv_where_there_are_more_of_them_than_kv_heads() -> None:
    eight_heads, latent = published("llama3_8b"), published("deepseek_v3")
    assert [eight_heads.kv_copies(gpus) for gpus in (1, 4, 8, 16, 32)] == [1, 1, 1, 2, 4]
    assert [latent.kv_copies(gpus) for gpus in (1, 2, 8)] == [1, 2, 8]


def test_latents_alone_are_kept_once_below_gpus_that_share_what_all_of_them_have() -> None:
    heads, latent, hybrid = published("llama3_8b"), published("deepseek_v3"), published("kimi_linear_48b")
    assert [one.shared_kv_copies(16, 1) for one in (heads, latent, hybrid)] == [2, 1, 16]
    assert [one.shared_kv_copies(8, 2) for one in (heads, latent, hybrid)] == [1, 8, 8]
