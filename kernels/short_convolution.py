"""The short causal convolution before a recurrence, which goes on from a sequence's last inputs (Mamba: Gu and Dao, 2023,
arXiv:2312.00752, section 3.4)."""

import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 32
BLOCK_CHANNELS = 64
SLICES = 16
"""Programs that share the tokens of one long sequence and the same channels."""


@triton.jit(do_not_specialize=["sequence_count"])
def convolution_kernel(
    inputs,
    weights,
    states,
    sequences,
    out,
    sequence_count,
    channels,
    input_stride,
    state_stride,
    out_stride,
    WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program convolves some of the tokens of one sequence, in blocks, for some channels, and applies a SiLU."""
    sequence = tl.program_id(0)
    row = tl.load(sequences + sequence)
    tokens = tl.load(sequences + sequence_count + sequence).to(tl.int32)
    slot = tl.load(sequences + 2 * sequence_count + sequence)
    is_begun = tl.load(sequences + 3 * sequence_count + sequence) != 0
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    kind = inputs.dtype.element_ty
    for first in range(tl.program_id(2) * BLOCK, tokens, tl.num_programs(2) * BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_element = (token < tokens)[:, None] & is_channel[None, :]
        total = tl.zeros((BLOCK, CHANNELS), tl.float32)
        for tap in tl.static_range(WIDTH):
            before = token + (tap - WIDTH + 1)
            weight = tl.load(weights + tap * channels + channel, mask=is_channel, other=0.0).to(tl.float32)
            new = inputs + (row + before)[:, None] * input_stride + channel[None, :]
            value = tl.load(new, mask=is_element & (before >= 0)[:, None], other=0.0).to(tl.float32)
            if tap < WIDTH - 1:
                old = states + slot * state_stride + (before + (WIDTH - 1))[:, None] * channels + channel[None, :]
                kept = tl.load(old, mask=is_element & (before < 0)[:, None] & is_begun, other=0)
                value += (kept & KEEP).to(kind, bitcast=True).to(tl.float32)
            total += weight[None, :] * value
        value = total / (1.0 + tl.exp(-total))
        tl.store(out + (row + token)[:, None] * out_stride + channel[None, :], value.to(kind), mask=is_element)


@triton.jit(do_not_specialize=["sequence_count"])
def last_inputs_kernel(
    inputs,
    states,
    sequences,
    sequence_count,
    channels,
    input_stride,
    state_stride,
    WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program keeps the last WIDTH - 1 inputs of one sequence, for some channels. It never writes what it still reads."""
    sequence = tl.program_id(0)
    row = tl.load(sequences + sequence)
    tokens = tl.load(sequences + sequence_count + sequence)
    slot = tl.load(sequences + 2 * sequence_count + sequence)
    is_begun = tl.load(sequences + 3 * sequence_count + sequence) != 0
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    state = states + slot * state_stride + channel
    for at in tl.static_range(WIDTH - 1):
        token = tokens - (WIDTH - 1) + at
        new = tl.load(inputs + (row + token) * input_stride + channel, mask=is_channel & (token >= 0), other=0.0)
        old = tl.load(state + (tokens + at) * channels, mask=is_channel & (token < 0) & is_begun, other=0)
        bits = tl.where(token >= 0, new.to(states.dtype.element_ty, bitcast=True), old & KEEP)
        tl.store(state + at * channels, bits, mask=is_channel)


def convolve(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    states: torch.Tensor,
    sequences: torch.Tensor,
    out: torch.Tensor,
    *,
    keep: int,
    is_decode: bool,
) -> None:
    """Convolve the sequences of a step along their tokens, apply a SiLU, and keep their last inputs, on the current stream.

    ``inputs`` and ``out`` are ``[row, channel]`` and may be parts of longer rows; ``weights`` is ``[width, channel]``, the newest
    token last. ``states`` is ``[slot, width - 1, channel]``, the bits of each slot's last inputs as integers, masked by ``keep``
    when read; only the slots may have gaps. ``sequences`` is int64 ``[4, sequence]`` in GPU memory: first row, tokens, slot, and
    whether the slot has inputs from before; otherwise they count as 0. With ``is_decode``, all sequences have one token.
    """
    width, channels = weights.shape
    grid = (sequences.shape[1], triton.cdiv(channels, BLOCK_CHANNELS))
    if not sequences.shape[1]:
        return
    convolution_kernel[(*grid, 1 if is_decode or not inputs.is_cuda else SLICES)](
        inputs,
        weights,
        states,
        sequences,
        out,
        sequences.shape[1],
        channels,
        inputs.stride(0),
        states.stride(0),
        out.stride(0),
        WIDTH=width,
        KEEP=keep,
        BLOCK=1 if is_decode else BLOCK_TOKENS,
        CHANNELS=BLOCK_CHANNELS,
        num_warps=4,
    )
    last_inputs_kernel[grid](
        inputs,
        states,
        sequences,
        sequences.shape[1],
        channels,
        inputs.stride(0),
        states.stride(0),
        WIDTH=width,
        KEEP=keep,
        CHANNELS=BLOCK_CHANNELS,
        num_warps=2,
    )
