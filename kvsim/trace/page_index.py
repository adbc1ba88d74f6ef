"""Assigns page ids to chained keys."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from kvsim.pages.extents import Extent, append_extent


class PageIndex:
    """Assigns page ids to chained keys, in the order in which the keys are first seen.

    Keys must be chained: a given key always follows the same key. The known keys of a prompt are then a prefix of it, and ids
    increase along it, so bisection finds the prefix and its extents with a few lookups per extent.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    @property
    def pages(self) -> int:
        """Number of page ids assigned so far."""
        return len(self._ids)

    def keys(self) -> list[int]:
        """Return the keys of all page ids assigned so far, in order of id."""
        return list(self._ids)

    def lookup(self, keys: Sequence[int]) -> tuple[Extent, ...]:
        """Return the page ids of a prompt with these keys as normalised extents; new keys get the next ids."""
        ids = self._ids
        known = bisect_left(keys, True, key=lambda key: key not in ids)
        extents: list[Extent] = []
        done = 0
        while done < known:
            shift = ids[keys[done]] - done
            end = bisect_right(range(known), shift, lo=done, key=lambda i: ids[keys[i]] - i)
            extents.append((shift + done, end - done))
            done = end
        if known < len(keys):
            append_extent(extents, len(ids), len(keys) - known)
            ids.update(zip(keys[known:], range(len(ids), len(ids) + len(keys) - known), strict=True))
        return tuple(extents)
