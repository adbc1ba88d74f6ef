"""Runs of page ids, and arithmetic on them.

A page id names a page together with everything before it, so equal ids mean equal prefixes. A run ``(start, pages)`` stands
for the consecutive ids ``start ... start + pages - 1`` along one path. Runs are normalised if none begins where the previous
one ends.
"""

from collections.abc import Iterable

Run = tuple[int, int]

CLASS = 1 << 48
"""Larger than any quotient of a page id: keeps the residue classes of page ids apart."""


def count_pages(runs: Iterable[Run]) -> int:
    """Return the number of pages in all runs."""
    return sum([pages for _, pages in runs])


def append_run(runs: list[Run], start: int, pages: int) -> None:
    """Append a run in place; extend the last run if the new one continues it."""
    if runs and runs[-1][0] + runs[-1][1] == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + pages)
    else:
        runs.append((start, pages))


def split_runs(runs: tuple[Run, ...], pages: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Split runs into the first ``pages`` pages and the rest."""
    for i, (start, length) in enumerate(runs):
        if pages <= length:
            upper = (*runs[:i], (start, pages)) if pages else runs[:i]
            lower = ((start + pages, length - pages),) if pages < length else ()
            return upper, lower + runs[i + 1 :]
        pages -= length
    return runs, ()


def drop_last_pages(runs: tuple[Run, ...], pages: int) -> tuple[Run, ...]:
    """Return the runs without their last ``pages`` pages; they must have more than that."""
    at = len(runs) - 1
    while pages >= runs[at][1]:
        pages -= runs[at][1]
        at -= 1
    start, length = runs[at]
    return (*runs[:at], (start, length - pages))


def last_pages(runs: tuple[Run, ...], pages: int) -> tuple[Run, ...]:
    """Return the last ``pages`` pages, 1 or more; the runs must have at least that many."""
    at = len(runs) - 1
    while pages > runs[at][1]:
        pages -= runs[at][1]
        at -= 1
    start, length = runs[at]
    return ((start + length - pages, pages), *runs[at + 1 :])


def join_runs(first: tuple[Run, ...], second: tuple[Run, ...]) -> tuple[Run, ...]:
    """Join the runs of a path with the runs that follow on it; neither may be empty."""
    start, pages = first[-1]
    if start + pages == second[0][0]:
        return (*first[:-1], (start, pages + second[0][1]), *second[1:])
    return first + second


def every_last(pages: tuple[Run, ...], share: int) -> list[Run]:
    """Return the last page of every ``share`` pages, and of the rest at the end, as runs of names.

    Names map one-to-one to page ids, and ids that differ by ``share`` have consecutive names.
    """
    names: list[Run] = []
    passed, last = 0, 0
    for start, length in pages:
        skipped = (-passed - 1) % share
        if skipped < length:
            append_run(names, _name(start + skipped, share), (length - 1 - skipped) // share + 1)
        passed, last = passed + length, start + length - 1
    if passed % share:
        append_run(names, _name(last, share), 1)
    return names


def _name(page: int, share: int) -> int:
    return page % share * CLASS + page // share
