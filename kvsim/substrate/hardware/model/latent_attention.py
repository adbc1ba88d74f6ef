"""Latent attention in one layer: a page has one latent and one rope key per token (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Requests that decode attend in the absorbed form, in which all heads read one latent; chunks of prompts expand the latents of
their context to keys and values, which takes fewer FLOPs there.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from kvsim.kernels.page_gather import gather_pages
from kvsim.kernels.paged_attention import ContextParts, attend_latents, check_latents, latent_groups
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.model.attention import ChunkPages, Matrix
from kvsim.substrate.hardware.model.buffers import Buffers
from kvsim.substrate.hardware.model.layer import ChunkSlots, Layer


class LatentAttention:
    """The attention of a model whose pages have latents; the contract is ``Attention``."""

    def __init__(self, model: ModelSpec, layer_pool: torch.Tensor, page_tokens: int, buffers: Buffers) -> None:
        """Raises ValueError unless pages of one layer, ``layer_pool``, fit the model."""
        self.model, self.page_tokens, self.buffers = model, page_tokens, buffers
        self.latent_width = model.kv_latent_dim + model.rope_dim
        check_latents(
            layer_pool, page_tokens=page_tokens, latent_dim=self.latent_width, element_bytes=model.kv_dtype_bytes
        )  # fmt: skip
        self.head_width = model.nope_dim + model.rope_dim
        self.query_width = model.heads * self.head_width
        self.cut = {
            "heads": model.heads,
            "kv_heads": latent_groups(model.heads),
            "head_dim": model.kv_latent_dim,
            "device": buffers.device,
        }

    def weights(self, matrix: Matrix) -> dict[str, torch.Tensor]:
        model, hidden, asked = self.model, self.model.hidden_size, self.model.query_latent_dim
        drawn = {
            "inward": matrix((asked or self.query_width) + self.latent_width, hidden).t(),
            "outward": matrix(hidden, model.heads * model.value_dim).t(),
            "key_expansion": matrix(model.heads * model.nope_dim, model.kv_latent_dim).t(),
            "value_expansion": matrix(model.heads * model.value_dim, model.kv_latent_dim).t(),
        }
        return drawn | {"query": matrix(self.query_width, asked).t()} if asked else drawn

    def chunks(self, chunks: Sequence[ChunkSlots], first_row: int) -> "LatentChunks":
        return LatentChunks(self, chunks, first_row)

    def run(
        self,
        pool: torch.Tensor,
        layer: Layer,
        hidden: torch.Tensor,
        decodes: int,
        cut: ContextParts | None,
        chunks: "LatentChunks | None",
    ) -> None:
        model, tokens = self.model, len(hidden)
        mixed = layer.project(hidden, self.buffers)
        asked = mixed[:, : self.query_width]
        if layer.query is not None:
            asked = self.buffers.take("asked", tokens, self.query_width)
            torch.mm(mixed[:, : model.query_latent_dim], layer.query, out=asked)
        query = asked.view(tokens, model.heads, self.head_width)
        attended = self.buffers.take("attended", tokens, model.heads * model.value_dim)
        out = attended.view(tokens, model.heads, model.value_dim)
        if decodes:
            self._absorbed(pool, layer, query[:decodes], cut, out[:decodes])
        if chunks is not None:
            chunks.attend(pool, layer, query, out)
        elif decodes < tokens:
            self.expanded(layer, mixed[decodes:, -self.latent_width :])
        hidden.addmm_(attended, layer.outward)

    def expanded(self, layer: Layer, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values ``[token, head, dim]`` of ``latents``, each with its rope key."""
        assert layer.key_expansion is not None and layer.value_expansion is not None
        model, heads = self.model, (len(latents), self.model.heads, -1)
        compressed, rope = latents[:, : model.kv_latent_dim], latents[:, model.kv_latent_dim :]
        keys = torch.mm(compressed, layer.key_expansion).view(heads)
        rope = rope.unsqueeze(1).expand(-1, model.heads, -1)
        return torch.cat([keys, rope], dim=2), torch.mm(compressed, layer.value_expansion).view(heads)

    def _absorbed(
        self, pool: torch.Tensor, layer: Layer, query: torch.Tensor, cut: ContextParts | None, out: torch.Tensor
    ) -> None:
        """Attend with queries that the key expansion has been multiplied into; expand what was attended to values."""
        assert layer.key_expansion is not None and layer.value_expansion is not None
        model, latent = self.model, self.model.kv_latent_dim
        to_keys = layer.key_expansion.view(latent, model.heads, model.nope_dim)
        to_values = layer.value_expansion.view(latent, model.heads, model.value_dim)
        asked = torch.empty(len(query), model.heads, self.latent_width, dtype=query.dtype, device=query.device)
        plain = query[:, :, : model.nope_dim]
        asked[:, :, :latent] = torch.bmm(plain.transpose(0, 1), to_keys.permute(1, 2, 0)).transpose(0, 1)
        asked[:, :, latent:] = query[:, :, model.nope_dim :]
        found = torch.empty(len(query), model.heads, latent, dtype=query.dtype, device=query.device)
        if cut is not None:
            attend_latents(asked, pool, cut, found, page_tokens=self.page_tokens, scale=self.head_width**-0.5)
        out.copy_(torch.bmm(found.transpose(0, 1), to_values.transpose(0, 1)).transpose(0, 1))


class LatentChunks:
    """Each layer gathers the pages of all chunks at once; then the latents of each are expanded, and it attends."""

    def __init__(self, attention: LatentAttention, chunks: Sequence[ChunkSlots], first_row: int) -> None:
        self.attention = attention
        self.pages = ChunkPages(chunks, first_row, attention.page_tokens, attention.buffers)
        self.gathered = attention.buffers.take("gathered", self.pages.tokens, attention.latent_width).unsqueeze(0)

    def attend(self, pool: torch.Tensor, layer: Layer, query: torch.Tensor, out: torch.Tensor) -> None:
        """Attend in one layer. ``query`` and ``out`` are ``[row, head, dim]`` for the whole step."""
        gather_pages(pool, self.pages.slots, self.gathered)
        for part in self.pages.parts:
            keys, values = self.attention.expanded(layer, self.gathered[0, part.context])
            if part.mask is None:
                values = pad(values, (0, max(0, keys.shape[2] - values.shape[2])))  # flash attention wants one width
            part.attend(query, keys, values, out)
