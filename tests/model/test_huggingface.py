"""Models read from the config.json that Hugging Face publishes with them: the same numbers as in conf/model."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.model.huggingface import HuggingFaceModel
from kvsim.model.spec import ModelSpec

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "model"
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 25600, "max_window_layers": 64,
    "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [], "moe_intermediate_size": 512,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
QWEN3_CODER = {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 5472,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "shared_expert_intermediate_size": 0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2,
    "hidden_size": 4096, "intermediate_size": 14336, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256,
    "mamba_expand": 2, "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 65536,
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504,
    "mamba_head_dim": 64, "mamba_num_heads": 128, "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52,
    "num_key_value_heads": 8, "ssm_state_size": 128, "tie_word_embeddings": False, "vocab_size": 131072,
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304, "intermediate_size": 9216,
    "kv_lora_rank": 512, "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
    "moe_intermediate_size": 1024, "num_attention_heads": 32, "num_experts": 256, "num_experts_per_token": 8,
    "num_hidden_layers": 27, "num_key_value_heads": 32, "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False, "dtype": "bfloat16", "vocab_size": 163840,
}  # fmt: skip
PUBLISHED = {
    "llama3_8b": LLAMA,
    "llama3_70b": LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "qwen3_32b": QWEN3,
    "qwen3_30b_a3b": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK,
    "qwen3_coder_30b": QWEN3_CODER,
    "qwen3_next_80b": QWEN3_NEXT,
    "jamba_1_5_mini": JAMBA,
    "nemotron_h_8b": NEMOTRON_H,
    "kimi_linear_48b": KIMI_LINEAR,
}


def read(folder: Path, content: dict[str, Any], **settings: Any) -> HuggingFaceModel:
    (folder / "config.json").write_text(json.dumps(content))
    return HuggingFaceModel(path=str(folder), **settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_file_gives_the_numbers_of_conf(name: str, tmp_path: Path) -> None:
    settings = OmegaConf.load(CONF / f"{name}.yaml")
    settings.pop("_target_")
    expected, found = ModelSpec(**settings), read(tmp_path, PUBLISHED[name]).spec()
    assert {field.name: getattr(found, field.name) for field in fields(ModelSpec)} == {
        field.name: getattr(expected, field.name) for field in fields(ModelSpec)
    }


BASE = {"hidden_size": 2048, "intermediate_size": 768, "num_attention_heads": 16, "num_hidden_layers": 4, "vocab_size": 1000}
MAMBA = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model_type": "mistral"}, {"kv_heads": 16, "head_dim": 128, "mlp_width": 768, "tied_embeddings": False}),
        ({"model_type": "gemma2", "head_dim": 256}, {"head_dim": 256, "tied_embeddings": True}),
        ({"model_type": "llama", "head_dim": None, "torch_dtype": "float32"}, {"head_dim": 128, "kv_dtype_bytes": 4}),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
            {"routed_experts": 8, "experts_per_token": 2, "expert_width": 768, "mlp_width": 0, "dense_layers": 0},
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
             "mlp_only_layers": [0], "decoder_sparse_step": 2},
            {"dense_layers": 2, "mlp_width": 768, "expert_width": 64, "shared_experts": 0},
        ),
        (
            {"model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
             "shared_expert_intermediate_size": 5632},
            {"shared_experts": 4, "dense_layers": 0, "mlp_width": 0},
        ),
        (
            {"model_type": "glm4_moe", "head_dim": 128, "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1,
             "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 3},
            {"kv_heads": 8, "dense_layers": 3, "kv_latent_dim": 0, "routed_experts": 128},
        ),
        (
            {"model_type": "deepseek_v2", "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
             "qk_rope_head_dim": 64, "v_head_dim": 128},
            {"kv_latent_dim": 512, "query_latent_dim": 0, "routed_experts": 0, "mlp_width": 768, "kv_heads": 0},
        ),
        (
            {"model_type": "bamba", "attn_layer_indices": [2], "mamba_chunk_size": 256, **MAMBA},
            {"recurrent_layers": 3, "recurrent_in_width": 2 * 4096 + 2 * 128 + 64, "conv_channels": 4096 + 256, "mlp_width": 768},
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_chunk_size": 256,
             "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536, **MAMBA},
            {"recurrent_layers": 3, "routed_experts": 72, "shared_experts": 2, "expert_width": 768, "tied_embeddings": True},
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
             "shared_intermediate_size": 8192, **MAMBA},
            {"recurrent_layers": 2, "routed_experts": 0, "mlp_width": 8192},
        ),
        (
            {"model_type": "falcon_h1", "mamba_chunk_size": 128, **MAMBA},
            {"layers": 8, "recurrent_layers": 4, "mlp_layers": 4, "state_heads": 64, "state_value_dim": 64},
        ),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "head_dim": 256}}, {"head_dim": 256, "layers": 4}),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)  # fmt: skip
def test_each_family_by_its_fields(content: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    content = {**BASE, **content} if "text_config" not in content else content | {"text_config": BASE | content["text_config"]}
    spec = read(tmp_path, content).spec()
    assert {name: getattr(spec, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("quantization", "n_bytes"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1.0),
    ],
)
def test_quantized_weights_leave_the_kv_as_it_is(quantization: dict[str, Any], n_bytes: float, tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA | {"quantization_config": quantization}).spec()
    assert (spec.weight_dtype_bytes, spec.kv_dtype_bytes) == (n_bytes, 2)


def test_mxfp4_is_only_of_the_experts(tmp_path: Path) -> None:
    """gpt-oss-120b: 116.8e9 parameters, 60.8 GiB of published weights."""
    content = {
        "model_type": "gpt_oss", "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "num_attention_heads": 64, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "num_local_experts": 128, "sliding_window": 128, "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False,
    }  # fmt: skip
    model = read(tmp_path, content)
    spec = model.spec()
    assert spec.parameters == pytest.approx(116.8e9, rel=0.002)
    assert spec.parameters * spec.weight_dtype_bytes == pytest.approx(60.8 * 2**30, rel=0.005)
    assert (spec.sliding_window_layers, spec.sliding_window_tokens) == (18, 128)
    assert "18 attention layers with a window of 128 tokens" in model.note()


def test_windows_are_those_of_the_layers_that_have_them(tmp_path: Path) -> None:
    def windows(**fields: Any) -> tuple[int, int]:
        spec = read(tmp_path, LLAMA | fields).spec()
        return spec.sliding_window_layers, spec.sliding_window_tokens

    assert windows() == (0, 0)
    assert windows(model_type="mistral", sliding_window=4096) == (32, 4096), "all layers, as in Mistral 7B v0.1"
    assert windows(model_type="gemma3_text", sliding_window=512) == (27, 512), "all but every sixth"
    assert windows(model_type="gemma2", sliding_window=4096) == (16, 4096)
    assert windows(model_type="qwen2", sliding_window=4096, use_sliding_window=False) == (0, 0)
    assert windows(model_type="qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=28) == (4, 4096)
    assert windows(sliding_window=8192, max_position_embeddings=8192) == (0, 0), "never longer than the context"
    assert windows(sliding_window=64, layer_types=["sliding_attention"] * 3 + ["full_attention"] * 29) == (3, 64)


def test_settings_take_precedence(tmp_path: Path) -> None:
    unknown = LLAMA | {"quantization_config": {"quant_method": "quip"}}
    spec = read(tmp_path, unknown, weight_dtype_bytes=0.25, kv_dtype_bytes=1).spec()
    assert (spec.weight_dtype_bytes, spec.kv_dtype_bytes) == (0.25, 1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"model_type": "mamba"}, "model_type mamba is not known; known are for example llama, mistral"),
        ({}, "model_type is missing; known are for example llama"),
        ({"model_type": "llama", "hidden_size": 8}, "llama has no num_hidden_layers"),
        (LLAMA | {"torch_dtype": "int3"}, "the dtype int3 is not known"),
        (LLAMA | {"num_key_value_heads": 5}, "llama: kv_heads=5 must divide heads=32"),
        (LLAMA | {"num_kv_shared_layers": 4}, "layers that share their KV"),
        (
            DEEPSEEK | {"model_type": "deepseek_v32", "index_topk": 2048},
            "deepseek_v32 caches the keys of a sparse attention's index",
        ),
        (NEMOTRON_H | {"hybrid_override_pattern": "ME*"}, "hybrid_override_pattern has E; known are M, * and -"),
    ],
)
def test_what_is_not_known_is_named(content: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, content).spec()
    assert problem in str(error.value)
    assert str(error.value).endswith("describe the model in a YAML file, as conf/model/llama3_8b.yaml does")


@pytest.mark.parametrize(
    ("bits", "problem"),
    [
        (0, "the bits of quantization_config must be above 0"),
        (-4, "the bits of quantization_config must be above 0"),
        (1e9, "the bits of quantization_config must be"),
        ("four", "a field has a value that cannot be"),
        (10**400, "a field has a value that cannot be"),
        ([], "a field has a value that cannot be"),
    ],
)
def test_bits_that_cannot_be_are_refused(bits: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        read(tmp_path, LLAMA | {"quantization_config": {"bits": bits, "quant_method": "gptq"}}).spec()


WRONG = (None, True, 0, -1, 1.5, 10**18, 10**400, "", "x", [], [None], {}, {"bits": []}, {"quant_method": []})


@pytest.mark.parametrize(
    "content", [LLAMA, DEEPSEEK, QWEN3_NEXT, JAMBA, NEMOTRON_H, KIMI_LINEAR], ids=lambda one: one["model_type"]
)
def test_no_value_of_a_field_ends_in_anything_but_one_line(content: dict[str, Any], tmp_path: Path) -> None:
    said: list[str] = []
    for name in [*content, "quantization_config", "text_config", "layer_types", "sliding_window", "num_kv_shared_layers"]:
        for wrong in WRONG:
            try:
                read(tmp_path, content | {name: wrong}).note()
            except UsageError as error:
                said.append(str(error))
    assert len(said) > 3 * len(content) and not [line for line in said if "\n" in line or not line.startswith("model.path: ")]


TEXTS = [
    ("{", "is not JSON"),
    ("[]", "is not a config.json"),
    (None, "No such file"),
    ("[" * 100_000, "nested too deeply"),
    ('{"a":' * 100_000, "nested too deeply"),
    ('{"vocab_size": NaN}', "is not JSON: NaN is no number of JSON"),
    ('{"vocab_size": ' + "9" * 5000 + "}", "is not JSON"),
]


@pytest.mark.parametrize(("text", "problem"), TEXTS, ids=[problem for _, problem in TEXTS])
def test_a_file_that_cannot_be_read(text: str | None, problem: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=problem):
        HuggingFaceModel(path=str(tmp_path)).spec()


def test_a_run_records_the_model_and_says_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    read(folder, LLAMA)
    common = ["trace.sessions=4", "tiers.gpu.capacity=auto"]
    assert main(["replay", "model=hf", f"model.path={folder}", *common, f"output={tmp_path / 'file'}"]) == 0
    assert "32 attention layers with 8 KV heads x 128" in " ".join(capsys.readouterr().out.split())
    assert main(["replay", "model=llama3_8b", *common, f"output={tmp_path / 'named'}"]) == 0
    file, named = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("file", "named"))
    assert file["choices"]["model"] == "Meta-Llama-3-8B"
    assert file["config"]["model"]["layers"] == 32 and "path" not in file["config"]["model"]
    assert (file["tiers"], file["bounds"]) == (named["tiers"], named["bounds"])
    assert main(["report", str(tmp_path / "file"), str(tmp_path / "named"), f"output={tmp_path}/page.html"]) == 0
    assert main(["replay", "model=hf", *common]) == 2
    assert "model.path" in capsys.readouterr().err
