"""Copies recurrent states between the requests that compute with them and the slots in which they are saved."""

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
BLOCK_WORDS = 1024


@triton.jit
def state_copy_kernel(
    saved,
    states,
    saved_slots,
    state_slots,
    saved_slot_stride,
    saved_layer_stride,
    state_slot_stride,
    state_layer_stride,
    layer_words,
    state_words,
    fragment_words,
    slot_words,
    UNITS: tl.constexpr,
    IS_SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program copies one block of one state. Its words, layer by layer, fill those of its UNITS slots in order."""
    state = tl.program_id(1)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_word = word < state_words
    slot = tl.load(saved_slots + state * UNITS + word // slot_words, mask=is_word, other=0).to(tl.int64)
    within = word % slot_words
    layer = within // fragment_words
    there = saved + slot * saved_slot_stride + layer * saved_layer_stride + within % fragment_words
    own = tl.load(state_slots + state).to(tl.int64) * state_slot_stride
    here = states + own + (word // layer_words) * state_layer_stride + word % layer_words
    if IS_SAVE:
        tl.store(there, tl.load(here, mask=is_word), mask=is_word)
    else:
        tl.store(here, tl.load(there, mask=is_word), mask=is_word)


def save_states(states: torch.Tensor, state_slots: torch.Tensor, saved: torch.Tensor, saved_slots: torch.Tensor) -> None:
    """Copy the states of requests to the slots in which they are saved, on the current stream.

    ``states`` is ``[layer, slot, state]`` and ``state_slots`` ``[state]``. ``saved`` is a pool ``[layer, slot, fragment]``: one
    of states alone, or one of pages, of which a state takes several; ``saved_slots`` is ``[state, unit]``. A state's bytes, layer
    by layer, fill the fragments of its slots, slot by slot. Fragments and the states of a layer are contiguous and multiples of
    16 bytes; the slots are int32 tensors on the same device. No slot may be both read and written, and targets must not repeat.
    A step waits for this copy, so it uses the whole GPU. Between GPU and host, a saved state is copied like a page, by
    ``page_copy``.

    Raises ValueError if the pools cannot be read 16 bytes at a time, if a state does not fit into its slots, or if the lists
    differ in length.
    """
    _copy(states, state_slots, saved, saved_slots, is_save=True)


def load_states(states: torch.Tensor, state_slots: torch.Tensor, saved: torch.Tensor, saved_slots: torch.Tensor) -> None:
    """Copy saved states back to the slots of requests; the arguments are those of ``save_states``."""
    _copy(states, state_slots, saved, saved_slots, is_save=False)


def _copy(
    states: torch.Tensor, state_slots: torch.Tensor, saved: torch.Tensor, saved_slots: torch.Tensor, *, is_save: bool
) -> None:
    for pool in (states, saved):
        layer_bytes = pool.shape[2] * pool.element_size()
        if pool.stride(2) != 1 or layer_bytes % 16 or pool.data_ptr() % 16:
            raise ValueError(f"a layer's state must be contiguous and a multiple of 16 bytes, not {layer_bytes} bytes")
    if len(state_slots) != len(saved_slots):
        raise ValueError(f"{len(state_slots)} states do not match {len(saved_slots)} saved ones")
    here, there = states.view(torch.int64), saved.view(torch.int64)
    state_words, slot_words = here.shape[0] * here.shape[2], there.shape[0] * there.shape[2]
    units = saved_slots.shape[1]
    if state_words > units * slot_words:
        raise ValueError(
            f"a state of {state_words * WORD_BYTES} bytes does not fit into {units} slots of {slot_words * WORD_BYTES}"
        )
    if not len(state_slots):
        return
    state_copy_kernel[(triton.cdiv(state_words, BLOCK_WORDS), len(state_slots))](
        there,
        here,
        saved_slots,
        state_slots,
        there.stride(1),
        there.stride(0),
        here.stride(1),
        here.stride(0),
        here.shape[2],
        state_words,
        there.shape[2],
        slot_words,
        UNITS=units,
        IS_SAVE=is_save,
        BLOCK=BLOCK_WORDS,
        num_warps=4,
    )
