"""What a model is made of: the numbers of its published ``config.json``, and what they must be."""

from dataclasses import dataclass

from kvsim.numbers import Real, Whole, check_settings

GROUPED = ("kv_heads", "head_dim")
LATENT = ("kv_latent_dim", "nope_dim", "rope_dim", "value_dim")
EXPERTS = ("routed_experts", "experts_per_token", "expert_width")
RECURRENT = ("state_heads", "state_key_dim", "state_value_dim", "recurrent_in_width")
RECURRENT_OPTIONS = ("recurrent_inner_parameters", "conv_channels", "conv_width")
WINDOW = ("sliding_window_layers", "sliding_window_tokens")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only language model: its layers, their widths, and how many bytes an element has.

    grouped-query attention   set ``kv_heads`` and ``head_dim``           caches a key and a value per KV head
    latent attention (MLA)    set ``kv_latent_dim`` and the like          caches one latent and one rope key
    dense MLP                 leave ``routed_experts`` at 0               every layer with an MLP has one of ``mlp_width``
    mixture of experts        set ``routed_experts`` and the like         in all MLP layers except ``dense_layers``
    hybrid                    set ``recurrent_layers`` and the like       these layers keep a state of fixed size instead of KV
    sliding window            set ``sliding_window_tokens`` and layers    these layers attend to the last tokens only
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
    def _layers_with_mlp(self) -> int:
        return self.mlp_layers or self.layers

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self._layers_with_mlp - self.dense_layers if self.routed_experts else 0

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
