"""Checks and uploads lists of pages to copy between pools."""

import numpy as np
import torch

ALIGNED_ENTRIES = 4
"""Alignment of rows in entries: each begins at a multiple of 16 bytes; otherwise kernels would be recompiled."""


def check_range(pages: np.ndarray, pool_pages: int, *, name: str) -> None:
    """Raise ValueError if ``pages`` contains a page that the pool does not have. A copy of such a page hits other memory."""
    if not len(pages):
        return
    least, most = int(pages.min()), int(pages.max())
    if least < 0 or most >= pool_pages:
        raise ValueError(f"{name} contains page {least if least < 0 else most}, but the pool has pages 0 to {pool_pages - 1}")


def check_unique(pages: np.ndarray, seen: np.ndarray, *, name: str) -> None:
    """Raise ValueError if ``pages`` contains a page twice. This takes longer than ``check_range``: do it while the GPU copies.

    ``seen`` is int32 scratch space with one entry per page of the pool; its content does not matter.
    """
    order = np.arange(len(pages), dtype=np.int32)
    seen[pages] = order
    again = np.flatnonzero(seen[pages] != order)
    if len(again):
        raise ValueError(f"{name} contains page {pages[again[0]]} twice")


def upload_page_lists(*lists: np.ndarray, device: torch.device) -> torch.Tensor:
    """Upload lists of equal length as rows of an int32 tensor on ``device``, without waiting for the GPU."""
    count = len(lists[0])
    rows = torch.empty(
        (len(lists), -(-count // ALIGNED_ENTRIES) * ALIGNED_ENTRIES), dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    for row, pages in zip(rows.numpy(), lists, strict=True):
        row[:count] = pages
    return rows.to(device, non_blocking=True)[:, :count]
