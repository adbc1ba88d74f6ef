"""The costs of a model: bytes of KV per token, bytes of weights per step, FLOPs per token."""

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from kvsim.model.prefill import PrefillFlops, attention_pairs
from kvsim.model.shape import ModelShape


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
class ModelSpec(ModelShape, ModelSource):
    """What a model of this shape costs.

    Only weight matrices are counted (norms and biases are below 0.01%); a multiply-accumulate is 2 FLOPs. A multi-token
    prediction module (DeepSeek-V3 publishes one) is not counted as part of the model. Derived values are computed once and
    then read as plain attributes.
    """

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

    def shared_kv_copies(self, gpus: int, stages: int) -> int:
        """Return how many copies of KV engines have below their GPUs that keep once what all of them have; see ``kv_copies``.

        ``gpus`` GPUs share each layer in each of ``stages`` stages. Only latents are kept once, and only where all layers have
        them and one stage has all layers: so do vLLM (``replicated_layout`` in ``offloading/config.py``, 0.27.0 to 0.33.0) and
        LMCache (``save_only_first_rank`` in ``v1/cache_engine.py``).
        """
        are_once = self.is_latent and not self.is_hybrid and stages == 1
        return 1 if are_once else self.kv_copies(gpus)

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
    def _state_elements(self) -> int:
        return self.state_heads * self.state_key_dim * self.state_value_dim

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
