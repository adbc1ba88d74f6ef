"""Performs the work of a step on a GPU: all matrix products and all attention of a model, with random weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from kvsim.kernels.gated_silu import gate_silu
from kvsim.kernels.page_gather import gather_pages
from kvsim.kernels.paged_attention import ContextParts, ContextRoom, attend_pages, check_fragment, cut_contexts
from kvsim.model import ModelSpec
from kvsim.substrate.hardware.decode_graph import DecodeGraph, graph_sizes, recorded

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Element types by bytes per element."""
PADDING = 128
"""Rows of a step with prefill are padded to a multiple of this number, from 16,384 rows on to a multiple of twice as many, and
so on. Products and attention work in tiles of 64 or 128 rows: on an H200 a step of 448 rows takes 20% longer than one of 512.
Besides, the library takes milliseconds to choose a kernel for a product of a new size."""
SPARE_BYTES = 2 << 30
"""GPU memory left for the tensors of a step."""


@dataclass(frozen=True, slots=True)
class ChunkSlots:
    """A prefill chunk: ``tokens`` of a prompt, from position ``start`` on."""

    tokens: int
    start: int
    slots: torch.Tensor
    """Slots of the prompt's pages, at least up to the chunk's end; int32, in GPU memory."""


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """A request that decodes one token, which attends to ``context_tokens`` cached tokens."""

    context_tokens: int
    slots: torch.Tensor
    """Slots of the request's pages, at least those of its context; int32, in GPU memory."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, ``[in, out]``, as views of matrices stored as ``[out, in]``."""

    inward: torch.Tensor
    """Projections of queries, keys, values and, if the model has one, the attention gate, concatenated."""
    outward: torch.Tensor
    up: torch.Tensor | None = None
    """Gate and up projections concatenated, or up alone; None in a layer without a dense MLP."""
    down: torch.Tensor | None = None
    router: torch.Tensor | None = None
    experts_up: torch.Tensor | None = None
    """Gate and up projections concatenated, ``[expert, in, out]``."""
    experts_down: torch.Tensor | None = None

    @property
    def weights(self) -> Iterator[torch.Tensor | None]:
        """All weights, in order."""
        return (getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Routes:
    """The assignment of tokens to experts."""

    tokens: torch.Tensor
    """Token of each (token, expert) pair, sorted by expert."""
    ends: torch.Tensor
    """End of each expert's pairs, int32."""


class Transformer:
    """Enqueues the work of a serving engine's steps on the current stream, and never waits for it.

    ``kv`` is the GPU's pool ``[layer, page, fragment bytes]``, uint8. A fragment has the keys of a page's tokens, then their
    values, each ``[token, kv head, head dim]``. The content of pages does not affect the time of a step: keys and values are
    masked as ``kernels/paged_attention.py`` describes, so any bits are numbers below 2. The pool is never written; rotary
    embedding is left out, as in ``ModelSpec``.

    Each layer has its own random weights, drawn with ``seed``, so a step reads as many bytes as ModelSpec says. In a mixture of
    experts, every token has its own experts, drawn once with equal probability; the router's product is computed but not used.
    Elements are bf16 if ``kv_dtype_bytes`` and ``weight_dtype_bytes`` are 2, and float32 if they are 4. All steps must use one
    stream, because they share buffers. Raises ValueError for a model that is not supported or does not fit.
    """

    def __init__(self, model: ModelSpec, kv: torch.Tensor, page_tokens: int, *, device: torch.device, seed: int) -> None:
        check_model(model, device)
        if kv.dim() != 3 or kv.shape[0] != model.layers:
            raise ValueError(f"the pool must be [layer, page, fragment] with {model.layers} layers, not {tuple(kv.shape)}")
        self.model, self.kv, self.page_tokens, self.device = model, kv.view(torch.uint8), page_tokens, device
        self.dtype = DTYPES[model.kv_dtype_bytes]
        shape = {"kv_heads": model.kv_heads, "head_dim": model.head_dim, "element_bytes": model.kv_dtype_bytes}
        check_fragment(self.kv[0], page_tokens=page_tokens, **shape)
        check_memory(model, device)
        if device.type == "cuda":
            # Use one attention kernel for all chunks: cuDNN's handles only those at the start of a prompt.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.attention: dict[str, Any] = {
            "heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "device": device,
        }  # fmt: skip
        self.query_width, self.kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.embeddings = self._matrix(model.vocabulary, model.hidden_size)
        self.head = (self.embeddings if model.tied_embeddings else self._matrix(model.vocabulary, model.hidden_size)).t()
        self.layers = [self._layer(index) for index in range(model.layers)]
        self.buffers: dict[tuple[str, int], torch.Tensor] = {}
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
        empty = DecodeSlots(1, torch.zeros(1, dtype=torch.int32, device=self.device))
        for requests in graph_sizes(most):
            room = ContextRoom(requests, **self.attention)
            self._cut([empty] * requests, room)
            graph, logits = recorded(lambda room=room: self._decode(room.parts))  # type: ignore[misc]
            self.graphs.append(DecodeGraph(room, graph, logits, [*self.buffers.values(), self.inputs, self.choices]))

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

        ``wait_layer(l)`` is called before layer l is enqueued; it makes the stream wait until that layer's pages have arrived.
        The first ``sampled_tokens`` chunks end their prompts and so produce a token. Returns the logits
        ``[sampled, vocabulary]`` of the decodes and these chunks, in a buffer that the next step reuses.
        """
        if not chunks and wait_layer is None and (graph := self._graph(len(decodes))) is not None:
            self._cut(decodes, graph.room)
            return graph.replay(len(decodes))
        tokens = len(decodes) + sum(chunk.tokens for chunk in chunks)
        cut = self._cut(decodes) if decodes else None
        prompts = Prompts(self, chunks, len(decodes)) if chunks else None
        hidden = self._run(self._rows(tokens) if chunks else tokens, cut, prompts, wait_layer)
        ends = len(decodes) + np.cumsum([chunk.tokens for chunk in chunks[:sampled_tokens]], dtype=int)
        return self._sample([hidden[: len(decodes)], *(hidden[end - 1 : end] for end in ends.tolist())])

    @torch.inference_mode()
    def warm_up_products(self, most: int) -> None:
        """Make the library choose the kernels for prefill steps of up to ``most`` tokens, using one layer of each kind."""
        layers, kinds = self.layers, {}
        for layer in layers:
            kinds[tuple(None if weights is None else weights.shape for weights in layer.weights)] = layer
        self.layers = list(kinds.values())
        for tokens in range(most, 0, -PADDING):
            self.products(self._rows(tokens), sampled_tokens=1)
        self.layers = layers

    @torch.inference_mode()
    def products(self, tokens: int, *, sampled_tokens: int) -> torch.Tensor:
        """Enqueue a step without attention, with ``sampled_tokens`` sampled tokens: its cost does not depend on contexts."""
        return self._sample([self._run(tokens, None, None, None)[:sampled_tokens]])

    def _rows(self, tokens: int) -> int:
        """Return the rows of a step with prefill. Without a GPU, rows are not padded."""
        return padded(tokens) if self.device.type == "cuda" else tokens

    def _graph(self, requests: int) -> DecodeGraph | None:
        """Return the smallest graph that fits this many requests."""
        return next((graph for graph in self.graphs if graph.room.requests >= requests), None)

    def _decode(self, cut: ContextParts) -> torch.Tensor:
        """Enqueue a step that only decodes."""
        return self._sample([self._run(cut.spans.shape[1], cut, None, None)])

    def _run(
        self,
        tokens: int,
        cut: ContextParts | None,
        prompts: "Prompts | None",
        wait_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """Enqueue all layers and return the hidden states."""
        hidden = self._buffer("hidden", tokens, self.model.hidden_size)
        torch.index_select(self.embeddings, 0, self._inputs(tokens), out=hidden)
        routes = self._routes(tokens) if self.model.routed_experts else None
        for index, layer in enumerate(self.layers):
            if wait_layer is not None:
                wait_layer(index)
            self._attention(index, layer, hidden, cut, prompts)
            self._mlp(layer, hidden, routes)
        return hidden

    # One layer

    def _attention(
        self, index: int, layer: Layer, hidden: torch.Tensor, cut: ContextParts | None, prompts: "Prompts | None"
    ) -> None:
        model, tokens = self.model, len(hidden)
        mixed = self._buffer("mixed", tokens, layer.inward.shape[1])
        torch.mm(rms_norm(hidden, hidden.shape[1:]), layer.inward, out=mixed)
        query = mixed[:, : self.query_width].view(tokens, model.heads, model.head_dim)
        attended = self._buffer("attended", tokens, self.query_width)
        out = attended.view(query.shape)
        if cut is not None:
            count = cut.spans.shape[1]
            attend_pages(query[:count], self.kv[index], cut, out[:count], page_tokens=self.page_tokens, kv_heads=model.kv_heads)
        if prompts is not None:
            prompts.attend(self.kv[index], query, out)
        if model.attention_gate:
            attended.mul_(torch.sigmoid(mixed[:, -self.query_width :]))
        hidden.addmm_(attended, layer.outward)

    def _mlp(self, layer: Layer, hidden: torch.Tensor, routes: Routes | None) -> None:
        if layer.up is None and layer.router is None:
            return
        normed = rms_norm(hidden, hidden.shape[1:])
        if layer.up is not None and layer.down is not None:
            both = self._buffer("both", len(hidden), layer.up.shape[1])
            torch.mm(normed, layer.up, out=both)
            hidden.addmm_(self._activate(both, layer.down.shape[0]), layer.down)
        if layer.router is not None and layer.experts_up is not None and layer.experts_down is not None:
            assert routes is not None
            torch.mm(normed, layer.router, out=self._buffer("routed", len(hidden), layer.router.shape[1]))
            both = functional.grouped_mm(normed[routes.tokens], layer.experts_up, offs=routes.ends)
            result = functional.grouped_mm(self._activate(both, self.model.expert_width), layer.experts_down, offs=routes.ends)
            hidden.index_add_(0, routes.tokens, result, alpha=1 / self.model.experts_per_token)

    def _activate(self, both: torch.Tensor, width: int) -> torch.Tensor:
        """Apply a gated SiLU, or a squared ReLU without a gate."""
        if both.shape[1] == width:
            return both.relu_().square_()
        activated = self._buffer("activated", len(both), width)
        gate_silu(both, activated)
        return activated

    def _sample(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits of these rows of hidden states."""
        sampled = torch.cat(parts) if len(parts) > 1 else parts[0]
        logits = self._buffer("logits", len(sampled), self.model.vocabulary)
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
            **self.attention,
        )

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

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Return the first rows of a reused buffer that grows to the needs of the largest step."""
        buffer = self.buffers.get((name, width))
        if buffer is None or len(buffer) < rows:
            self.buffers.pop((name, width), None)
            buffer = self.buffers[name, width] = torch.empty(rounded(rows), width, dtype=self.dtype, device=self.device)
        return buffer[:rows]

    # Weights

    def _layer(self, index: int) -> Layer:
        model = self.model
        hidden, gate = model.hidden_size, self.query_width if model.attention_gate else 0
        inward = self._matrix(self.query_width + 2 * self.kv_width + gate, hidden).t()
        outward = self._matrix(hidden, self.query_width).t()
        if index >= (model.mlp_layers or model.layers):
            return Layer(inward, outward)
        if not model.routed_experts or index < model.dense_layers:
            return Layer(inward, outward, *self._dense(model.mlp_width, model.mlp_matrices))
        shared = model.shared_experts * model.expert_width
        up, down = self._dense(shared, 3) if shared else (None, None)
        return Layer(
            inward,
            outward,
            up,
            down,
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


class Prompts:
    """The attention of a step's chunks. Each layer gathers the pages of all chunks at once; then the chunks attend in turn."""

    def __init__(self, transformer: Transformer, chunks: Sequence[ChunkSlots], first_row: int) -> None:
        model, page_tokens = transformer.model, transformer.page_tokens
        self.kv_heads = model.kv_heads
        pages = [-(-(chunk.start + chunk.tokens) // page_tokens) for chunk in chunks]
        for chunk, needed in zip(chunks, pages, strict=True):
            if len(chunk.slots) < needed:
                raise ValueError(
                    f"a chunk that ends at {chunk.start + chunk.tokens} needs {needed} pages, not {len(chunk.slots)}"
                )
        self.slots = torch.cat([chunk.slots[:needed] for chunk, needed in zip(chunks, pages, strict=True)])
        tokens = sum(pages) * page_tokens
        gathered = transformer._buffer("gathered", 2 * tokens, transformer.kv_width)
        self.gathered = gathered.view(2, tokens, model.kv_heads, model.head_dim)
        self.parts = []
        row, begin = first_row, 0
        for chunk, needed in zip(chunks, pages, strict=True):
            keys, values = self.gathered[:, begin : begin + chunk.start + chunk.tokens].transpose(1, 2).unsqueeze(1)
            mask = causal_mask(chunk.tokens, chunk.start + chunk.tokens, transformer.device)
            self.parts.append((slice(row, row + chunk.tokens), keys, values, mask))
            row += chunk.tokens
            begin += needed * page_tokens

    def attend(self, pool: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        """Attend in one layer. ``query`` and ``out`` are ``[row, head, dim]`` for the whole step."""
        gather_pages(pool, self.slots, self.gathered)
        for rows, keys, values, mask in self.parts:
            asked = query[rows].transpose(0, 1).unsqueeze(0)
            attended = scaled_dot_product_attention(asked, keys, values, attn_mask=mask, enable_gqa=True)
            out[rows].copy_(attended[0].transpose(0, 1))


def causal_mask(tokens: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the mask that lets the last of ``tokens`` queries attend to all ``keys``, and each earlier query to one key fewer.

    On a GPU it is a symbolic mask that flash attention understands, because the mask itself would take memory for every pair.
    """
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # takes a second to import

        return causal_lower_right(tokens, keys)
    return torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)


def check_model(model: ModelSpec, device: torch.device) -> None:
    """Raise ValueError for a model whose work, as counted by ModelSpec, ``Transformer`` cannot do."""
    if model.is_hybrid:
        raise ValueError("recurrent_layers: there is no kernel for recurrent layers: choose a model with attention only")
    if model.is_latent:
        raise ValueError("kv_latent_dim: there is no kernel for latent attention: choose a model with grouped-query attention")
    for name in ("kv_dtype_bytes", "weight_dtype_bytes"):
        if getattr(model, name) not in DTYPES:
            raise ValueError(f"{name} must be 2 (bf16) or 4 (float32) on hardware, not {getattr(model, name)}")
    if model.kv_dtype_bytes != model.weight_dtype_bytes:
        raise ValueError(f"weight_dtype_bytes must equal kv_dtype_bytes={model.kv_dtype_bytes}, not {model.weight_dtype_bytes}")
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


def rounded(rows: int) -> int:
    """Round up to a power of two, so that buffers rarely grow."""
    return 1 << max(0, rows - 1).bit_length()
