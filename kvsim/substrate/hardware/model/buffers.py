"""Memory that the steps of a transformer reuse."""

import torch


class Buffers:
    """Tensors by name and width that grow to the needs of the largest step. All steps must use one stream."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Return the first rows of a buffer, with whatever content."""
        buffer = self._buffers.get((name, width))
        if buffer is None or len(buffer) < rows:
            self._buffers.pop((name, width), None)
            buffer = self._buffers[name, width] = torch.empty(rounded(rows), width, dtype=self.dtype, device=self.device)
        return buffer[:rows]

    def all(self) -> list[torch.Tensor]:
        """Return all buffers."""
        return list(self._buffers.values())


def rounded(rows: int) -> int:
    """Round up to a power of two, so that buffers rarely grow."""
    return 1 << max(0, rows - 1).bit_length()
