"""W-TinyLFU (Einziger, Friedman and Manes: TinyLFU: a highly efficient cache admission policy, ACM ToS 13(4), 2017)."""

from dataclasses import dataclass
from math import floor, inf
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.queues import Mark, QueueEviction, check_fractions

WINDOW: Final = 0
PROBATION: Final = 1
PROTECTED: Final = 2
MOST_USES: Final = 15
SAMPLE: Final = 10
"""Counts are halved each time this multiple of the capacity has been requested; the same multiple of pages is remembered."""
PROTECTED_FRACTION: Final = 0.8


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WTinyLFU(QueueEviction):
    """Lets new pages into the main part of the tier only if they are used more often than the pages they would push out.

    window      LRU. New pages enter here. If the last request evicted nothing, the window's surplus moves to main when the
                next request arrives
    main        segmented LRU: pages enter probation, and a hit moves them to protected; when that has more than 80% of main,
                its first leaves move back to probation
    frequency   uses of a page, up to 15, halved after every 10 capacities of pages requested. Counted for the pages in the
                tier and for the last 10 capacities that left: exact, where the paper has a sketch of single pages
    victim      if the window is full, its first leaf, unless that is used more often than main's first leaf: then it moves to
                main. If the window is not full, main's first leaf
    """

    window: float = 0.01

    def __post_init__(self) -> None:
        check_fractions(self, "window")
        self.epoch = 0
        self._requested_pages = 0

    def count_queues(self) -> int:
        return 3

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.ghost_pages = SAMPLE * self.capacity_pages
        self.window_pages = max(1, self.share(self.window))

    def advance(self, pages: int) -> None:
        super().advance(pages)
        if not self.has_evicted:
            self.demote(WINDOW, PROBATION, self.window_pages)
        self._requested_pages += pages
        self.epoch = int(self._requested_pages // (SAMPLE * self.capacity_pages))

    def frequency(self, value: tuple[int, int]) -> int:
        uses, epoch = value
        return uses >> (self.epoch - epoch)

    def _used(self, value: tuple[int, int]) -> tuple[int, int]:
        return min(self.frequency(value) + 1, MOST_USES), self.epoch

    def enter(self, ghost: tuple[int, int] | None) -> Mark:
        return Mark(WINDOW, self.clock, self._used(ghost or (0, self.epoch)))

    def use(self, mark: Mark) -> Mark:
        return Mark(mark.queue and PROTECTED, self.clock, self._used(mark.value))

    def remember(self, extents: tuple[Extent, ...], mark: Mark) -> None:
        self.ghosts.append(extents, value=mark.value)

    def choose(self) -> tuple[int, float] | None:
        sizes, window_pages = self.sizes, self.window_pages
        protected_pages = PROTECTED_FRACTION * (self.capacity_pages - float(window_pages))
        while True:
            if float(sizes[PROTECTED]) > protected_pages:
                self.demote(PROTECTED, PROBATION, protected_pages)
            surplus = float(sizes[WINDOW] + self.left_pages + 1) - float(window_pages)
            main, victim = PROBATION, self.first(PROBATION)
            if victim is None:
                main, victim = PROTECTED, self.first(PROTECTED)
            candidate = self.first(WINDOW) if surplus > 0 else None
            if candidate is None:
                most = inf if surplus > 0 else floor(-surplus) + 1
                return self.first_of(main, most) if victim is None else (main, most)
            value = self.mark(candidate).value
            if victim is None or self.frequency(value) <= self.frequency(self.mark(victim).value):
                return WINDOW, inf
            self.move(candidate, Mark(PROBATION, self.end(), value))
