"""Requests that wait for others: they arrive when these have ended, or are never sent."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.core.requests import values_of


class Followers:
    """Who waits for whom, by the indices of requests."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._of: dict[int, list[int]] = {}
        """The requests that wait for a request."""
        self._awaited: dict[int, int] = {}
        """How many requests a request still waits for, of those that wait for several."""
        self._unsent: set[int] = set()
        """Those that are never sent."""
        fields = (values_of(requests, name) for name in ("index", "after", "joins"))
        for index, after, joins in zip(*fields, strict=True):
            if after < 0:
                continue
            for other in (after, *joins):
                self._of.setdefault(other, []).append(index)
            if joins:
                self._awaited[index] = 1 + len(joins)

    def __len__(self) -> int:
        """Return how many requests that have not ended others wait for."""
        return len(self._of)

    def waiting_for(self, index: int) -> list[int]:
        """Return the requests that wait for a request, and perhaps for others, in order."""
        return [number for number in self._of.get(index, ()) if number not in self._unsent]

    def of_ended(self, index: int) -> list[int]:
        """A request has ended: return those that wait for none any more, in order."""
        if index not in self._of:
            return []
        return [number for number in self._of.pop(index) if number not in self._unsent and self._waits_no_longer(number)]

    def of_refused(self, index: int) -> list[int]:
        """A request was refused: return those that are never sent, as they wait for it or for such a request, each once."""
        found: list[int] = []
        left = self._of.pop(index, [])
        while left:
            number = left.pop(0)
            if number not in self._unsent:
                self._unsent.add(number)
                found.append(number)
                left += self._of.pop(number, [])
        return found

    def _waits_no_longer(self, number: int) -> bool:
        """Note the end of a request that another one waits for; return whether it was the last one."""
        if number not in self._awaited:
            return True
        self._awaited[number] -= 1
        return not self._awaited[number]
