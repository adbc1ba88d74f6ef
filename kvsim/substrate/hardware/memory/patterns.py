"""The content of pages: words that identify the page they belong to, so that every reused page can be verified."""

from collections.abc import Sequence

import numpy as np
import torch

from kvsim.kernels.page_fill import fill_pages
from kvsim.kernels.page_verify import verify_pages
from kvsim.substrate.hardware.memory.page_list import ALIGNED_ENTRIES


class Patterns:
    """Fills and verifies pages of the GPU's pool ``[layer, page, fragment]``, on the current stream, without waiting for it.

    Slots are int32 tensors and page ids int64 tensors, both on the pool's device.
    """

    def __init__(self, gpu: torch.Tensor) -> None:
        self.pool = gpu.transpose(0, 1)
        self.verified_pages = 0
        """Number of pages submitted for verification."""
        self._wrong = torch.zeros(2, dtype=torch.int64, device=gpu.device)
        """Numbers of wrong words and wrong pages."""

    def reset(self) -> None:
        """Forget what was verified so far."""
        self.verified_pages = 0
        self._wrong.zero_()

    def fill(self, slots: torch.Tensor, page_ids: torch.Tensor) -> None:
        """Write the patterns of these pages."""
        fill_pages(self.pool, slots, page_ids)

    def verify(self, slots: torch.Tensor, page_ids: torch.Tensor) -> None:
        """Compare pages with their patterns; errors are summed up on the device."""
        wrong = verify_pages(self.pool, slots, page_ids)
        self._wrong += torch.stack((wrong.sum(dtype=torch.int64), (wrong > 0).sum()))
        self.verified_pages += len(slots)

    def wrong(self) -> tuple[int, int]:
        """Return the number of wrong words and of pages that contain them. Waits for the device."""
        words, pages = self._wrong.tolist()
        return words, pages


def upload(arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Upload the arrays to ``device`` in one copy, without waiting for it.

    Each array begins at an address divisible by 16; for others, Triton would recompile the kernel in the middle of a run.
    """
    ends = np.cumsum([-(-len(array) // ALIGNED_ENTRIES) * ALIGNED_ENTRIES for array in arrays], dtype=int).tolist()
    places = [slice(start, start + len(array)) for start, array in zip([0, *ends], arrays, strict=False)]
    host = torch.empty(ends[-1] if ends else 0, dtype=dtype, pin_memory=device.type == "cuda")
    for place, array in zip(places, arrays, strict=True):
        host.numpy()[place] = array
    sent = host.to(device, non_blocking=True)
    return [sent[place] for place in places]
