"""Fills pages with words that identify their page and their position in it."""

from typing import Any

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
BLOCK_WORDS = 1024


@triton.jit
def pattern(page_id, position, page_words):
    """Return the word at ``position`` (layer by layer) of a page. All words of all pages are different.

    It is the word's number ``page_id * page_words + position + 1``, mixed by MurmurHash3's 64-bit finalizer (Appleby, 2011),
    which is a bijection.
    """
    x = (page_id * page_words + position + 1).to(tl.uint64)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return (x ^ (x >> 33)).to(tl.int64, bitcast=True)


@triton.jit
def page_fill_kernel(
    pool,
    slots,
    page_ids,
    page_stride,
    layer_stride,
    fragment_words,
    page_words,
    BLOCK: tl.constexpr,
):
    """One program fills one block of one fragment."""
    index = tl.program_id(2)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(slots + index).to(tl.int64) * page_stride + layer * layer_stride
    value = pattern(tl.load(page_ids + index), layer * fragment_words + word, page_words)
    tl.store(pool + start + word, value, mask=word < fragment_words)


def fill_pages(pool: torch.Tensor, slots: torch.Tensor, page_ids: torch.Tensor) -> None:
    """Fill the pages in ``slots`` of a pool ``[page, layer, fragment]`` with the patterns of ``page_ids``.

    ``slots`` is an int32 tensor and ``page_ids`` an int64 tensor, both in GPU memory. The pattern of a page depends neither on
    its slot nor on the pool's layout, so it can be verified wherever the page is copied. Fragments are multiples of 8 bytes.
    There may be at most 65,535 layers; lists of more than 65,535 pages take several launches.
    """
    launch(page_fill_kernel, pool, slots, page_ids)


def launch(kernel: Any, pool: torch.Tensor, *lists: torch.Tensor) -> None:
    """Run a kernel on the 8-byte words of pages; each of ``lists`` has one entry per page."""
    words = pool.view(torch.int64)
    for first in range(0, len(lists[0]), 65_535):
        parts = [entries[first : first + 65_535] for entries in lists]
        grid = (triton.cdiv(words.shape[2], BLOCK_WORDS), words.shape[1], len(parts[0]))
        kernel[grid](
            words,
            *parts,
            words.stride(0),
            words.stride(1),
            words.shape[2],
            words.shape[1] * words.shape[2],
            BLOCK=BLOCK_WORDS,
            num_warps=4,
        )
