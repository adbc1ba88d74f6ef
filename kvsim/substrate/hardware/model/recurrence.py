"""The recurrent layers of a hybrid model: projections, a short convolution, and a recurrence in state-space dual form.

Every recurrence is computed with a decay per head and token (``kernels/recurrent_scan.py``). What other families have beyond that
(the correction of the delta rule, decays per channel) is left out: bytes and shapes of the states are the model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from kvsim.kernels.recurrent_scan import LEAST_DIM, scan
from kvsim.kernels.short_convolution import convolve
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.model.attention import Matrix
from kvsim.substrate.hardware.model.buffers import Buffers
from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots, Layer

BITS = {2: (torch.int16, -0x4001), 4: (torch.int32, -0x40000001)}
"""By bytes of an element: the integers that have its bits, and a mask of all bits but the exponent's highest, which is set only
in numbers of magnitude 2 or more, infinities and NaN."""
STATE_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Where a recurrent layer finds its inputs. Columns are those that are convolved, or all without a convolution."""

    heads: int
    """Narrow heads count as fewer heads of at least 16 values, with a decay in common."""
    key_heads: int
    key_dim: int
    value_dim: int
    columns: int
    has_gate: bool
    """Whether the output is multiplied by a gate: the columns after the convolved ones, if there are enough."""
    inner_columns: int
    """Columns of the inner product of the values; 0 without one."""
    keys_are_inner: bool
    """Whether keys and queries come from the inner product, because the projections have no columns for them."""

    @property
    def value_width(self) -> int:
        """Columns of all heads' values."""
        return self.heads * self.value_dim

    @property
    def key_width(self) -> int:
        """Columns of all heads' keys."""
        return self.key_heads * self.key_dim

    @classmethod
    def of(cls, model: ModelSpec) -> "RecurrentShape":
        """Return the shape of a model's recurrent layers. Raises ValueError for projections too narrow for the recurrence."""
        heads, value_dim = model.state_heads, model.state_value_dim
        while value_dim < LEAST_DIM and heads % 2 == 0:
            heads, value_dim = heads // 2, 2 * value_dim
        width, key_dim = heads * value_dim, model.state_key_dim
        columns, total = model.conv_channels or model.recurrent_in_width, model.recurrent_in_width
        if not width <= columns <= total or heads > total:
            raise ValueError(
                f"recurrent_in_width={total} and conv_channels={model.conv_channels} must have columns for "
                f"state_heads x state_value_dim = {width} values"
            )
        inner, rest = divmod(model.recurrent_inner_parameters, width)
        if rest:
            raise ValueError(f"recurrent_inner_parameters={model.recurrent_inner_parameters} must be a multiple of {width}")
        fitting = [count for count in range(1, heads + 1) if heads % count == 0 and width + 2 * count * key_dim <= columns]
        if not fitting and inner < 2 * key_dim:
            raise ValueError(
                f"recurrent_in_width={total} and conv_channels={model.conv_channels} have no columns for keys and queries of "
                f"state_key_dim={key_dim} elements"
            )
        return cls(
            heads=heads,
            key_heads=max(fitting, default=1),
            key_dim=key_dim,
            value_dim=value_dim,
            columns=columns,
            has_gate=total - columns >= width,
            inner_columns=inner,
            keys_are_inner=not fitting,
        )


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step, int64 ``[4, sequence]`` in GPU memory: first row, tokens, slot, and whether it has begun."""

    decodes: torch.Tensor
    chunks: torch.Tensor

    @classmethod
    def of(cls, chunks: Sequence[ChunkSlots], decodes: Sequence[DecodeSlots], device: torch.device) -> "Sequences":
        """Upload the sequences of a step, whose rows are those of the decodes, then of the chunks."""
        rows, row = [], len(decodes)
        for chunk in chunks:
            rows.append((row, chunk.tokens, chunk.state, int(chunk.start > 0)))
            row += chunk.tokens
        return cls(uploaded(decode_rows([item.state for item in decodes]), device), uploaded(rows, device))


def decode_rows(states: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return the sequences of requests that decode a token each."""
    return [(row, 1, state, 1) for row, state in enumerate(states)]


def uploaded(rows: Sequence[tuple[int, int, int, int]], device: torch.device) -> torch.Tensor:
    """Upload sequences without waiting for the GPU."""
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4).t().contiguous()
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


