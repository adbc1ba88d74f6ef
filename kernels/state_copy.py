"""Copies recurrent states between slots in GPU memory, to save a checkpoint or to start a request from one."""

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
BLOCK_WORDS = 1024


@triton.jit
def state_copy_kernel(
    states,
    source_slots,
    target_slots,
    slot_stride,
    layer_stride,
    state_words,
    BLOCK: tl.constexpr,
):
    """One program copies one block of one layer's state."""
    pair = tl.program_id(2)
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_slots + pair).to(tl.int64) * slot_stride + layer
    target = tl.load(target_slots + pair).to(tl.int64) * slot_stride + layer
    is_inside = word < state_words
    tl.store(states + target + word, tl.load(states + source + word, mask=is_inside), mask=is_inside)


def copy_states(states: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copy the states in ``source_slots`` to ``target_slots`` of the same pool, on the current stream.

    ``states`` is ``[layer, slot, state]``; the state of a layer is contiguous and a multiple of 16 bytes. The slots are int32
    tensors on the same device. No slot may be both source and target, and targets must not repeat. A step waits for this copy,
    so it uses the whole GPU. Between GPU and host, a state is copied like a page, by ``page_copy``.

    Raises ValueError if the states cannot be read 16 bytes at a time, or if the lists differ in length.
    """
    state_bytes = states.shape[2] * states.element_size()
    if states.stride(2) != 1 or state_bytes % 16 or states.data_ptr() % 16:
        raise ValueError(f"a layer's state must be contiguous and a multiple of 16 bytes, not {state_bytes} bytes")
    if len(source_slots) != len(target_slots):
        raise ValueError(f"{len(source_slots)} source slots cannot go to {len(target_slots)} target slots")
    if not len(source_slots):
        return
    words = states.view(torch.int64)
    grid = (triton.cdiv(state_bytes // WORD_BYTES, BLOCK_WORDS), states.shape[0], len(source_slots))
    state_copy_kernel[grid](
        words,
        source_slots,
        target_slots,
        words.stride(1),
        words.stride(0),
        state_bytes // WORD_BYTES,
        BLOCK=BLOCK_WORDS,
        num_warps=4,
    )
