"""Belady's MIN (Belady: A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966)."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvsim.bounds.reuse import next_uses
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import BypassEviction


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Belady(BypassEviction):
    """The most page hits that one tier can give. It knows the future: a bound for comparison, not a policy to deploy.

    next use is not a hit, or never   not kept
    next use farther away             leaves first, deepest page first
    as many as fit                    stay, whichever request brought them

    A page is next used by the next request that shares it, never after a deeper page of its path. So all kept pages with the
    same next use lie on that request's path and are what it will hit: counting pages by next use is enough. A page that the
    request may not hit, since its last token is computed anyway, need not be kept for it.

    All pages weigh the same. If partial pages count with fewer tokens, this is the optimum in pages, not in tokens.
    """

    def __post_init__(self) -> None:
        self._future: tuple[Sequence[Request], Sequence[int]] = (), ()
        self._first: list[int] = [0]
        self._uses: list[tuple[int, int]] = []

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._capacity = context.capacity_pages

    def prepare(self, requests: Sequence[Request], usable_pages: Sequence[int]) -> None:
        if self._future != (requests, usable_pages):
            self._look_ahead(requests, usable_pages)
        self._kept = [0] * len(requests)  # pages kept, by next use
        self._pages = 0
        self._number = 0
        self._farthest: list[int] = []  # a heap of next uses, negated

    def _look_ahead(self, requests: Sequence[Request], usable_pages: Sequence[int]) -> None:
        """Compute, for each request (from its index in ``_first`` on), when its pages are hit next and how many at once."""
        request, user, begin, end = next_uses([request.runs for request in requests])
        end = np.minimum(end, np.array(usable_pages, dtype=np.int64)[user])
        hit = begin < end
        self._first = np.searchsorted(request[hit], np.arange(len(requests) + 1)).tolist()
        self._uses = list(zip(user[hit].tolist(), (end - begin)[hit].tolist(), strict=True))
        self._future = requests, usable_pages

    def use(self, request: Request) -> tuple[int, int]:
        number, kept = self._number, self._kept
        self._number = number + 1
        hit_pages, kept[number] = kept[number], 0
        self._pages -= hit_pages
        for user, pages in self._uses[self._first[number] : self._first[number + 1]]:
            if not kept[user]:
                heappush(self._farthest, -user)
            kept[user] += pages
            self._pages += pages
        if self._capacity is not None and self._pages > self._capacity:
            self._shrink(self._capacity)
        return hit_pages, self._pages

    def _shrink(self, capacity_pages: int) -> None:
        farthest, kept = self._farthest, self._kept
        excess = self._pages - capacity_pages
        while excess:
            user = -farthest[0]
            if kept[user] > excess:
                kept[user] -= excess
                break
            heappop(farthest)
            excess -= kept[user]
            kept[user] = 0
        self._pages = capacity_pages
