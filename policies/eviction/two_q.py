"""2Q (Johnson and Shasha: 2Q: a low overhead high performance buffer management replacement algorithm, VLDB 1994)."""

from dataclasses import dataclass
from math import floor
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.queues import Mark, QueueEviction, check_fractions, check_multiples

A1IN: Final = 0
AM: Final = 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class TwoQ(QueueEviction):
    """Makes pages prove themselves: only those requested again after eviction enter the main list. The full version of 2Q.

    A1in     FIFO. New pages enter here; a hit changes nothing
    A1out    ghosts of the kout * capacity pages evicted last from A1in
    Am       LRU. A page with a ghost in A1out enters here
    victim   the first leaf of A1in while it has more than kin * capacity pages, else that of Am
    """

    kin: float = 0.25
    kout: float = 0.5

    def __post_init__(self) -> None:
        check_fractions(self, "kin")
        check_multiples(self, "kout")

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.ghost_pages = self.kout * self.capacity_pages

    def enter(self, ghost: bool | None) -> Mark:
        return Mark(A1IN if ghost is None else AM, self.clock)

    def use(self, mark: Mark) -> Mark:
        return mark if mark.queue == A1IN else Mark(AM, self.clock)

    def remember(self, extents: tuple[Extent, ...], mark: Mark) -> None:
        if mark.queue == A1IN:
            self.ghosts.append(extents)

    def choose(self) -> tuple[int, float] | None:
        surplus = float(self.sizes[A1IN] + self.left_pages) - self.kin * self.capacity_pages
        return self.first_of(A1IN) if surplus > 0 else self.first_of(AM, floor(-surplus) + 1)
