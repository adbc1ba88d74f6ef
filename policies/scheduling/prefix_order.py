"""The order of requests by what is cached of them, with in-batch duplicates last: kept up to date from round to round."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from kvsim.core.queue_view import LookUps, Waiting
from kvsim.pages.extents import page_at
from kvsim.policies.scheduling.kept_order import KeptOrder

Rank = tuple[int, int, int]
"""0, 1 for a duplicate, or NEW; the amount that the policy goes by; what decides between equals."""

NEW: Final = 2
GONE: Final[Rank] = (3, 0, 0)
SPARE: Final = 64
"""A heap is built anew when it has this many entries more than twice those that count."""


class Place:
    """A waiting request, and where it stands."""

    __slots__ = ("group", "may_be_late", "rank", "waiting")

    def __init__(self, waiting: Waiting, number: int) -> None:
        self.waiting = waiting
        self.rank: Rank = (NEW, 0, number)
        """As of the last round; until the first one, after all others."""
        self.group: Group | None = None
        self.may_be_late = False
        """Whether little of it is cached, so that it is a duplicate if another one of the group comes before it."""


Line = list[tuple[Rank, Place]]
"""A heap of places by their rank; an entry no longer counts once the rank is another."""


class Group:
    """Waiting requests that share so much of their prompts that all but the first of them can be duplicates."""

    __slots__ = ("first", "line", "size")

    def __init__(self) -> None:
        self.first: Place | None = None
        """Of those with little cached, the one that is no duplicate."""
        self.line: Line = []
        """Those with little cached."""
        self.size = 0

    def find_first(self) -> Place | None:
        """Return the one with little cached that came before the others in the last round."""
        line = self.line
        while line and not (line[0][1].may_be_late and line[0][1].rank == line[0][0]):
            heappop(line)
        return line[0][1] if line else None


class PrefixOrder(KeptOrder):
    """Least first, by an amount that depends on what is cached; duplicates after all others.

    Equals stay in the order of the last round, new ones at the end; or go by their entry into the queue.
    """

    def __init__(
        self,
        amount: Callable[[Waiting, int, bool], int],
        *,
        goes_by_entry: bool,
        shared_pages: int | None,
        check_up_to_tokens: int,
    ) -> None:
        """``amount`` is called with a request, its cached tokens, and whether it is a duplicate. One that shares its first
        ``shared_pages`` pages (None: nothing counts as shared) with one before it, and has at most ``check_up_to_tokens`` on the
        GPU, is a duplicate.
        """
        self._amount = amount
        self._goes_by_entry = goes_by_entry
        self._shared_pages = shared_pages
        self._check_up_to_tokens = check_up_to_tokens
        self._places: dict[Waiting, Place] = {}
        self._line: Line = []
        self._groups: dict[int, Group] = {}
        """By the last page that they share."""
        self._unsettled: dict[Group, None] = {}
        """Those whose first one may be another."""
        self._added = 0
        self._front = self._back = 0
        """Numbers of the places that were last put before, and after, all their equals."""

    def add(self, waiting: Waiting) -> None:
        self._added += 1
        place = self._places[waiting] = Place(waiting, self._added)
        heappush(self._line, (place.rank, place))
        head = None if self._shared_pages is None else page_at(waiting.request.runs, self._shared_pages - 1)
        if head is not None:
            place.group = self._groups.setdefault(head, Group())
            place.group.size += 1

    def remove(self, waiting: Waiting) -> None:
        place = self._places.pop(waiting)
        place.rank, group = GONE, place.group
        if group is None:
            return
        place.group = None
        group.size -= 1
        if not group.size:
            head = page_at(waiting.request.runs, (self._shared_pages or 1) - 1)
            assert head is not None
            del self._groups[head]
            self._unsettled.pop(group, None)
        elif place.may_be_late:
            self._unsettled[group] = None
        place.may_be_late = False

    def update(self, changed: Sequence[Waiting], look_ups: LookUps) -> None:
        moved: dict[Place, None] = {}
        for waiting in changed:
            place = self._places[waiting]
            moved[place] = None
            if place.group is not None:
                self._check(place, place.group, look_ups.gpu_tokens(waiting) <= self._check_up_to_tokens)
        for group in self._unsettled:
            first = group.find_first()
            if first is not group.first:
                for one in (first, group.first):
                    if one is not None and one.may_be_late:
                        moved[one] = None
                group.first = first
        self._unsettled.clear()
        self._move(sorted(moved, key=lambda place: place.rank), look_ups)

    def _check(self, place: Place, group: Group, may_be_late: bool) -> None:
        """Take note whether little of a request is cached."""
        if place.may_be_late != may_be_late:
            place.may_be_late = may_be_late
            self._unsettled[group] = None
            if may_be_late:
                heappush(group.line, (place.rank, place))

    def _move(self, places: list[Place], look_ups: LookUps) -> None:
        """Give these places, which are in the order of the last round, their new ranks."""
        ahead: list[tuple[int, int, Place]] = []
        for place in places:
            waiting, group = place.waiting, place.group
            is_late = group is not None and place.may_be_late and group.first is not place
            late, amount = int(is_late), self._amount(waiting, look_ups.cached_tokens(waiting), is_late)
            before = place.rank
            if late == before[0] and amount == before[1]:
                continue
            if self._goes_by_entry:
                self._put(place, (late, amount, waiting.entry))
            elif (late, amount) < before:
                self._back += 1
                self._put(place, (late, amount, self._back))
            else:
                ahead.append((late, amount, place))
        for late, amount, place in reversed(ahead):
            self._front -= 1
            self._put(place, (late, amount, self._front))

    def _put(self, place: Place, rank: Rank) -> None:
        place.rank = rank
        self._line = pushed(self._line, place, len(self._places))
        group = place.group
        if group is not None and place.may_be_late:
            group.line = pushed(group.line, place, group.size)

    def first(self) -> Waiting:
        line = self._line
        while line[0][1].rank != line[0][0]:
            heappop(line)
        return line[0][1].waiting

    def in_order(self) -> list[Waiting]:
        return [place.waiting for place in sorted(self._places.values(), key=lambda place: place.rank)]


def pushed(line: Line, place: Place, size: int) -> Line:
    """Return a heap with one more entry, rid of those that no longer count if they are many; ``size`` places count at most."""
    heappush(line, (place.rank, place))
    if len(line) <= 2 * size + SPARE:
        return line
    left = list({entry[1]: entry for entry in line if entry[1].rank == entry[0]}.values())
    heapify(left)
    return left
