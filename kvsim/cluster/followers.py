"""Requests that wait for others: they arrive when these have ended, or are never sent."""

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvsim.core.request import Request
from kvsim.core.requests import values_of

NUMBERS: Final = "i"
"""The type of array that positions in a trace are kept in."""


class Followers:
    """Who waits for whom, by the indices of requests.

    Takes eight bytes for each request, and four for each that waits for another.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._awaited: dict[int, int] = {}
        """How many requests a request still waits for, of those that wait for several."""
        self._unsent: set[int] = set()
        """Those that are never sent."""
        after = np.fromiter(values_of(requests, "after"), np.int64, len(requests))
        numbers = np.fromiter(values_of(requests, "index"), np.int64, len(requests))
        waiting = np.flatnonzero(after >= 0)
        before, number = [after[waiting]], [numbers[waiting]]
        for position, joins in enumerate(values_of(requests, "joins")):
            if joins and after[position] >= 0:
                self._awaited[int(numbers[position])] = 1 + len(joins)
                before.append(np.array(joins, np.int64))
                number.append(np.full(len(joins), numbers[position]))
        awaited, own = np.concatenate(before), np.concatenate(number)
        order = np.lexsort((own, awaited))
        count = np.bincount(awaited, minlength=len(requests))
        self._numbers = _array(own[order])
        """The requests that wait, by the one that they wait for."""
        self._begins = _array(np.cumsum(count) - count)
        """Where those that wait for a request begin in ``_numbers``."""
        self._counts = _array(count)
        """How many there are; none of a request that has ended."""

    def __len__(self) -> int:
        """Return how many requests that have not ended others wait for."""
        return int(np.count_nonzero(self._counts))

    def _of(self, index: int) -> "array[int]":
        """Return the requests that wait for a request, in order; none once it has ended."""
        if index >= len(self._counts) or not self._counts[index]:  # requests that come and go wait for none
            return NOBODY
        begin = self._begins[index]
        return self._numbers[begin : begin + self._counts[index]]

    def _take(self, index: int) -> "array[int]":
        """Return the requests that wait for a request, in order, and forget them: it has ended."""
        found = self._of(index)
        if found:
            self._counts[index] = 0
        return found

    def waiting_for(self, index: int) -> list[int]:
        """Return the requests that wait for a request, and perhaps for others, in order."""
        return [number for number in self._of(index) if number not in self._unsent]

    def of_ended(self, index: int) -> list[int]:
        """A request has ended: return those that wait for none any more, in order."""
        return [number for number in self._take(index) if number not in self._unsent and self._waits_no_longer(number)]

    def of_refused(self, index: int) -> list[int]:
        """A request was refused: return those that are never sent, as they wait for it or for such a request, each once."""
        found: list[int] = []
        left = self._take(index).tolist()
        while left:
            number = left.pop(0)
            if number not in self._unsent:
                self._unsent.add(number)
                found.append(number)
                left += self._take(number)
        return found

    def _waits_no_longer(self, number: int) -> bool:
        """Note the end of a request that another one waits for; return whether it was the last one."""
        if number not in self._awaited:
            return True
        self._awaited[number] -= 1
        return not self._awaited[number]


NOBODY: Final = array(NUMBERS)


def _array(numbers: np.ndarray) -> "array[int]":
    return array(NUMBERS, numbers.astype(np.int32).tobytes())
