"""Assigns page ids to chained keys."""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import Any

from kvsim.pages.extents import Extent, append_extent


class PageIndex:
    """Assigns page ids to chained keys, in the order in which the keys are first seen.

    Keys must be chained: a given key always follows the same key. The known keys of a prompt are then a prefix of it, and ids
    increase along it, so bisection finds the prefix and its extents with a few lookups per extent.
    """

    def __init__(self) -> None:
        self._ids: dict[Any, int] = {}
        self.next_id = 0
        """The id of the next new key: no id is assigned twice."""

    @property
    def pages(self) -> int:
        """Number of page ids whose keys are known."""
        return len(self._ids)

    def keys(self) -> list[Any]:
        """Return the keys of all page ids that are known, in order of id."""
        return list(self._ids)

    def lookup(self, keys: Sequence[Hashable]) -> tuple[Extent, ...]:
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
            first, new = self.next_id, len(keys) - known
            append_extent(extents, first, new)
            ids.update(zip(keys[known:], range(first, first + new), strict=True))
            self.next_id += new
        return tuple(extents)
