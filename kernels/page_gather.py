"""Gathers the pages of prompts from one layer of a pool into contiguous keys and values, or latents."""

import torch
import triton
import triton.language as tl

WORD_BYTES = 4
BLOCK_WORDS = 2048
BOUNDED = {2: -0x40004001, 4: -0x40000001}
"""Mask of a word by bytes per element: all bits except the highest of each exponent."""


@triton.jit
def page_gather_kernel(pool, slots, out, page_stride, part_words, out_part, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """One program copies one block of one page's keys, values or latents."""
    index = tl.program_id(0)
    part = tl.program_id(2).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + index).to(tl.int64)
    value = tl.load(pool + slot * page_stride + part * part_words + word, mask=word < part_words)
    tl.store(out + part * out_part + index.to(tl.int64) * part_words + word, value & KEEP, mask=word < part_words)


def gather_pages(pool: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the pages in ``slots`` (int32, in GPU memory) of one layer to ``out``, in order, on the current stream.

    ``pool`` is the layer's pages ``[page, fragment]``; a fragment has a page's keys, then its values, or its latents. ``out`` is
    ``[2, tokens, ...]``, keys then values, or ``[1, tokens, ...]``, latents, with room for all tokens of the pages, in the
    element type that the bytes represent (two or four bytes). The highest bit of every exponent is cleared, as in
    ``paged_attention``. Raises ValueError if ``out`` is too small. The call returns immediately.
    """
    words, gathered = pool.view(torch.int32), out.flatten(1)
    parts = len(out)
    part_words = words.shape[1] // parts
    if len(slots) * part_words * WORD_BYTES > gathered.shape[1] * out.element_size():
        raise ValueError(f"{len(slots)} pages of {parts} x {part_words * WORD_BYTES} bytes do not fit in {tuple(out.shape)}")
    if not len(slots):
        return
    gathered = gathered.view(torch.int32)
    page_gather_kernel[(len(slots), triton.cdiv(part_words, BLOCK_WORDS), parts)](
        words,
        slots,
        gathered,
        words.stride(0),
        part_words,
        gathered.stride(0),
        KEEP=BOUNDED[out.element_size()],
        BLOCK=BLOCK_WORDS,
        num_warps=4,
    )
