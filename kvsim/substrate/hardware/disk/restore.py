"""Fills the lowest tier of an empty cache with the pages that an earlier run left there."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.tree import INCOMING
from kvsim.pages.extents import Extent, count_pages, split_extents

UNKNOWN, ABSENT = -2, -1
"""In place of a slot: a page not looked up yet, and a page that was not recovered."""

Path = tuple[tuple[Extent, ...], np.ndarray]
"""The first pages of a prompt, and the slot of each page."""


def restore(
    cache: ServedCache, requests: Sequence[Request], key: Callable[[int], bytes], recovered: Mapping[bytes, int], now: float
) -> int:
    """Add recovered pages to the lowest tier of an empty cache: the pages of each prompt up to the first missing one.

    ``recovered`` maps page keys to slots, in the order in which the pages were written; ``key`` returns the key of a page id.
    Slots of pages that no prompt can use stay free. Eviction policies are notified of inserts without a request; pages
    written later count as used later. Returns the number of pages restored. Raises ValueError if the cache is not empty, or
    if its lowest tier does not number its slots or lacks one of the slots in ``recovered``.
    """
    pool = cache.tiers[-1].pool
    if cache.tree.root.children or not isinstance(pool, SlotPool):
        raise ValueError("pages can be restored only into an empty cache whose lowest tier numbers its slots")
    paths = recovered_paths(requests, key, recovered)
    if paths:
        cache.residency.take_these(cache.tiers[-1], np.unique(np.concatenate([slots for _, slots in paths])))
    return sum([_add(cache, extents, slots, cache.residency.tick(now)) for extents, slots in paths])


def recovered_paths(requests: Sequence[Request], key: Callable[[int], bytes], recovered: Mapping[bytes, int]) -> list[Path]:
    """Return the recovered path at the head of each prompt, sorted by when the path's last page was written.

    Equal paths are listed once, and each page is looked up once.
    """
    ids = max([start + pages for request in requests for start, pages in request.runs], default=0)
    slots = np.full(ids, UNKNOWN, dtype=np.int64)
    paths: dict[int, Path] = {}
    for request in requests:
        extents, found = _first_pages(request.runs, slots, key, recovered)
        if extents:
            paths.setdefault(extents[-1][0] + extents[-1][1] - 1, (extents, found))
    written = {slot: at for at, slot in enumerate(recovered.values())}
    return sorted(paths.values(), key=lambda path: written[int(path[1][-1])])


def _first_pages(
    extents: tuple[Extent, ...], slots: np.ndarray, key: Callable[[int], bytes], recovered: Mapping[bytes, int]
) -> Path:
    """Return the path up to the first page that was not recovered. ``slots``, by page id, caches the look-ups."""
    parts = [slots[:0]]
    for start, pages in extents:
        part = slots[start : start + pages]
        for at in np.flatnonzero(part < 0).tolist():
            if part[at] == UNKNOWN:
                part[at] = recovered.get(key(start + at), ABSENT)
            if part[at] == ABSENT:
                part = part[:at]
                break
        parts.append(part)
        if len(part) < pages:
            break
    found = np.concatenate(parts)
    return split_extents(extents, len(found))[0], found


def _add(cache: ServedCache, extents: tuple[Extent, ...], slots: np.ndarray, now: float) -> int:
    """Add the part of a path that the tree lacks; the pages before it are in the lowest tier. Returns the pages added."""
    tier, residency = cache.tiers[-1], cache.residency
    tree = residency.tree
    path, rest = residency.follow(tree.root, extents)
    pages = count_pages(rest)
    if pages:
        node = tree.add(path[-1] if path else tree.root, rest, pages, now)
        residency.add_copy(node, tier, INCOMING, slots[len(slots) - pages :])
        residency.pin(node, tier)
        residency.set_ready(node, tier, now)
        residency.unpin(node, tier)
    return pages
