"""What each tier has, of every request: rows of whole numbers in one array."""

from array import array

import numpy as np


class TierRows:
    """A row of whole numbers for each request, one for each tier from the top down; the lowest ones may be left out.

    Takes eight bytes for each tier, instead of the two hundred of a tuple and its numbers.
    """

    __slots__ = ("_numbers", "_rows", "_width", "missing")

    def __init__(self, rows: int, missing: int = 0) -> None:
        """Begin with ``missing`` everywhere, and with rows of no tiers, which grow to those of the longest one that is set."""
        self._rows = rows
        self._width = 0
        self._numbers = array("q")
        self.missing = missing

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[int, ...]:
        """Return a row; tiers that were left out have what is missing."""
        begin = row * self._width
        return tuple(self._numbers[begin : begin + self._width])

    def __setitem__(self, row: int, numbers: tuple[int, ...]) -> None:
        if len(numbers) > self._width:
            self._widen(len(numbers))
        begin = row * self._width
        for place in range(self._width):
            self._numbers[begin + place] = numbers[place] if place < len(numbers) else self.missing

    def _widen(self, width: int) -> None:
        """Make all rows longer."""
        wider = np.full((self._rows, width), self.missing, dtype=np.int64)
        wider[:, : self._width] = self.array(self._width)
        self._numbers, self._width = array("q", wider.tobytes()), width

    def array(self, width: int) -> np.ndarray:
        """Return all rows as an array ``[request, tier]`` of so many tiers; it shares memory with them if they have as many."""
        if not self._numbers:
            return np.full((self._rows, width), self.missing, dtype=np.int64)
        rows = np.frombuffer(self._numbers, dtype=np.int64).reshape(self._rows, self._width)
        if width == self._width:
            return rows
        wider = np.full((self._rows, width), self.missing, dtype=np.int64)
        wider[:, : self._width] = rows
        return wider
