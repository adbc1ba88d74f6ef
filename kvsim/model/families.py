"""What the ``config.json`` of each family of models says, as settings of ``ModelSpec``.

Names of fields are those of the configuration classes in Hugging Face's transformers (``models/*/configuration_*.py``); those of
Kimi Linear and Nemotron-H are from the models' own repositories. A family is a function from the fields to the settings.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvsim.errors import UsageError
from kvsim.numbers import shown

Settings = dict[str, Any]
LONGEST_KIND = 100
"""Characters of a name of a model type or dtype in a message."""


class Fields:
    """The fields of a ``config.json``. One that is missing where it is needed is an error that names it."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def need(self, *names: str) -> Any:
        """Return the first of these fields that is there; null counts as missing. Raises UsageError."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        raise self.error(f"{self.kind} has no {' or '.join(names)}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    @property
    def kind(self) -> str:
        """The model type; of one that is longer than any, the beginning."""
        return str(self.values.get("model_type", "a model without model_type"))[:LONGEST_KIND]

    def error(self, problem: str) -> UsageError:
        """The error that a model cannot be read, with what to do."""
        return UsageError(
            f"model.path: {self.path}: {problem}: describe the model in a YAML file, as conf/model/llama3_8b.yaml does"
        )


def dense(fields: Fields) -> Settings:
    """Grouped-query attention and a gated MLP in every layer: Llama, Mistral, Qwen, Gemma, Phi-3."""
    return _sizes(fields) | _grouped(fields) | {"mlp_width": fields.need("intermediate_size")}


def two_matrices(fields: Fields) -> Settings:
    """As ``dense``, with MLPs that have no gate: Phi-2, StarCoder 2."""
    return dense(fields) | {"mlp_matrices": 2}


def mixtral(fields: Fields) -> Settings:
    """Experts as wide as ``intermediate_size`` in every layer: Mixtral, gpt-oss, OLMoE, Phi-MoE, Granite MoE, MiniMax-M2."""
    experts = {
        "routed_experts": fields.need("num_local_experts", "num_experts"),
        "experts_per_token": fields.need("num_experts_per_tok", "experts_per_token"),
        "expert_width": fields.need("intermediate_size"),
    }
    return _sizes(fields) | _grouped(fields) | experts


def qwen_moe(fields: Fields) -> Settings:
    """Experts of their own width, dense layers by ``mlp_only_layers`` and ``decoder_sparse_step``: Qwen2-MoE, Qwen3-MoE."""
    layers, step = fields.need("num_hidden_layers"), fields.get("decoder_sparse_step", 1)
    only = set(fields.get("mlp_only_layers", []))
    are_dense = sum(layer in only or (layer + 1) % step != 0 for layer in range(layers))
    width, shared = fields.need("moe_intermediate_size"), fields.get("shared_expert_intermediate_size", 0)
    return {
        **_sizes(fields),
        **_grouped(fields),
        "routed_experts": fields.need("num_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "expert_width": width,
        "shared_experts": _shared(fields, shared, width),
        **_dense_layers(fields, are_dense),
    }


def deepseek(fields: Fields) -> Settings:
    """The first layers dense, experts after them; latent attention if there is a ``kv_lora_rank``: DeepSeek, Kimi K2, GLM-4."""
    if fields.get("index_topk"):
        raise fields.error(f"{fields.kind} caches the keys of a sparse attention's index, too, which ModelSpec does not know")
    if fields.get("moe_layer_freq", 1) != 1:
        raise fields.error(f"moe_layer_freq={shown(fields.get('moe_layer_freq'))} is not known")
    attention = _latent(fields) if fields.get("kv_lora_rank") else _grouped(fields)
    if not fields.get("n_routed_experts"):
        return _sizes(fields) | attention | {"mlp_width": fields.need("intermediate_size")}
    experts = {
        "routed_experts": fields.need("n_routed_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "shared_experts": fields.get("n_shared_experts", 0),
        "expert_width": fields.need("moe_intermediate_size"),
    }
    return _sizes(fields) | attention | experts | _dense_layers(fields, fields.get("first_k_dense_replace", 0))


def qwen3_next(fields: Fields) -> Settings:
    """Gated DeltaNet layers, and gated attention in every ``full_attention_interval``-th: Qwen3-Next."""
    layers = fields.need("num_hidden_layers")
    kinds = fields.get("layer_types")
    linear = kinds.count("linear_attention") if kinds else layers - layers // fields.need("full_attention_interval")
    heads, keys = fields.need("linear_num_value_heads"), fields.need("linear_num_key_heads")
    key_width = keys * fields.need("linear_key_head_dim")
    value_width = heads * fields.need("linear_value_head_dim")
    return qwen_moe(fields) | {
        "attention_gate": True,
        "recurrent_layers": linear,
        "state_heads": heads,
        "state_key_dim": fields.need("linear_key_head_dim"),
        "state_value_dim": fields.need("linear_value_head_dim"),
        "recurrent_in_width": 2 * key_width + 2 * value_width + 2 * heads,
        "conv_channels": 2 * key_width + value_width,
        "conv_width": fields.need("linear_conv_kernel_dim"),
        "state_flops_per_element": 7,
        "state_dtype_bytes": dtype_bytes(fields, fields.get("mamba_ssm_dtype", "float32")),
        "kernel_chunk_tokens": 64,
    }


def kimi_linear(fields: Fields) -> Settings:
    """Kimi Delta Attention layers, and latent attention in the others: Kimi Linear."""
    linear = Fields(fields.need("linear_attn_config"), fields.path)
    heads, width = linear.need("num_heads"), linear.need("head_dim")
    experts = {
        "routed_experts": fields.need("num_experts"),
        "experts_per_token": fields.need("num_experts_per_token"),
        "shared_experts": fields.get("num_shared_experts", 0),
        "expert_width": fields.need("moe_intermediate_size"),
        **_dense_layers(fields, fields.get("first_k_dense_replace", 0)),
    }
    recurrence = {
        "recurrent_layers": len(linear.need("kda_layers")),
        "state_heads": heads,
        "state_key_dim": width,
        "state_value_dim": width,
        "recurrent_in_width": 3 * heads * width + 2 * width + heads,
        "recurrent_inner_parameters": 2 * width * heads * width,
        "conv_channels": 3 * heads * width,
        "conv_width": linear.need("short_conv_kernel_size"),
        "state_flops_per_element": 7,
        "kernel_chunk_tokens": 64,
    }
    return _sizes(fields) | _latent(fields) | experts | recurrence


def jamba(fields: Fields) -> Settings:
    """Mamba layers, attention in every ``attn_layer_period``-th, experts in every ``expert_layer_period``-th: Jamba."""
    layers, hidden = fields.need("num_hidden_layers"), fields.need("hidden_size")
    attention = _every(layers, fields.need("attn_layer_period"), fields.need("attn_layer_offset"))
    sparse = _every(layers, fields.need("expert_layer_period"), fields.need("expert_layer_offset"))
    inner, state, rank = fields.need("mamba_expand") * hidden, fields.need("mamba_d_state"), fields.get("mamba_dt_rank", "auto")
    rank = -(-hidden // 16) if rank == "auto" else rank
    recurrence = {
        "recurrent_layers": layers - attention,
        "state_heads": inner,
        "state_key_dim": state,
        "state_value_dim": 1,
        "recurrent_in_width": 2 * inner,
        "recurrent_inner_parameters": inner * (rank + 2 * state) + rank * inner,
        "conv_channels": inner,
        "conv_width": fields.need("mamba_d_conv"),
        "state_flops_per_element": 9,
        "kernel_chunk_tokens": 1,
    }
    if fields.need("num_experts") == 1:
        return dense(fields) | recurrence
    return mixtral(fields) | recurrence | _dense_layers(fields, layers - sparse)


def nemotron_h(fields: Fields) -> Settings:
    """Mamba-2 layers, attention and MLPs, each a layer of its own in ``hybrid_override_pattern``: Nemotron-H."""
    pattern = fields.need("hybrid_override_pattern")
    if unknown := sorted(set(pattern) - set("M*-")):
        raise fields.error(f"hybrid_override_pattern has {', '.join(unknown)[:LONGEST_KIND]}; known are M, * and -")
    names = {"heads": "mamba_num_heads", "head": "mamba_head_dim", "groups": "n_groups", "state": "ssm_state_size"}
    return {
        **_sizes(fields),
        **_grouped(fields),
        **_mamba_2(fields, pattern.count("M"), names, "conv_kernel", "chunk_size"),
        "layers": pattern.count("M") + pattern.count("*"),
        "mlp_layers": pattern.count("-"),
        "mlp_matrices": 2,
        "mlp_width": fields.need("intermediate_size"),
    }


MAMBA_NAMES = {"heads": "mamba_n_heads", "head": "mamba_d_head", "groups": "mamba_n_groups", "state": "mamba_d_state"}


def bamba(fields: Fields) -> Settings:
    """Mamba-2 layers, attention in ``attn_layer_indices``, an MLP in each: Bamba."""
    recurrent = fields.need("num_hidden_layers") - len(fields.need("attn_layer_indices"))
    return dense(fields) | _mamba_2(fields, recurrent, MAMBA_NAMES, "mamba_d_conv", "mamba_chunk_size")


def granite_hybrid(fields: Fields) -> Settings:
    """Mamba-2 and attention by ``layer_types``; experts and a shared MLP, or the latter only: Granite 4."""
    recurrent, shared = fields.need("layer_types").count("mamba"), fields.need("shared_intermediate_size")
    if fields.get("num_local_experts", 0):
        mlp = mixtral(fields) | {"shared_experts": _shared(fields, shared, fields.need("intermediate_size"))}
    else:
        mlp = _sizes(fields) | _grouped(fields) | {"mlp_width": shared}
    if not recurrent:
        return mlp
    return mlp | _mamba_2(fields, recurrent, MAMBA_NAMES, "mamba_d_conv", "mamba_chunk_size")


def falcon_h1(fields: Fields) -> Settings:
    """Mamba-2 and attention side by side in each layer, which counts as two here, and an MLP: Falcon-H1."""
    blocks = fields.need("num_hidden_layers")
    recurrence = _mamba_2(fields, blocks, MAMBA_NAMES, "mamba_d_conv", "mamba_chunk_size")
    return dense(fields) | recurrence | {"layers": 2 * blocks, "mlp_layers": blocks}


FAMILIES: dict[str, Callable[[Fields], Settings]] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2",
         "smollm3", "glm4"), dense,
    ),
    **dict.fromkeys(("phi", "starcoder2"), two_matrices),
    **dict.fromkeys(("mixtral", "gpt_oss", "olmoe", "phimoe", "granitemoe", "minimax_m2"), mixtral),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), qwen_moe),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite"), deepseek),
    "qwen3_next": qwen3_next,
    "kimi_linear": kimi_linear,
    "jamba": jamba,
    "nemotron_h": nemotron_h,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "falcon_h1": falcon_h1,
}  # fmt: skip
"""By ``model_type``."""
TIED = ("gemma", "gemma2", "gemma3_text", "starcoder2", "granitemoehybrid")
"""Models that share embeddings and lm_head unless the file says otherwise."""


def _sizes(fields: Fields) -> Settings:
    return {
        "layers": fields.need("num_hidden_layers"),
        "hidden_size": fields.need("hidden_size"),
        "vocabulary": fields.need("vocab_size"),
        "heads": fields.need("num_attention_heads"),
        "tied_embeddings": fields.get("tie_word_embeddings", fields.kind in TIED),
    }


def _grouped(fields: Fields) -> Settings:
    heads = fields.need("num_attention_heads")
    head_dim = fields.get("head_dim", fields.get("attention_head_dim")) or fields.need("hidden_size") // heads
    return {"kv_heads": fields.get("num_key_value_heads", heads), "head_dim": head_dim}


def _latent(fields: Fields) -> Settings:
    return {
        "kv_latent_dim": fields.need("kv_lora_rank"),
        "query_latent_dim": fields.get("q_lora_rank", 0),
        "nope_dim": fields.need("qk_nope_head_dim"),
        "rope_dim": fields.need("qk_rope_head_dim"),
        "value_dim": fields.need("v_head_dim"),
    }


def _mamba_2(fields: Fields, layers: int, names: Mapping[str, str], convolution: str, chunk: str) -> Settings:
    """Mamba-2 layers; ``names`` are those of the fields for heads, elements per head, groups and state."""
    heads, head, groups, state = (fields.need(names[what]) for what in ("heads", "head", "groups", "state"))
    head = head if isinstance(head, int) else fields.need("mamba_expand") * fields.need("hidden_size") // heads
    return {
        "recurrent_layers": layers,
        "state_heads": heads,
        "state_key_dim": state,
        "state_value_dim": head,
        "recurrent_in_width": 2 * heads * head + 2 * groups * state + heads,
        "conv_channels": heads * head + 2 * groups * state,
        "conv_width": fields.need(convolution),
        "state_flops_per_element": 5,
        "kernel_chunk_tokens": fields.get(chunk, 256),
    }


def _dense_layers(fields: Fields, layers: int) -> Settings:
    """Layers with a dense MLP in a mixture of experts."""
    return {"dense_layers": layers, "mlp_width": fields.need("intermediate_size") if layers else 0}


def _shared(fields: Fields, shared: int, width: int) -> int:
    """How many experts a shared MLP of this width is worth."""
    if shared % width:
        raise fields.error(
            f"a shared expert of width {shared}, which is no multiple of {width}, the width of the others, is not known"
        )
    return int(shared // width)


def _every(layers: int, period: int, offset: int) -> int:
    """How many layers are those of a period."""
    return sum(layer % period == offset for layer in range(layers))


def dtype_bytes(fields: Fields, name: Any) -> int:
    """Return the bytes of an element of a dtype. Raises UsageError for an unknown one."""
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
    short = str(name).removeprefix("torch.")
    if short not in sizes:
        raise fields.error(f"the dtype {short[:LONGEST_KIND]} is not known")
    return sizes[short]
