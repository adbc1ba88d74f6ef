"""Extents of page ids, and arithmetic on them.

A page id names a page together with everything before it, so equal ids mean equal prefixes. An extent ``(start, pages)`` stands
for the consecutive ids ``start ... start + pages - 1`` along one path. Extents are normalised if none begins where the previous
one ends.
"""

from bisect import bisect_right
from collections.abc import Iterable

Extent = tuple[int, int]

CLASS = 1 << 48
"""Larger than any quotient of a page id: keeps the residue classes of page ids apart."""


def count_pages(extents: Iterable[Extent]) -> int:
    """Return the number of pages in all extents."""
    count = 0
    for _, pages in extents:
        count += pages
    return count


def append_extent(extents: list[Extent], start: int, pages: int) -> None:
    """Append an extent in place; extend the last extent if the new one continues it."""
    if extents and extents[-1][0] + extents[-1][1] == start:
        extents[-1] = (extents[-1][0], extents[-1][1] + pages)
    else:
        extents.append((start, pages))


def split_extents(extents: tuple[Extent, ...], pages: int) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Split extents into the first ``pages`` pages and the rest."""
    for i, (start, length) in enumerate(extents):
        if pages <= length:
            upper = (*extents[:i], (start, pages)) if pages else extents[:i]
            lower = ((start + pages, length - pages),) if pages < length else ()
            return upper, lower + extents[i + 1 :]
        pages -= length
    return extents, ()


def drop_last_pages(extents: tuple[Extent, ...], pages: int) -> tuple[Extent, ...]:
    """Return the extents without their last ``pages`` pages; they must have more than that."""
    at = len(extents) - 1
    while pages >= extents[at][1]:
        pages -= extents[at][1]
        at -= 1
    start, length = extents[at]
    return (*extents[:at], (start, length - pages))


def last_pages(extents: tuple[Extent, ...], pages: int) -> tuple[Extent, ...]:
    """Return the last ``pages`` pages, 1 or more; the extents must have at least that many."""
    at = len(extents) - 1
    while pages > extents[at][1]:
        pages -= extents[at][1]
        at -= 1
    start, length = extents[at]
    return ((start + length - pages, pages), *extents[at + 1 :])


def join_extents(first: tuple[Extent, ...], second: tuple[Extent, ...]) -> tuple[Extent, ...]:
    """Join the extents of a path with the extents that follow on it."""
    if not (first and second):
        return first or second
    start, pages = first[-1]
    if start + pages == second[0][0]:
        if len(first) == len(second) == 1:
            return ((start, pages + second[0][1]),)
        return (*first[:-1], (start, pages + second[0][1]), *second[1:])
    return first + second


def pages_in_common(one: tuple[Extent, ...], other: tuple[Extent, ...]) -> int:
    """Return how many leading pages two paths share."""
    shared = 0
    for (start, pages), (other_start, other_pages) in zip(one, other, strict=False):
        if start != other_start:
            break
        shared += min(pages, other_pages)
        if pages != other_pages:
            break
    return shared


def union(extents: Iterable[Extent]) -> list[Extent]:
    """Return the pages of extents in the order of their ids, each once, as normalised extents."""
    merged: list[Extent] = []
    upto = -1
    for start, pages in sorted(extents):
        stop = start + pages
        if merged and start <= upto:
            if stop > upto:
                first = merged[-1][0]
                merged[-1] = (first, stop - first)
        else:
            merged.append((start, pages))
        upto = max(upto, stop)
    return merged


def parts_by(extent: Extent, others: list[Extent]) -> list[tuple[Extent, bool]]:
    """Cut an extent into pieces, each with whether it lies in ``others``, which are as ``union`` returns them."""
    parts: list[tuple[Extent, bool]] = []
    start, stop = extent[0], extent[0] + extent[1]
    for at in range(max(0, bisect_right(others, (start, 0)) - 1), len(others)):
        first, pages = others[at]
        if first >= stop:
            break
        begin, end = max(start, first), min(stop, first + pages)
        if begin >= end:
            continue
        if start < begin:
            parts.append(((start, begin - start), False))
        parts.append(((begin, end - begin), True))
        start = end
    if start < stop:
        parts.append(((start, stop - start), False))
    return parts


def every_last(pages: tuple[Extent, ...], share: int) -> list[Extent]:
    """Return the last page of every ``share`` pages, and of the rest at the end, as extents of names.

    Names map one-to-one to page ids, and ids that differ by ``share`` have consecutive names.
    """
    names: list[Extent] = []
    passed, last = 0, 0
    for start, length in pages:
        skipped = (-passed - 1) % share
        if skipped < length:
            append_extent(names, _name(start + skipped, share), (length - 1 - skipped) // share + 1)
        passed, last = passed + length, start + length - 1
    if passed % share:
        append_extent(names, _name(last, share), 1)
    return names


def _name(page: int, share: int) -> int:
    return page % share * CLASS + page // share


def pages_named(names: Iterable[Extent], share: int) -> tuple[Extent, ...]:
    """Return the pages that ``every_last`` has given these names, for the same ``share``."""
    if share == 1:
        return tuple(names)
    return tuple([((start + at) % CLASS * share + start // CLASS, 1) for start, pages in names for at in range(pages)])


def page_at(extents: tuple[Extent, ...], depth: int) -> int | None:
    """Return the page that ``depth`` pages come before; None if the extents have no more than that."""
    for start, pages in extents:
        if depth < pages:
            return start + depth
        depth -= pages
    return None
