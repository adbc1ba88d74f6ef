"""Recurrences with a decay per head, in chunks of tokens or token by token.

Each head has a state of key by value elements: ``state = exp(-step) * state + step * key value'``, and the output is
``query' state``. This is the state-space dual form of Mamba-2 (Dao and Gu, ICML 2024, arXiv:2405.21060, section 6): within a
block of tokens the outputs are a product with a matrix of decays, and the state is carried from block to block.
"""

import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 64
"""Tokens of a block."""
MOST_VALUES = 64
"""Value elements with which one program computes."""
LEAST_DIM = 16
"""Smallest side of a matrix product on tensor cores."""


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def begin(
    states,
    sequences,
    sequence_count,
    state_stride,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEEP: tl.constexpr,
    KIND: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Return this program's key and value elements, their places in ``states``, and their state, or zeros for a new sequence."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(sequences + 2 * sequence_count + sequence)
    is_begun = tl.load(sequences + 3 * sequence_count + sequence) != 0
    key_dim = tl.arange(0, KEYS)
    value_dim = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    place = slot * state_stride + (head * KEY + key_dim)[:, None] * VALUE + value_dim[None, :]
    is_element = (key_dim < KEY)[:, None] & (value_dim < VALUE)[None, :]
    bits = tl.load(states + place, mask=is_element & is_begun, other=0) & KEEP
    return key_dim, value_dim, place, bits.to(KIND, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["sequence_count"])
def scan_kernel(
    query,
    key,
    value,
    steps,
    out,
    states,
    sequences,
    sequence_count,
    query_stride,
    key_stride,
    value_stride,
    step_stride,
    out_stride,
    state_stride,
    scale,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEEP: tl.constexpr,
    KIND: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """One program scans one sequence with VALUES value elements of one head. GROUP heads share queries and keys."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(sequences + sequence)
    tokens = tl.load(sequences + sequence_count + sequence).to(tl.int32)
    key_dim, value_dim, place, state = begin(
        states, sequences, sequence_count, state_stride, KEY, VALUE, KEEP, KIND, KEYS, VALUES
    )
    is_key, is_value = key_dim < KEY, value_dim < VALUE
    group = head // GROUP

    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_token = token < tokens
        at = row + token
        is_read = is_token[:, None] & is_key[None, :]
        asked = tl.load(query + at[:, None] * query_stride + group * KEY + key_dim[None, :], mask=is_read, other=0.0)
        keys = tl.load(key + at[:, None] * key_stride + group * KEY + key_dim[None, :], mask=is_read, other=0.0)
        is_given = is_token[:, None] & is_value[None, :]
        given = tl.load(value + at[:, None] * value_stride + head * VALUE + value_dim[None, :], mask=is_given, other=0.0)
        step = softplus(tl.load(steps + at * step_stride + head, mask=is_token, other=0.0).to(tl.float32))
        step = tl.where(is_token, step, 0.0)
        asked, keys, given = asked.to(PRODUCT), keys.to(PRODUCT), given.to(PRODUCT)
        decayed = tl.cumsum(step, 0)
        apart = decayed[None, :] - decayed[:, None]
        is_before = tl.arange(0, BLOCK)[:, None] >= tl.arange(0, BLOCK)[None, :]
        share = tl.exp(tl.where(is_before, apart, float("-inf"))) * (step * scale)[None, :]
        score = tl.dot(asked, tl.trans(keys), input_precision="ieee") * share
        result = tl.dot(score.to(PRODUCT), given, input_precision="ieee")
        before = tl.dot(asked, state.to(PRODUCT), input_precision="ieee")
        result += before * tl.exp(-decayed)[:, None]
        tl.store(
            out + at[:, None] * out_stride + head * VALUE + value_dim[None, :], result.to(out.dtype.element_ty), mask=is_given
        )
        whole = tl.sum(step, 0)
        weight = step * scale * tl.exp(decayed - whole)
        update = tl.dot(tl.trans((keys.to(tl.float32) * weight[:, None]).to(PRODUCT)), given, input_precision="ieee")
        state = state * tl.exp(-whole) + update
    bits = state.to(KIND).to(states.dtype.element_ty, bitcast=True)
    tl.store(states + place, bits, mask=is_key[:, None] & is_value[None, :])


@triton.jit(do_not_specialize=["sequence_count"])
def update_kernel(
    query,
    key,
    value,
    steps,
    out,
    states,
    sequences,
    sequence_count,
    query_stride,
    key_stride,
    value_stride,
    step_stride,
    out_stride,
    state_stride,
    scale,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEEP: tl.constexpr,
    KIND: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One program takes one sequence by its only token, with VALUES value elements of one head."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(sequences + sequence)
    key_dim, value_dim, place, state = begin(
        states, sequences, sequence_count, state_stride, KEY, VALUE, KEEP, KIND, KEYS, VALUES
    )
    is_key, is_value = key_dim < KEY, value_dim < VALUE
    group = head // GROUP
    asked = tl.load(query + row * query_stride + group * KEY + key_dim, mask=is_key, other=0.0).to(tl.float32)
    keys = tl.load(key + row * key_stride + group * KEY + key_dim, mask=is_key, other=0.0).to(tl.float32)
    given = tl.load(value + row * value_stride + head * VALUE + value_dim, mask=is_value, other=0.0).to(tl.float32)
    step = softplus(tl.load(steps + row * step_stride + head).to(tl.float32))
    state = state * tl.exp(-step) + (keys * step * scale)[:, None] * given[None, :]
    result = tl.sum(state * asked[:, None], 0)
    tl.store(out + row * out_stride + head * VALUE + value_dim, result.to(out.dtype.element_ty), mask=is_value)
    bits = state.to(KIND).to(states.dtype.element_ty, bitcast=True)
    tl.store(states + place, bits, mask=is_key[:, None] & is_value[None, :])


def scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    steps: torch.Tensor,
    out: torch.Tensor,
    states: torch.Tensor,
    sequences: torch.Tensor,
    *,
    shape: tuple[int, int, int, int],
    keep: int,
    is_decode: bool,
) -> None:
    """Advance the states of a step's sequences over their tokens and write the outputs, on the current stream.

    ``shape`` is (heads, key heads, key elements, value elements). ``query`` and ``key`` are ``[row, key head * key]``, ``value``
    and ``out`` ``[row, head * value]``, ``steps`` ``[row, head]``, the logarithms of the decays before a softplus; all may be
    parts of longer rows. Keys are divided by the square root of their elements. ``states`` is ``[slot, head * key * value]``,
    the bits of float32 or bf16 numbers as integers, masked by ``keep`` when read. ``sequences`` is as for
    ``short_convolution``: a sequence that has not begun starts from a state of zeros. With ``is_decode``, all sequences have one
    token. Products use the type of ``query`` (float32 in the interpreter) and are summed in float32.
    """
    heads, key_heads, key_dim, value_dim = shape
    if not sequences.shape[1]:
        return
    values = min(MOST_VALUES, max(LEAST_DIM, triton.next_power_of_2(value_dim)))
    grid = (sequences.shape[1], heads, triton.cdiv(value_dim, values))
    arguments = (
        query,
        key,
        value,
        steps,
        out,
        states,
        sequences,
        sequences.shape[1],
        query.stride(0),
        key.stride(0),
        value.stride(0),
        steps.stride(0),
        out.stride(0),
        states.stride(0),
        key_dim**-0.5,
    )
    sizes = {
        "GROUP": heads // key_heads,
        "KEY": key_dim,
        "VALUE": value_dim,
        "KEEP": keep,
        "KIND": tl.float32 if states.dtype == torch.int32 else tl.bfloat16,
        "KEYS": max(LEAST_DIM, triton.next_power_of_2(key_dim)),
        "VALUES": values,
    }
    if is_decode:
        update_kernel[grid](*arguments, **sizes, num_warps=4)
    else:
        product = PRODUCTS[query.dtype] if query.is_cuda else tl.float32
        scan_kernel[grid](*arguments, **sizes, BLOCK=BLOCK_TOKENS, PRODUCT=product, num_warps=4, num_stages=1)


PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
