"""Attention in one layer, with keys and values of some KV heads in the pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvsim.kernels.page_gather import gather_pages
from kvsim.kernels.paged_attention import ContextParts, attend_pages, check_fragment
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.model.buffers import Buffers
from kvsim.substrate.hardware.model.layer import ChunkSlots, Layer

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
"""Called directly: ``scaled_dot_product_attention`` with a symbolic mask (``torch.nn.attention.bias``) first decides, in Python,
that it can use this operator, and the host has to do that in every layer. For bf16 on a GPU, and heads that ``check_model``
accepts."""
Matrix = Callable[..., torch.Tensor]
"""Draws random weights of a shape ``[out, in]``."""


class Attention(Protocol):
    """The attention of a model's layers, with all products before and after it."""

    cut: dict[str, Any]
    """Arguments of ``cut_contexts`` and ``ContextRoom`` that are always the same."""

    def weights(self, matrix: Matrix) -> dict[str, torch.Tensor]:
        """Draw the weights of one layer, by the names in ``Layer``."""

    def chunks(self, chunks: Sequence[ChunkSlots], first_row: int) -> Any:
        """Prepare the attention of chunks, whose rows begin at ``first_row``. Raises ValueError for too few pages."""

    def run(
        self, pool: torch.Tensor, layer: Layer, hidden: torch.Tensor, decodes: int, cut: ContextParts | None, chunks: Any
    ) -> None:
        """Add the layer's attention to ``hidden``, of which the first ``decodes`` rows decode.

        Without ``cut`` and ``chunks``, only the products are computed.
        """


class GroupedAttention:
    """Grouped-query attention: a page has keys and values of ``kv_heads`` heads."""

    def __init__(self, model: ModelSpec, layer_pool: torch.Tensor, page_tokens: int, buffers: Buffers) -> None:
        """Raises ValueError unless pages of one layer, ``layer_pool``, fit the model."""
        self.model, self.page_tokens, self.buffers = model, page_tokens, buffers
        shape = {"kv_heads": model.kv_heads, "head_dim": model.head_dim, "element_bytes": model.kv_dtype_bytes}
        check_fragment(layer_pool, page_tokens=page_tokens, **shape)
        self.query_width, self.kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.cut = {
            "heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "device": buffers.device,
        }  # fmt: skip

    def weights(self, matrix: Matrix) -> dict[str, torch.Tensor]:
        hidden, gate = self.model.hidden_size, self.query_width if self.model.attention_gate else 0
        inward = matrix(self.query_width + 2 * self.kv_width + gate, hidden).t()
        return {"inward": inward, "outward": matrix(hidden, self.query_width).t()}

    def chunks(self, chunks: Sequence[ChunkSlots], first_row: int) -> "GroupedChunks":
        return GroupedChunks(self, chunks, first_row)

    def run(
        self,
        pool: torch.Tensor,
        layer: Layer,
        hidden: torch.Tensor,
        decodes: int,
        cut: ContextParts | None,
        chunks: "GroupedChunks | None",
    ) -> None:
        model, tokens = self.model, len(hidden)
        mixed = layer.project(hidden, self.buffers)
        query = mixed[:, : self.query_width].view(tokens, model.heads, model.head_dim)
        attended = self.buffers.take("attended", tokens, self.query_width)
        out = attended.view(query.shape)
        if cut is not None:
            attend_pages(query[:decodes], pool, cut, out[:decodes], page_tokens=self.page_tokens, kv_heads=model.kv_heads)
        if chunks is not None:
            chunks.attend(pool, query, out)
        if model.attention_gate:
            attended.mul_(torch.sigmoid(mixed[:, -self.query_width :]))
        hidden.addmm_(attended, layer.outward)


class GroupedChunks:
    """Each layer gathers the pages of all chunks at once; then the chunks attend in turn."""

    def __init__(self, attention: GroupedAttention, chunks: Sequence[ChunkSlots], first_row: int) -> None:
        model = attention.model
        self.pages = ChunkPages(chunks, first_row, attention.page_tokens, attention.buffers)
        tokens = self.pages.tokens
        gathered = attention.buffers.take("gathered", 2 * tokens, attention.kv_width)
        self.gathered = gathered.view(2, tokens, model.kv_heads, model.head_dim)
        self.contexts = [tuple(self.gathered[:, part.context]) for part in self.pages.parts]
        """Keys and values of each chunk."""

    def attend(self, pool: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        """Attend in one layer. ``query`` and ``out`` are ``[row, head, dim]`` for the whole step."""
        gather_pages(pool, self.pages.slots, self.gathered)
        for part, (keys, values) in zip(self.pages.parts, self.contexts, strict=True):
            part.attend(query, keys, values, out)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """A chunk's part of a step."""

    rows: slice
    context: slice
    """Place among the tokens of all pages."""
    mask: torch.Tensor | None
    """Causal mask ``[row, context token]``; None for ``flash_attention``, which has its own."""

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Let the chunk's rows of ``query`` and ``out``, ``[row, head, dim]``, attend to ``keys`` and ``values`` of its context.

        The last row attends to the whole context, ``[token, kv head, dim]``, and each earlier row to one token fewer. Values may
        be padded: ``out`` takes their first elements.
        """
        asked, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (query[self.rows], keys, values))
        if self.mask is None:
            attended, *_ = flash_attention(asked, keys, values, 0.0, True)
        else:
            attended = scaled_dot_product_attention(asked, keys, values, attn_mask=self.mask, enable_gqa=True)
        out[self.rows].copy_(attended[0, :, :, : out.shape[2]].transpose(0, 1))


class ChunkPages:
    """The pages of a step's chunks, one after another."""

    def __init__(self, chunks: Sequence[ChunkSlots], first_row: int, page_tokens: int, buffers: Buffers) -> None:
        """Raises ValueError for a chunk with too few pages."""
        pages = [-(-(chunk.start + chunk.tokens) // page_tokens) for chunk in chunks]
        for chunk, needed in zip(chunks, pages, strict=True):
            if len(chunk.slots) < needed:
                raise ValueError(
                    f"a chunk that ends at {chunk.start + chunk.tokens} needs {needed} pages, not {len(chunk.slots)}"
                )
        self.slots = torch.cat([chunk.slots[:needed] for chunk, needed in zip(chunks, pages, strict=True)])
        self.tokens = sum(pages) * page_tokens
        self.parts: list[ChunkPart] = []
        has_flash = buffers.device.type == "cuda" and buffers.dtype == torch.bfloat16
        row, begin = first_row, 0
        for chunk, needed in zip(chunks, pages, strict=True):
            context = chunk.start + chunk.tokens
            mask = None if has_flash else causal_mask(chunk.tokens, context, buffers.device)
            self.parts.append(ChunkPart(slice(row, row + chunk.tokens), slice(begin, begin + context), mask))
            row += chunk.tokens
            begin += needed * page_tokens


def causal_mask(tokens: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the mask that lets the last of ``tokens`` queries attend to all keys, and each earlier query to one key fewer."""
    return torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)
