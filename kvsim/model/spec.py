"""The costs of a model: bytes of KV per token, bytes of weights per step, FLOPs per token."""

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from kvsim.model.prefill import PrefillFlops, attention_pairs
from kvsim.numbers import Real, Whole, check_settings

GROUPED = ("kv_heads", "head_dim")
LATENT = ("kv_latent_dim", "nope_dim", "rope_dim", "value_dim")
EXPERTS = ("routed_experts", "experts_per_token", "expert_width")
RECURRENT = ("state_heads", "state_key_dim", "state_value_dim", "recurrent_in_width")
RECURRENT_OPTIONS = ("recurrent_inner_parameters", "conv_channels", "conv_width")
WINDOW = ("sliding_window_layers", "sliding_window_tokens")


class ModelSource:
    """What the group ``model`` chooses: a model, or a file that describes one."""

    @property
    def name(self) -> str:
        """The model's name if it comes from a file."""
        return ""

    def spec(self) -> "ModelSpec":
        """Return the model."""
        raise NotImplementedError

    def note(self) -> str:
        """Say what was read from a file; empty without one."""
        return ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSource):
    """A decoder-only language model, described by the numbers of its published ``config.json``.

    grouped-query attention   set ``kv_heads`` and ``head_dim``           caches a key and a value per KV head
    latent attention (MLA)    set ``kv_latent_dim`` and the like          caches one latent and one rope key
    dense MLP                 leave ``routed_experts`` at 0               every layer with an MLP has one of ``mlp_width``
    mixture of experts        set ``routed_experts`` and the like         in all MLP layers except ``dense_layers``
    hybrid                    set ``recurrent_layers`` and the like       these layers keep a state of fixed size instead of KV
    sliding window            set ``sliding_window_tokens`` and layers    these layers attend to the last tokens only

    Only weight matrices are counted (norms and biases are below 0.01%); a multiply-accumulate is 2 FLOPs. A multi-token
    prediction module (DeepSeek-V3 publishes one) is not counted as part of the model. Derived values are computed once and
    then read as plain attributes.
    """

    layers: int
    """Blocks with attention or a recurrence. ``mlp_layers`` is the number of MLPs."""
    hidden_size: int
    vocabulary: int
    heads: int
    """Query heads per layer."""
    tied_embeddings: bool = False
    """Whether the lm_head shares the weights of the input embedding table."""

    kv_heads: int = 0
    head_dim: int = 0

    attention_gate: bool = False
    """Whether the attention output is multiplied by a gate as wide as all query heads."""

    kv_latent_dim: int = 0
    query_latent_dim: int = 0
    """0: queries are projected directly from the hidden state, without a latent."""
    nope_dim: int = 0
    """Elements of a query or key head without rotary embedding."""
    rope_dim: int = 0
    """Elements of a query or key head with rotary embedding; all heads share this part of the key."""
    value_dim: int = 0

    recurrent_layers: int = 0
    """Layers that keep a recurrent state instead of keys and values; all other layers have attention."""
    state_heads: int = 0
    state_key_dim: int = 0
    state_value_dim: int = 0
    """Each head of a layer keeps a matrix of key by value elements. Mamba: key is the SSM state size, value the head size."""
    recurrent_in_width: int = 0
    """Total columns of a recurrent layer's input projections."""
    recurrent_inner_parameters: int = 0
    """Weights of a recurrent layer between its input projections and its output projection (Mamba's x_proj and dt_proj)."""
    conv_channels: int = 0
    conv_width: int = 0
    """Width of the short causal convolution before the recurrence; its last ``conv_width - 1`` inputs are part of the state."""
    state_flops_per_element: float = 0.0
    """FLOPs of the recurrence per state element and token."""
    state_dtype_bytes: int = 4
    kernel_chunk_tokens: int = 1
    """The recurrence kernel can save a state only at multiples of this many tokens."""

    sliding_window_layers: int = 0
    """Attention layers in which a token attends to the last ``sliding_window_tokens`` tokens only, itself included."""
    sliding_window_tokens: int = 0

    mlp_layers: int = 0
    """0: every layer has an MLP."""
    mlp_matrices: int = 3
    """3: gate, up and down; 2: up and down."""
    mlp_width: int = 0
    dense_layers: int = 0
    """Layers of a mixture-of-experts model that have a dense MLP instead of experts."""
    routed_experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_width: int = 0

    kv_dtype_bytes: int = 2
    weight_dtype_bytes: float = 2.0

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_recurrence()
        self._check_attention()
        self._check_window()
        self._check_mlp()

    def spec(self) -> "ModelSpec":
        """Return the model itself."""
        return self

    # Cached bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token, all layers."""
        per_layer = self.kv_latent_dim + self.rope_dim if self.is_latent else 2 * self.kv_heads * self.head_dim
        return self.attention_layers * per_layer * self.kv_dtype_bytes

    def kv_copies(self, gpus: int) -> int:
        """Return on how many of ``gpus`` GPUs that share a layer's heads each part of the KV is.

        1 if there are at least as many KV heads. A latent (MLA) is of all heads, so each GPU has all of it, as in vLLM and
        SGLang; with fewer KV heads than GPUs, vLLM gives each GPU a copy of one (``max(1, total_num_kv_heads //
        tensor_parallel_size)`` of ``get_num_kv_heads`` in its ``config/model.py``).
        """
        parts = 1 if self.is_latent else max(1, self.kv_heads)
        return -(-gpus // parts)

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of a page of ``page_tokens`` tokens, all layers."""
        return page_tokens * self.kv_bytes_per_token

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence, all layers; 0 without recurrent layers."""
        convolution = self.conv_channels * max(0, self.conv_width - 1) * self.kv_dtype_bytes
        return self.recurrent_layers * (self._state_elements * self.state_dtype_bytes + convolution)

    @cached_property
    def state_elements(self) -> int:
        """Elements of the recurrent state of one sequence, all layers, without the inputs of convolutions."""
        return self.recurrent_layers * self._state_elements

    def checkpoint_grid_tokens(self, page_tokens: int) -> int:
        """The interval in tokens at which a state can be saved at the end of a cached prefix."""
        return lcm(page_tokens, self.kernel_chunk_tokens)

    # Weights

    @cached_property
    def parameters(self) -> int:
        """All weights."""
        idle = self.moe_layers * (self.routed_experts - self.experts_per_token) * self._expert_parameters
        return self.active_parameters + idle + self._table_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Weights that a sampled token is multiplied with: includes its experts and the lm_head, not the input embeddings."""
        experts = self.moe_layers * self.experts_per_token * self._expert_parameters
        return self._always_read_parameters + experts

    def weight_bytes(self, tokens: int, imbalance: float = 1.0) -> float:
        """Bytes of weights that a step over ``tokens`` tokens reads from memory: each matrix once, lm_head included.

        If each token picks k of E routed experts, a layer reads ``E * (1 - (1 - k/E) ** tokens)`` experts: the expected
        number of distinct experts when all are equally likely and tokens choose independently. With ``imbalance``, each is so
        many times as likely: those of a group of GPUs that gets so much more than its part.
        """
        if not self.routed_experts:
            return self._always_read_bytes
        untouched = self._untouched_by_one_token
        if imbalance != 1.0:
            untouched = max(0.0, 1.0 - imbalance * self.experts_per_token / self.routed_experts)
        return self._always_read_bytes + self._all_experts_bytes * (1.0 - untouched**tokens)

    @cached_property
    def shared_expert_bytes(self) -> float:
        """Bytes of the experts that every token uses, all layers."""
        return self.moe_layers * self.shared_experts * self._expert_parameters * self.weight_dtype_bytes

    @cached_property
    def mixer_bytes(self) -> float:
        """Bytes of the weights of attention and recurrences, all layers."""
        return self._mixer_parameters * self.weight_dtype_bytes

    @cached_property
    def table_bytes(self) -> float:
        """Bytes of the input embeddings, unless they are those of the lm_head."""
        return self._table_parameters * self.weight_dtype_bytes

    @cached_property
    def allreduces(self) -> int:
        """Sums over the GPUs in a step with tensor parallelism: one of all activations after each mixer (attention or recurrence)
        and one after each MLP (Megatron-LM, arXiv:1909.08053, section 3)."""
        return self.layers + self._layers_with_mlp

    # FLOPs

    @cached_property
    def linear_flops_per_token(self) -> float:
        """FLOPs of the weight matrices and recurrences per token of a step, without the lm_head.

        Engines apply the lm_head only to sampled positions: one per request and step (vLLM's ``logits_indices``,
        SGLang's ``LogitsProcessor``). ``sampling_flops_per_token`` counts it.
        """
        return 2.0 * (self.active_parameters - self._head_parameters) + self.recurrence_flops_per_token

    @cached_property
    def routed_flops_per_token(self) -> float:
        """FLOPs of the routed experts per token of a step."""
        return 2.0 * self.moe_layers * self.experts_per_token * self._expert_parameters

    @cached_property
    def recurrence_flops_per_token(self) -> float:
        """FLOPs of the recurrences alone, without the weight matrices around them."""
        return self.state_elements * self.state_flops_per_element

    @cached_property
    def sampling_flops_per_token(self) -> float:
        """FLOPs of the lm_head per sampled token."""
        return 2.0 * self._head_parameters

    @cached_property
    def attention_flops_per_pair(self) -> float:
        """FLOPs of QK^T and PV per pair of query and key token in a prefill, all heads and layers.

        Latent attention prefills in the naive form, which expands latents to full keys and values: at DeepSeek-V3's sizes the
        absorbed form would cost 3.4 times as much. Engines decode in the absorbed form because it reads less memory (vLLM's
        ``attention/backends/mla/common.py`` explains both).
        """
        per_head = self.nope_dim + self.rope_dim + self.value_dim if self.is_latent else 2 * self.head_dim
        return 2.0 * self.attention_layers * self.heads * per_head

    @cached_property
    def decode_attention_flops_per_pair(self) -> float:
        """FLOPs of QK^T and PV per pair in a decode step. Latent attention uses the absorbed form: all heads read one latent.

        In that form the key is the latent and the rope key, and the value is the latent (DeepSeek-V2, arXiv:2405.04434,
        section 2.1).
        """
        if not self.is_latent:
            return self.attention_flops_per_pair
        return 2.0 * self.attention_layers * self.heads * (2 * self.kv_latent_dim + self.rope_dim)

    @cached_property
    def prefix_flops_per_token(self) -> float:
        """FLOPs to expand one cached latent to keys and values before a prefill that follows it; 0 without latents."""
        return 2.0 * self.attention_layers * self._expansion_parameters

    def prefill_flops(self, tokens: int, start: int) -> float:
        """FLOPs to prefill ``tokens`` prompt tokens after ``start`` cached tokens, without the lm_head."""
        return self.prefills().of(float(tokens), float(start))

    def prefills(self) -> PrefillFlops:
        """Return what ``prefill_flops`` is computed with, for whoever asks often."""
        return PrefillFlops(
            self.linear_flops_per_token,
            self.attention_flops_per_pair,
            self.prefix_flops_per_token,
            self.window_share,
            float(self.sliding_window_tokens),
        )

    # Windows

    @cached_property
    def window_share(self) -> float:
        """The share of attention layers that have a sliding window."""
        return self.sliding_window_layers / self.attention_layers

    def attention_pairs(self, tokens: int, start: int) -> float:
        """Pairs of query and key when ``tokens`` tokens follow ``start`` cached ones, as a mean over the attention layers."""
        return attention_pairs(float(tokens), float(start), self.window_share, float(self.sliding_window_tokens))

    def read_tokens(self, context_tokens: float, queries: int = 1) -> float:
        """Cached tokens that attention reads, as a mean over the attention layers, for queries with that context in all.

        With a window, each query counts with the mean context: if some are shorter than the window and others longer, this is
        an upper bound.
        """
        if not self.sliding_window_layers:
            return context_tokens
        return context_tokens - self.window_share * max(0, context_tokens - queries * self.sliding_window_tokens)

    # Parts

    @property
    def is_latent(self) -> bool:
        """Whether attention caches latents (MLA) instead of keys and values."""
        return self.kv_latent_dim > 0

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has recurrent layers: a cached prefix is then usable only where a recurrent state was saved."""
        return self.recurrent_layers > 0

    @property
    def attention_layers(self) -> int:
        """Layers whose keys and values (or latents) are cached."""
        return self.layers - self.recurrent_layers

    @property
    def _state_elements(self) -> int:
        return self.state_heads * self.state_key_dim * self.state_value_dim

    @property
    def _layers_with_mlp(self) -> int:
        return self.mlp_layers or self.layers

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self._layers_with_mlp - self.dense_layers if self.routed_experts else 0

    @property
    def _head_parameters(self) -> int:
        return self.vocabulary * self.hidden_size

    @property
    def _table_parameters(self) -> int:
        """Weights of the input embeddings, unless they are those of the lm_head."""
        return 0 if self.tied_embeddings else self._head_parameters

    @property
    def _expert_parameters(self) -> int:
        """Weights of one expert: gate, up and down projections."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def _expansion_parameters(self) -> int:
        """Weights of one layer's matrix that expands a latent to the keys and values of all heads."""
        return self.kv_latent_dim * self.heads * (self.nope_dim + self.value_dim)

    @property
    def _attention_parameters(self) -> int:
        """Weights of one layer's attention projections."""
        if not self.is_latent:
            gate = self.hidden_size * self.head_dim * self.heads if self.attention_gate else 0
            return 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads) + gate
        query_width = self.heads * (self.nope_dim + self.rope_dim)
        if self.query_latent_dim:
            query = self.query_latent_dim * (self.hidden_size + query_width)
        else:
            query = self.hidden_size * query_width
        key_value = self.hidden_size * (self.kv_latent_dim + self.rope_dim) + self._expansion_parameters
        return query + key_value + self.heads * self.value_dim * self.hidden_size

    @property
    def _recurrent_parameters(self) -> int:
        """Weights of one recurrent layer: projections and convolution."""
        output = self.state_heads * self.state_value_dim * self.hidden_size
        convolution = self.conv_channels * self.conv_width
        return self.hidden_size * self.recurrent_in_width + self.recurrent_inner_parameters + convolution + output

    @property
    def _mixer_parameters(self) -> int:
        return self.attention_layers * self._attention_parameters + self.recurrent_layers * self._recurrent_parameters

    @cached_property
    def _always_read_parameters(self) -> int:
        """Weights that every step reads: all except the input embeddings and the routed experts."""
        dense = (self._layers_with_mlp - self.moe_layers) * self.mlp_matrices * self.hidden_size * self.mlp_width
        router = self.hidden_size * self.routed_experts
        sparse = self.moe_layers * (router + self.shared_experts * self._expert_parameters)
        return self._mixer_parameters + dense + sparse + self._head_parameters

    @cached_property
    def _always_read_bytes(self) -> float:
        return self._always_read_parameters * self.weight_dtype_bytes

    @cached_property
    def _all_experts_bytes(self) -> float:
        return self.moe_layers * self.routed_experts * self._expert_parameters * self.weight_dtype_bytes

    @cached_property
    def _untouched_by_one_token(self) -> float:
        return 1.0 - self.experts_per_token / self.routed_experts

    # Checks

    def _check_sizes(self) -> None:
        check_settings(self, Whole(1), "layers", "hidden_size", "vocabulary", "heads", "state_dtype_bytes", "kernel_chunk_tokens")
        check_settings(self, Whole(1), "kv_dtype_bytes")
        check_settings(self, Real(above=0), "weight_dtype_bytes")
        check_settings(self, Real(least=0), "state_flops_per_element")
        optional = ("query_latent_dim", "mlp_layers", "mlp_width", "dense_layers", "shared_experts", "recurrent_layers", *WINDOW)
        check_settings(self, Whole(), *GROUPED, *LATENT, *EXPERTS, *RECURRENT, *RECURRENT_OPTIONS, *optional)
        if self.mlp_matrices not in (2, 3):
            raise ValueError(f"mlp_matrices must be 3 (gate, up, down) or 2 (up, down), not {self.mlp_matrices}")

    def _check_recurrence(self) -> None:
        if not self.recurrent_layers:
            for name in (*RECURRENT, *RECURRENT_OPTIONS, "state_flops_per_element"):
                if getattr(self, name):
                    raise ValueError(f"{name} is {getattr(self, name)} but has no effect without recurrent_layers: set both")
        elif self.recurrent_layers >= self.layers:
            raise ValueError(
                f"recurrent_layers must be below layers={self.layers}, not {self.recurrent_layers}: some must have attention"
            )
        else:
            for name in (*RECURRENT, "state_flops_per_element"):
                if not getattr(self, name) > 0:
                    raise ValueError(f"{name} must be above 0, not {getattr(self, name)}: recurrent_layers requires it")
            if (self.conv_channels > 0) != (self.conv_width > 0):
                raise ValueError(f"conv_width={self.conv_width} with conv_channels={self.conv_channels}: set both or neither")

    def _check_attention(self) -> None:
        expected, other = (LATENT, GROUPED) if self.is_latent else (GROUPED, LATENT)
        kind = "latent" if self.is_latent else "grouped-query"
        for name in expected:
            if not getattr(self, name):
                raise ValueError(f"{name} must be above 0, not 0: {kind} attention requires {', '.join(expected)}")
        for name in (*other, "attention_gate" if self.is_latent else "query_latent_dim"):
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)} but has no effect with {kind} attention: leave it out")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")

    def _check_window(self) -> None:
        layers, tokens = self.sliding_window_layers, self.sliding_window_tokens
        if (layers > 0) != (tokens > 0):
            raise ValueError(f"sliding_window_tokens={tokens} with sliding_window_layers={layers}: set both or neither")
        if layers and tokens < 2:
            raise ValueError(f"sliding_window_tokens must be at least 2, not {tokens}: the window includes the token itself")
        if layers > self.attention_layers:
            raise ValueError(f"sliding_window_layers must be at most {self.attention_layers}, the attention layers, not {layers}")

    def _check_mlp(self) -> None:
        if not self.routed_experts:
            for name in (*EXPERTS, "dense_layers", "shared_experts"):
                if getattr(self, name):
                    raise ValueError(f"{name} is {getattr(self, name)} but has no effect without routed_experts: set both")
        elif not 1 <= self.experts_per_token <= self.routed_experts:
            raise ValueError(f"experts_per_token must be 1 to {self.routed_experts}, not {self.experts_per_token}")
        elif not self.expert_width:
            raise ValueError("expert_width must be above 0, not 0: routed_experts requires it")
        elif self.dense_layers > self._layers_with_mlp:
            raise ValueError(f"dense_layers must be at most layers={self._layers_with_mlp}, not {self.dense_layers}")
        has_dense = self.moe_layers < self._layers_with_mlp
        if has_dense != (self.mlp_width > 0):
            problem = "above 0 in a model with dense layers" if has_dense else "0 in a model without dense layers"
            raise ValueError(f"mlp_width must be {problem}, not {self.mlp_width}")
