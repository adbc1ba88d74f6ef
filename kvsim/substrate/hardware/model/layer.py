"""The weights of a layer and the requests of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import rms_norm

from kvsim.substrate.hardware.model.buffers import Buffers


@dataclass(frozen=True, slots=True)
class ChunkSlots:
    """A prefill chunk: ``tokens`` of a prompt, from position ``start`` on."""

    tokens: int
    start: int
    slots: torch.Tensor
    """Slots of the prompt's pages, at least up to the chunk's end; int32, in GPU memory."""
    state: int = 0
    """Slot of the request's recurrent state. A chunk with ``start`` 0 begins from a state of zeros."""


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """A request that decodes one token, which attends to ``context_tokens`` cached tokens."""

    context_tokens: int
    slots: torch.Tensor
    """Slots of the request's pages, at least those of its context; int32, in GPU memory."""
    state: int = 0
    """Slot of the request's recurrent state."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, ``[in, out]``, as views of matrices stored as ``[out, in]``."""

    inward: torch.Tensor
    """All projections of the hidden state, concatenated. Attention: queries, keys, values and, if the model has one, the gate;
    latent attention: queries or their latent, the latent and the rope key."""
    outward: torch.Tensor
    query: torch.Tensor | None = None
    """Latent attention: from the latent of queries to queries."""
    key_expansion: torch.Tensor | None = None
    """Latent attention: from latents to the keys of all heads, without their rope part."""
    value_expansion: torch.Tensor | None = None
    """Latent attention: from latents to the values of all heads."""
    convolution: torch.Tensor | None = None
    """A recurrent layer's, ``[tap, channel]``."""
    inner: torch.Tensor | None = None
    """A recurrent layer's weights between its input and its output projection, as one matrix."""
    up: torch.Tensor | None = None
    """Gate and up projections concatenated, or up alone; None in a layer without a dense MLP."""
    down: torch.Tensor | None = None
    router: torch.Tensor | None = None
    experts_up: torch.Tensor | None = None
    """Gate and up projections concatenated, ``[expert, in, out]``."""
    experts_down: torch.Tensor | None = None

    def project(self, hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """Return ``hidden``, normalized, times ``inward``, in a buffer that the next layer reuses."""
        mixed = buffers.take("mixed", len(hidden), self.inward.shape[1])
        return torch.mm(rms_norm(hidden, hidden.shape[1:]), self.inward, out=mixed)

    @property
    def weights(self) -> Iterator[torch.Tensor | None]:
        """All weights, in order."""
        return (getattr(self, field.name) for field in fields(self))
