"""The previous and the next user of each page, for a whole trace in one pass, at a cost that grows with extents, not pages."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvsim.pages.extents import Extent

Paths = Sequence[tuple[Extent, ...]]
"""The extents of each request, in trace order."""


class Uses(NamedTuple):
    """Stretches of prompts, one entry per stretch: int64 arrays, sorted by request, then by depth.

    The pages at depths ``begin ... end - 1`` of ``request`` are also used by ``other``, and by no request between the two.
    """

    request: np.ndarray
    other: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class FirstUses(NamedTuple):
    """Extents of pages that no earlier request uses, one entry per extent: int64 arrays, sorted by request, then by depth."""

    request: np.ndarray
    depth: np.ndarray
    start: np.ndarray
    pages: np.ndarray


def previous_uses(paths: Paths) -> tuple[Uses, FirstUses]:
    """Return the previous user of the pages of each prompt, and the pages that no earlier request uses."""
    uses, first = _walk(paths)
    return Uses(*_columns(uses)), FirstUses(*_columns(first))


def next_uses(paths: Paths) -> Uses:
    """Return the next user of the pages of each prompt; ``other`` never decreases with depth. Leaves out pages not used again."""
    request, other, begin, end = _columns(_walk(paths[::-1])[0])
    last = len(paths) - 1
    order = np.argsort(last - request, kind="stable")
    return Uses(last - request[order], last - other[order], begin[order], end[order])


def _columns(flat: list[int]) -> np.ndarray:
    return np.array(flat, dtype=np.int64).reshape(-1, 4).T


def _walk(paths: Paths) -> tuple[list[int], list[int]]:
    """Return the entries of ``Uses`` and ``FirstUses``, as flat lists.

    The pages whose last user is a given request form the end of its path: its stretch, indexed by its first page. A new request
    takes over the beginnings of the stretches along its path, from the root down; its whole path then becomes its stretch. Each
    takeover shortens one stretch, so a request makes O(log n) of them, amortized.
    """
    owner: dict[int, int] = {}
    place = [0] * len(paths)  # index of the extent of the owner's path in which its stretch begins
    uses: list[int] = []
    first: list[int] = []
    for number, extents in enumerate(paths):
        if not extents:
            continue
        depth, at, last = 0, 0, len(extents) - 1
        start, left = extents[0]
        while left and (other := owner.pop(start, -1)) >= 0:
            begin, others, spot = depth, paths[other], place[other]
            their_start, their_left = others[spot]
            their_left -= start - their_start
            their_start = start
            while left and their_left and start == their_start:
                agreed = left if left < their_left else their_left
                depth += agreed
                start, left = start + agreed, left - agreed
                their_start, their_left = their_start + agreed, their_left - agreed
                if not left and at < last:
                    at += 1
                    start, left = extents[at]
                if not their_left and spot + 1 < len(others):
                    spot += 1
                    their_start, their_left = others[spot]
            if their_left:
                owner[their_start] = other
                place[other] = spot
            uses += (number, other, begin, depth)
        while left:
            first += (number, depth, start, left)
            depth, at = depth + left, at + 1
            start, left = extents[at] if at <= last else (0, 0)
        owner[extents[0][0]] = number
    return uses, first
