"""S3-FIFO (Yang et al.: FIFO queues are all you need for cache eviction, SOSP 2023)."""

from dataclasses import dataclass
from typing import Any, Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extents import Extent, count_pages
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.queues import Mark, QueueEviction, check_fractions, check_multiples

SMALL: Final = 0
MAIN: Final = 1
MOST_USES: Final = 3


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class S3FIFO(QueueEviction):
    """Passes pages that are used once quickly through a small queue, so that the main queue holds those that are reused.

    small    FIFO. New pages enter here with 0 uses; a hit adds one, up to 3. With fill_main, a page that finds small full
             before the tier has evicted anything enters main
    main     FIFO. Pages with a ghost enter here, as do pages of small with at least move_threshold uses when they are about
             to leave; both start with 0 uses
    ghosts   of the ghost * capacity pages evicted last from small
    victim   main's first leaf while main has more than (1 - small) * capacity pages, else small's. A leaf of main that has
             uses moves to its end instead, with one use less
    """

    small: float = 0.1
    ghost: float = 0.9
    move_threshold: int = 2
    fill_main: bool = True

    def __post_init__(self) -> None:
        check_fractions(self, "small")
        check_multiples(self, "ghost")
        check_settings(self, Whole(1, MOST_USES), "move_threshold")
        self._is_filling = self.fill_main

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.ghost_pages = self.ghost * self.capacity_pages
        self._small_pages = self.share(self.small)
        self._main_pages = self.capacity_pages - self._small_pages

    def expect(self, extents: tuple[Extent, ...]) -> bool:
        return super().expect(extents) or self._is_filling

    def recall(self, extents: tuple[Extent, ...]) -> list[tuple[int, Any]]:
        if not self._is_filling:
            return super().recall(extents)
        pages = count_pages(extents)
        to_small = int(min(pages, max(0, self._small_pages - self.sizes[SMALL])))
        return [(to_small, None), (pages - to_small, True)] if 0 < to_small < pages else [(pages, None if to_small else True)]

    def enter(self, ghost: bool | None) -> Mark:
        return Mark(SMALL if ghost is None else MAIN, self.clock, 0)

    def use(self, mark: Mark) -> Mark:
        uses: int = mark.value
        return mark if uses == MOST_USES else Mark(mark.queue, mark.place, uses + 1)

    def remember(self, extents: tuple[Extent, ...], mark: Mark) -> None:
        self._is_filling = False
        if mark.queue == SMALL:
            self.ghosts.append(extents)

    def choose(self) -> tuple[int, float] | None:
        while True:
            surplus = float(self.sizes[MAIN]) - self._main_pages
            chosen = self.first_of(MAIN, surplus) if surplus > 0 else self.first_of(SMALL)
            if chosen is None:
                return None
            first = self.leaves[chosen[0]].first()
            assert first is not None
            leaf = first.node
            mark = self.mark(leaf)
            uses: int = mark.value
            if uses < (self.move_threshold if mark.queue == SMALL else 1):
                return chosen
            self.move(leaf, Mark(MAIN, self.end(), 0 if mark.queue == SMALL else uses - 1))
