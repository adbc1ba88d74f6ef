"""Many requests: a list of them, or whatever reads them anew each time they are asked for."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from kvsim.core.request import Request


class ReadRequests(Sequence[Request]):
    """Requests that are not kept as objects: the same position may give another object each time, equal in every field."""

    @abstractmethod
    def values(self, name: str) -> Iterator[Any]:
        """Yield a field of each request, in order, at a cost that is independent of the other fields."""


def values_of(requests: Sequence[Request], name: str) -> Iterator[Any]:
    """Return a field of each request, in order."""
    return requests.values(name) if isinstance(requests, ReadRequests) else map(attrgetter(name), requests)


def fixed(requests: Sequence[Request]) -> Sequence[Request]:
    """Return requests as a sequence that nobody can append to or remove from."""
    return requests if isinstance(requests, ReadRequests) else tuple(requests)
