"""Performs the work of a step on a GPU: all products, attention and recurrences of a model, with random weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import rms_norm

from kvsim.kernels.gated_silu import gate_silu
from kvsim.kernels.paged_attention import ContextParts, ContextRoom, cut_contexts
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.model.attention import Attention, GroupedAttention
from kvsim.substrate.hardware.model.buffers import Buffers, rounded
from kvsim.substrate.hardware.model.decode_graph import DecodeGraph, graph_sizes, recorded
from kvsim.substrate.hardware.model.latent_attention import LatentAttention
from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots, Layer
from kvsim.substrate.hardware.model.recurrence import Recurrence, Sequences, check_states, decode_rows, uploaded

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Element types by bytes per element."""
PADDING = 128
"""Rows of a step with prefill are padded to a multiple of this number, from 16,384 rows on to a multiple of twice as many, and
so on. Products and attention work in tiles of 64 or 128 rows: on an H200 a step of 448 rows takes 20% longer than one of 512.
Besides, the library takes milliseconds to choose a kernel for a product of a new size."""
MOST_HEAD_WIDTH = 256
"""Of flash attention (Dao: FlashAttention-2, arXiv:2307.08691). It reads 16 bytes at a time."""
SPARE_BYTES = 2 << 30
"""GPU memory left for the tensors of a step."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The assignment of tokens to experts."""

    tokens: torch.Tensor
    """Token of each (token, expert) pair, sorted by expert."""
    ends: torch.Tensor
    """End of each expert's pairs, int32."""


