"""Counts the words of pages that differ from what ``page_fill`` wrote."""

import torch
import triton
import triton.language as tl

from kvsim.kernels.page_fill import launch, pattern


@triton.jit
def page_verify_kernel(
    pool,
    slots,
    page_ids,
    wrong_words,
    page_stride,
    layer_stride,
    fragment_words,
    page_words,
    BLOCK: tl.constexpr,
):
    """One program compares one block of one fragment."""
    index = tl.program_id(2)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(slots + index).to(tl.int64) * page_stride + layer * layer_stride
    expected = pattern(tl.load(page_ids + index), layer * fragment_words + word, page_words)
    is_inside = word < fragment_words
    found = tl.load(pool + start + word, mask=is_inside, other=0)
    wrong = tl.sum((is_inside & (found != expected)).to(tl.int32), axis=0)
    tl.atomic_add(wrong_words + index, wrong, mask=wrong > 0)


def verify_pages(pool: torch.Tensor, slots: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
    """Return how many 8-byte words of each page in ``slots`` differ from the pattern of its id in ``page_ids``.

    Arguments are those of ``fill_pages``. The result is an int32 tensor in GPU memory with one entry per page; this call does not
    wait for it.
    """
    wrong = torch.zeros(len(slots), dtype=torch.int32, device=slots.device)
    launch(page_verify_kernel, pool, slots, page_ids, wrong)
    return wrong
