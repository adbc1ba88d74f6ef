"""Page ids from ids of any other kind."""

from collections.abc import Iterable

from kvsim.core.runs import Run, append_run


class ChainIndex:
    """Gives page ids to sequences of foreign ids that do not name what precedes them, or do so only within a scope.

    Two sequences of one scope get equal page ids exactly as far as they are equal from their beginning; sequences of
    different scopes share nothing. New page ids are consecutive. All foreign ids and their order are allowed; the work grows
    with the runs that go in and come out, not with their pages.

    A segment is a stretch of a path in which both kinds of ids count up together. The page after a given one is the next of
    its segment, or it begins a segment that is found under (page id of the given one, foreign id).
    """

    def __init__(self) -> None:
        self.pages = 0
        """Page ids handed out so far."""
        self._branches: dict[tuple[int, int], list[int]] = {}

    def lookup(self, foreign: Iterable[Run], scope: int = 0) -> tuple[Run, ...]:
        """The page ids of a sequence of foreign ids, given in runs, as normalised runs; ``scope`` is 0 or more."""
        runs: list[Run] = []
        segment = [0, 0, -scope]  # foreign id of its first page, pages, page id of its first page
        depth = 0  # pages of the segment already passed; the root is an empty segment before id -scope
        for start, pages in foreign:
            while pages:
                if depth == segment[1] or segment[0] + depth != start:
                    segment, depth = self._branch(segment, depth, start, pages)
                step = min(pages, segment[1] - depth)
                append_run(runs, segment[2] + depth, step)
                depth, start, pages = depth + step, start + step, pages - step
        return tuple(runs)

    def _branch(self, segment: list[int], depth: int, start: int, pages: int) -> tuple[list[int], int]:
        """The segment, and the place in it, where foreign id ``start`` follows the first ``depth`` pages of ``segment``.

        If it never did, the ``pages`` ids from ``start`` on become known there, by a longer segment or a new one.
        """
        place = segment[2] + depth - 1, start
        known = self._branches.get(place)
        if known is not None:
            return known, 0
        first_page = self.pages
        self.pages += pages
        if 0 < depth == segment[1] and segment[0] + depth == start and segment[2] + depth == first_page:
            segment[1] += pages
            return segment, depth
        self._branches[place] = new = [start, pages, first_page]
        return new, 0