class Transformer:
    """Enqueues the work of a serving engine's steps on the current stream, and never waits for it.

    ``kv`` is the GPU's pool ``[attention layer, page, fragment bytes]``, uint8. A fragment has the keys of a page's tokens, then
    their values, each ``[token, kv head, head dim]``; with latent attention, ``[token, latent and rope key]``. Pages may
    have any content: keys and values are masked as ``kernels/paged_attention.py`` describes, so any bits are numbers below 2.
    Zeros would make steps faster (``gpu_pool.random_bytes``). Steps never write to the pool; rotary embedding is left out, as in
    ``ModelSpec``.

    A hybrid model also has ``states``, as ``Recurrence`` describes: a slot per request, which steps read and write, and one more.
    Its attention layers are spread evenly among the recurrent ones, which come first.

    Each layer has its own random weights, drawn with ``seed``, so a step reads as many bytes as ModelSpec says. In a mixture of
    experts, every token has its own experts, drawn once with equal probability; the router's product is computed but not used.
    Elements are bf16 if ``kv_dtype_bytes`` and ``weight_dtype_bytes`` are 2, and float32 if they are 4. All steps must use one
    stream, because they share buffers. Raises ValueError for a model that is not supported or does not fit.
    """

    def __init__(
        self,
        model: ModelSpec,
        kv: torch.Tensor,
        page_tokens: int,
        *,
        device: torch.device,
        seed: int,
        states: torch.Tensor | None = None,
    ) -> None:
        check_model(model, device)
        if kv.dim() != 3 or kv.shape[0] != model.attention_layers:
            layers = model.attention_layers
            raise ValueError(f"the pool must be [layer, page, fragment] with {layers} layers, not {tuple(kv.shape)}")
        self.model, self.kv, self.page_tokens, self.device = model, kv.view(torch.uint8), page_tokens, device
        self.dtype = DTYPES[model.kv_dtype_bytes]
        self.buffers = Buffers(self.dtype, device)
        attention = LatentAttention if model.is_latent else GroupedAttention
        self.attention: Attention = attention(model, self.kv[0], page_tokens, self.buffers)
        if model.is_hybrid == (states is None):
            raise ValueError("states are for models with recurrent layers, which need them")
        self.recurrence = None if states is None else Recurrence(model, states, self.buffers)
        check_memory(model, device)
        if device.type == "cuda":
            # Use one attention kernel for all chunks: cuDNN's handles only those at the start of a prompt.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.embeddings = self._matrix(model.vocabulary, model.hidden_size)
        self.head = (self.embeddings if model.tied_embeddings else self._matrix(model.vocabulary, model.hidden_size)).t()
        self.mixers = list(enumerate_layers(model))
        self.layers = [self._layer(index) for index in range(model.layers)]
        self.inputs = torch.empty(0, dtype=torch.int64, device=device)
        self.choices = torch.empty(0, model.experts_per_token, dtype=torch.int64, device=device)
        self.graphs: list[DecodeGraph] = []

    @torch.inference_mode()
    def record_decodes(self, most: int) -> None:
        """Record CUDA graphs, which from now on replay steps that only decode, for up to ``most`` requests.

        Call this after the largest step, whose buffers the graphs use. Without a GPU nothing is recorded.
        """
        if self.device.type != "cuda":
            return
        for requests in graph_sizes(most):
            idle = 0 if self.recurrence is None else self.recurrence.idle_slot
            empty = DecodeSlots(1, torch.zeros(1, dtype=torch.int32, device=self.device), idle)
            room, decodes = ContextRoom(requests, **self.attention.cut), [empty] * requests
            self._cut(decodes, room)
            sequences = self._sequences([], decodes)
            graph, logits = recorded(lambda room=room, sequences=sequences: self._decode(room.parts, sequences))  # type: ignore[misc]
            table = None if sequences is None else sequences.decodes
            kept = [*self.buffers.all(), self.inputs, self.choices]
            self.graphs.append(DecodeGraph(room, graph, logits, kept, table))

    @torch.inference_mode()
    def step(
        self,
        chunks: Sequence[ChunkSlots],
        decodes: Sequence[DecodeSlots],
        wait_layer: Callable[[int], None] | None = None,
        *,
        sampled_tokens: int = 0,
    ) -> torch.Tensor:
        """Enqueue one step: one token of each of ``decodes``, then the chunks.

        ``wait_layer(l)`` is called before attention layer l is enqueued; it makes the stream wait until that layer's pages have
        arrived. The first ``sampled_tokens`` chunks end their prompts and so produce a token. Returns the logits
        ``[sampled, vocabulary]`` of the decodes and these chunks, in a buffer that the next step reuses.
        """
        if not chunks and wait_layer is None and (graph := self._graph(len(decodes))) is not None:
            self._cut(decodes, graph.room)
            self._replace_sequences(graph, decodes)
            return graph.replay(len(decodes))
        cut = self._cut(decodes) if decodes else None
        prompts = self.attention.chunks(chunks, len(decodes)) if chunks else None
        return self._step(chunks, decodes, cut, prompts, self._sequences(chunks, decodes), wait_layer, sampled_tokens)

    @torch.inference_mode()
    def step_without_attention(
        self, chunks: Sequence[ChunkSlots], decodes: Sequence[DecodeSlots], *, sampled_tokens: int = 0
    ) -> torch.Tensor:
        """Enqueue the products and recurrences of a step: its cost does not depend on contexts."""
        return self._step(chunks, decodes, None, None, self._sequences(chunks, decodes), None, sampled_tokens)

    def _step(
        self,
        chunks: Sequence[ChunkSlots],
        decodes: Sequence[DecodeSlots],
        cut: ContextParts | None,
        prompts: Any,
        sequences: Sequences | None,
        wait_layer: Callable[[int], None] | None,
        sampled_tokens: int,
    ) -> torch.Tensor:
        tokens = len(decodes) + sum(chunk.tokens for chunk in chunks)
        rows = self._rows(tokens) if chunks else tokens
        hidden = self._run(rows, len(decodes), cut, prompts, sequences, wait_layer)
        ends = len(decodes) + np.cumsum([chunk.tokens for chunk in chunks[:sampled_tokens]], dtype=int)
        return self._sample([hidden[: len(decodes)], *(hidden[end - 1 : end] for end in ends.tolist())])

    @torch.inference_mode()
    def warm_up_products(self, most: int) -> None:
        """Make the library choose the kernels for prefill steps of up to ``most`` tokens, using one layer of each kind."""
        layers, mixers, kinds = self.layers, self.mixers, {}
        for layer, mixer in zip(layers, mixers, strict=True):
            kinds[tuple(None if weights is None else weights.shape for weights in layer.weights)] = layer, mixer
        self.layers, self.mixers = [layer for layer, _ in kinds.values()], [mixer for _, mixer in kinds.values()]
        for tokens in range(most, 0, -PADDING):
            self.products(self._rows(tokens), sampled_tokens=1)
        self.layers, self.mixers = layers, mixers

    @torch.inference_mode()
    def products(self, tokens: int, *, sampled_tokens: int) -> torch.Tensor:
        """Enqueue a step without attention and recurrences, with ``sampled_tokens`` sampled tokens; if these are all, it decodes.

        Its cost does not depend on contexts.
        """
        decodes = tokens if sampled_tokens == tokens else 0
        return self._sample([self._run(tokens, decodes, None, None, None, None)[:sampled_tokens]])

    def _rows(self, tokens: int) -> int:
        """Return the rows of a step with prefill. Without a GPU, rows are not padded."""
        return padded(tokens) if self.device.type == "cuda" else tokens

    def _graph(self, requests: int) -> DecodeGraph | None:
        """Return the smallest graph that fits this many requests."""
        return next((graph for graph in self.graphs if graph.room.requests >= requests), None)

    def _decode(self, cut: ContextParts, sequences: Sequences | None) -> torch.Tensor:
        """Enqueue a step that only decodes."""
        requests = cut.spans.shape[1]
        return self._sample([self._run(requests, requests, cut, None, sequences, None)])

    def _run(
        self,
        tokens: int,
        decodes: int,
        cut: ContextParts | None,
        prompts: Any,
        sequences: Sequences | None,
        wait_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """Enqueue all layers and return the hidden states; the first ``decodes`` tokens decode."""
        hidden = self.buffers.take("hidden", tokens, self.model.hidden_size)
        torch.index_select(self.embeddings, 0, self._inputs(tokens), out=hidden)
        routes = self._routes(tokens) if self.model.routed_experts else None
        for layer, (is_recurrent, index) in zip(self.layers, self.mixers, strict=True):
            if is_recurrent:
                assert self.recurrence is not None
                self.recurrence.run(index, layer, hidden, sequences)
            else:
                if wait_layer is not None:
                    wait_layer(index)
                self.attention.run(self.kv[index], layer, hidden, decodes, cut, prompts)
            self._mlp(layer, hidden, routes)
        return hidden

    # One layer

    def _mlp(self, layer: Layer, hidden: torch.Tensor, routes: Routes | None) -> None:
        if layer.up is None and layer.router is None:
            return
        normed = rms_norm(hidden, hidden.shape[1:])
        if layer.up is not None and layer.down is not None:
            both = self.buffers.take("both", len(hidden), layer.up.shape[1])
            torch.mm(normed, layer.up, out=both)
            hidden.addmm_(self._activate(both, layer.down.shape[0]), layer.down)
        if layer.router is not None and layer.experts_up is not None and layer.experts_down is not None:
            assert routes is not None
            torch.mm(normed, layer.router, out=self.buffers.take("routed", len(hidden), layer.router.shape[1]))
            both = functional.grouped_mm(normed[routes.tokens], layer.experts_up, offs=routes.ends)
            result = functional.grouped_mm(self._activate(both, self.model.expert_width), layer.experts_down, offs=routes.ends)
            hidden.index_add_(0, routes.tokens, result, alpha=1 / self.model.experts_per_token)

    def _activate(self, both: torch.Tensor, width: int) -> torch.Tensor:
        """Apply a gated SiLU, or a squared ReLU without a gate."""
        if both.shape[1] == width:
            return both.relu_().square_()
        activated = self.buffers.take("activated", len(both), width)
        gate_silu(both, activated)
        return activated

    def _sample(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits of these rows of hidden states."""
        sampled = torch.cat(parts) if len(parts) > 1 else parts[0]
        logits = self.buffers.take("logits", len(sampled), self.model.vocabulary)
        if len(sampled):
            torch.mm(rms_norm(sampled, sampled.shape[1:]), self.head, out=logits)
        return logits

    # Once per step

    def _cut(self, decodes: Sequence[DecodeSlots], room: ContextRoom | None = None) -> ContextParts:
        return cut_contexts(
            np.array([request.context_tokens for request in decodes]),
            [request.slots for request in decodes],
            page_tokens=self.page_tokens,
            room=room,
            **self.attention.cut,
        )

    def _sequences(self, chunks: Sequence[ChunkSlots], decodes: Sequence[DecodeSlots]) -> Sequences | None:
        return None if self.recurrence is None else Sequences.of(chunks, decodes, self.device)

    def _replace_sequences(self, graph: DecodeGraph, decodes: Sequence[DecodeSlots]) -> None:
        """Let a recorded step take these requests by a token; if there are fewer, the others share an unused slot."""
        if self.recurrence is not None and graph.sequences is not None:
            idle = [self.recurrence.idle_slot] * (graph.room.requests - len(decodes))
            rows = decode_rows([request.state for request in decodes] + idle)
            graph.sequences.copy_(uploaded(rows, self.device))

    def _inputs(self, tokens: int) -> torch.Tensor:
        """Return ``tokens`` random input tokens, drawn once."""
        if missing := max(0, tokens - len(self.inputs)):
            more = torch.randint(self.model.vocabulary, (rounded(missing),), generator=self.generator, device=self.device)
            self.inputs = torch.cat([self.inputs, more])
        return self.inputs[:tokens]

    def _routes(self, tokens: int) -> Routes:
        model = self.model
        if missing := max(0, tokens - len(self.choices)):
            chances = torch.rand(rounded(missing), model.routed_experts, generator=self.generator, device=self.device)
            self.choices = torch.cat([self.choices, chances.topk(model.experts_per_token).indices])
        experts, order = self.choices[:tokens].flatten().sort()
        every = torch.arange(model.routed_experts, device=self.device)
        ends = torch.searchsorted(experts, every, right=True).int()
        return Routes(order // model.experts_per_token, ends)

    # Weights

    def _layer(self, index: int) -> Layer:
        model, hidden = self.model, self.model.hidden_size
        is_recurrent, _ = self.mixers[index]
        mixer = self.recurrence if is_recurrent else self.attention
        assert mixer is not None
        mixing = mixer.weights(self._matrix)
        if index >= (model.mlp_layers or model.layers):
            return Layer(**mixing)
        if not model.routed_experts or index < model.dense_layers:
            up, down = self._dense(model.mlp_width, model.mlp_matrices)
            return Layer(**mixing, up=up, down=down)
        shared = model.shared_experts * model.expert_width
        given = dict(zip(("up", "down"), self._dense(shared, 3), strict=True)) if shared else {}
        return Layer(
            **mixing,
            **given,
            router=self._matrix(model.routed_experts, hidden).t(),
            experts_up=self._matrix(model.routed_experts, 2 * model.expert_width, hidden).transpose(1, 2),
            experts_down=self._matrix(model.routed_experts, hidden, model.expert_width).transpose(1, 2),
        )

    def _dense(self, width: int, matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.model.hidden_size
        return self._matrix((matrices - 1) * width, hidden).t(), self._matrix(hidden, width).t()

    def _matrix(self, *shape: int) -> torch.Tensor:
        """Draw random weights, scaled so that products keep the magnitude of their inputs."""
        matrix = torch.empty(shape, dtype=self.dtype, device=self.device)
        return matrix.normal_(0, shape[-1] ** -0.5, generator=self.generator)


def enumerate_layers(model: ModelSpec) -> Iterator[tuple[bool, int]]:
    """Yield whether each layer is recurrent, and its number among those of its kind; attention ends each group of layers."""
    attention = 0
    for index in range(model.layers):
        is_recurrent = (index + 1) * model.attention_layers // model.layers == attention
        yield is_recurrent, index - attention if is_recurrent else attention
        attention += not is_recurrent


def check_model(model: ModelSpec, device: torch.device) -> None:
    """Raise ValueError for a model whose work, as counted by ModelSpec, ``Transformer`` cannot do."""
    for name in ("kv_dtype_bytes", "weight_dtype_bytes"):
        if getattr(model, name) not in DTYPES:
            raise ValueError(f"{name} must be 2 (bf16) or 4 (float32) on hardware, not {getattr(model, name)}")
    if model.kv_dtype_bytes != model.weight_dtype_bytes:
        raise ValueError(f"weight_dtype_bytes must equal kv_dtype_bytes={model.kv_dtype_bytes}, not {model.weight_dtype_bytes}")
    names, width = ("nope_dim + rope_dim", model.nope_dim + model.rope_dim) if model.is_latent else ("head_dim", model.head_dim)
    if device.type == "cuda" and model.kv_dtype_bytes == 2 and (width % 8 or width > MOST_HEAD_WIDTH):
        raise ValueError(f"{names} must be a multiple of 8, at most {MOST_HEAD_WIDTH}, on a GPU, not {width}")
    if model.sliding_window_layers:
        raise ValueError("sliding_window_layers must be 0 on hardware, where all attention is over the whole prompt")
    if model.is_hybrid:
        check_states(model)
    if model.routed_experts and not hasattr(functional, "grouped_mm"):
        raise ValueError(f"routed_experts: torch {torch.__version__} has no grouped_mm: install torch 2.10 or later")
    if model.routed_experts and device.type == "cuda" and model.weight_dtype_bytes != 2:
        raise ValueError(f"weight_dtype_bytes must be 2 (bf16) for experts on a GPU, not {model.weight_dtype_bytes}")


def check_memory(model: ModelSpec, device: torch.device) -> None:
    """Raise ValueError if the weights do not fit into the GPU's free memory."""
    if device.type != "cuda":
        return
    needed, free = int(model.parameters * model.weight_dtype_bytes), torch.cuda.mem_get_info(device)[0]
    if needed + SPARE_BYTES > free:
        raise ValueError(
            f"the model's weights take {needed / 1e9:.1f} GB, but the GPU has only {free / 1e9:.1f} GB free: "
            "choose a smaller model or pool"
        )


def padded(tokens: int) -> int:
    """Return the padded rows of a step with prefill of ``tokens`` tokens."""
    step = max(PADDING, 1 << max(0, tokens.bit_length() - 7))
    return -(-tokens // step) * step
