"""When each page of a known sequence of requests is used next, for policies that look ahead."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from kvsim.bounds.reuse import next_uses, previous_uses
from kvsim.core.request import Request
from kvsim.pages.extents import join_extents

NEVER: Final = -1


class Foresight:
    """The users of each page, by ``index``: in a sample, it is not the place. A page of an answer is used by the request itself.

    Looking ahead costs as much as ``next_uses``; a question costs O(log n) in the stretches of one prompt.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        paths = [join_extents(request.runs, request.output_runs) if request.output_runs else request.runs for request in requests]
        _, first = previous_uses(paths)
        order = first.start.argsort()
        self._starts: list[int] = first.start[order].tolist()
        indices = np.array([request.index for request in requests], dtype=np.int64)
        resets = accumulate(len(request.resets) for request in requests)
        self._resets: dict[int, int] = {request.index: number for request, number in zip(requests, resets, strict=True)}
        """For each request, the resets up to its arrival."""
        self.has_resets = any(request.resets for request in requests)
        self._owners: list[int] = indices[first.request[order]].tolist()
        uses = next_uses(paths)
        self._ends: dict[int, list[int]] = {request.index: [] for request in requests}
        """For each request, where the stretches of its path end that have one next user, in pages."""
        self._users: dict[int, list[int]] = {request.index: [] for request in requests}
        for request, user, end in zip(
            indices[uses.request].tolist(), indices[uses.other].tolist(), uses.end.tolist(), strict=True
        ):
            self._ends[request].append(end)
            self._users[request].append(user)

    def is_lost(self, request: int, user: int) -> bool:
        """Whether the cache is reset after a request (NEVER: from the beginning on) and before a later one."""
        return self.has_resets and self._resets.get(request, 0) != self._resets[user]

    def first_user(self, page: int) -> int:
        """Return the first request that has a page; NEVER if none has it."""
        at = bisect_right(self._starts, page) - 1
        return self._owners[at] if at >= 0 else NEVER

    def next_user(self, request: int, end: int) -> int:
        """Return who uses, next after a request, the page of its path that ends at a depth of ``end`` pages; NEVER if nobody."""
        at = self._stretch(request, end)
        users = self._users[request]
        return users[at] if at < len(users) else NEVER

    def pages_alike(self, request: int, end: int) -> int:
        """Return how many pages of the path, up to ``end``, have the same next user as the last of them."""
        at = self._stretch(request, end)
        return end - (self._ends[request][at - 1] if at else 0)

    def _stretch(self, request: int, end: int) -> int:
        return bisect_right(self._ends[request], end - 1)