class Recurrence:
    """Runs the recurrent layers of a model on the states of its requests.

    ``states`` is ``[recurrent layer, slot, bytes]``, uint8: a layer's matrices ``[head, key, value]``, then the last inputs of
    its convolution. They are masked when read, like keys and values: any bits are numbers below 2. Keys are scaled so that states
    rarely reach that. The last slot belongs to no request.
    """

    def __init__(self, model: ModelSpec, states: torch.Tensor, buffers: Buffers) -> None:
        """Raises ValueError for a model that there is no kernel for, or states that do not fit."""
        check_states(model)
        if states.dim() != 3 or states.shape[0] != model.recurrent_layers or states.shape[2] != state_layer_bytes(model):
            raise ValueError(
                f"the states must be [layer, slot, bytes] with {model.recurrent_layers} layers of {state_layer_bytes(model)} "
                f"bytes, not {tuple(states.shape)}"
            )
        self.model, self.states, self.buffers = model, states, buffers
        self.shape = RecurrentShape.of(model)
        elements = model.state_heads * model.state_key_dim * model.state_value_dim
        matrix_bytes = elements * model.state_dtype_bytes
        bits, self.keep = BITS[model.state_dtype_bytes]
        self.matrices = [layer[:, :matrix_bytes].view(bits) for layer in states]
        if model.conv_channels:
            bits, self.keep_inputs = BITS[model.kv_dtype_bytes]
            shape = (model.conv_width - 1, model.conv_channels)
            self.inputs = [layer[:, matrix_bytes:].view(bits).unflatten(1, shape) for layer in states]

    @property
    def idle_slot(self) -> int:
        """The slot that belongs to no request."""
        return self.states.shape[1] - 1

    def weights(self, matrix: Matrix) -> dict[str, torch.Tensor]:
        """Draw the weights of one layer, by the names in ``Layer``."""
        model, shape = self.model, self.shape
        drawn = {
            "inward": matrix(model.recurrent_in_width, model.hidden_size).t(),
            "outward": matrix(model.hidden_size, shape.value_width).t(),
        }
        if model.conv_channels:
            drawn["convolution"] = matrix(model.conv_channels, model.conv_width).t().contiguous()
        if shape.inner_columns:
            drawn["inner"] = matrix(shape.inner_columns, shape.value_width).t()
        return drawn

    def run(self, index: int, layer: Layer, hidden: torch.Tensor, sequences: Sequences | None) -> None:
        """Add recurrent layer ``index`` to ``hidden``. Without ``sequences``, only the products are computed."""
        shape, tokens = self.shape, len(hidden)
        mixed = layer.project(hidden, self.buffers)
        inputs = self._convolved(index, layer, mixed, sequences)
        inner = None
        if layer.inner is not None:
            inner = torch.mm(
                inputs[:, : shape.value_width], layer.inner, out=self.buffers.take("inner", tokens, shape.inner_columns)
            )
        out = self.buffers.take("scanned", tokens, shape.value_width)
        if sequences is not None:
            self._scan(index, inputs, inner, mixed[:, -shape.heads :], out, sequences)
        if shape.has_gate:
            out.mul_(silu(mixed[:, shape.columns : shape.columns + shape.value_width]))
        hidden.addmm_(out, layer.outward)

    def _convolved(self, index: int, layer: Layer, mixed: torch.Tensor, sequences: Sequences | None) -> torch.Tensor:
        """Return values, keys and queries, concatenated."""
        inputs = mixed[:, : self.shape.columns]
        if layer.convolution is None:
            return inputs
        out = self.buffers.take("convolved", len(mixed), self.shape.columns)
        if sequences is not None:
            for table, is_decode in ((sequences.decodes, True), (sequences.chunks, False)):
                states, keep = self.inputs[index], self.keep_inputs
                convolve(inputs, layer.convolution, states, table, out, keep=keep, is_decode=is_decode)
        return out

    def _scan(
        self,
        index: int,
        inputs: torch.Tensor,
        inner: torch.Tensor | None,
        steps: torch.Tensor,
        out: torch.Tensor,
        sequences: Sequences,
    ) -> None:
        shape = self.shape
        source = inputs[:, shape.value_width :]
        if shape.keys_are_inner:
            assert inner is not None
            source = inner
        key, query = source[:, : shape.key_width], source[:, shape.key_width : 2 * shape.key_width]
        sizes = (shape.heads, shape.key_heads, shape.key_dim, shape.value_dim)
        states, keep = self.matrices[index], self.keep
        for table, is_decode in ((sequences.decodes, True), (sequences.chunks, False)):
            scan(query, key, inputs, steps, out, states, table, shape=sizes, keep=keep, is_decode=is_decode)


def state_layer_bytes(model: ModelSpec) -> int:
    """Return the bytes of a sequence's state in one recurrent layer."""
    return model.state_bytes // model.recurrent_layers


def check_states(model: ModelSpec) -> None:
    """Raise ValueError for recurrent layers that there is no kernel for."""
    if model.state_dtype_bytes not in BITS:
        raise ValueError(f"state_dtype_bytes must be 2 (bf16) or 4 (float32) on hardware, not {model.state_dtype_bytes}")
    if (n_bytes := state_layer_bytes(model)) % STATE_ALIGNMENT_BYTES:
        raise ValueError(
            f"the state of a layer must be a multiple of {STATE_ALIGNMENT_BYTES} bytes, not {n_bytes}: see state_heads"
        )
    RecurrentShape.of(model)
