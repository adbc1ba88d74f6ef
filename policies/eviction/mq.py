"""MQ (Zhou, Philbin and Li: The multi-queue replacement algorithm for second level buffer caches, USENIX 2001)."""

from dataclasses import dataclass

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.queues import Mark, QueueEviction, check_multiples


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class MultiQueue(QueueEviction):
    """Keeps what is used often, for as long as it is used: for lower tiers, where reuses of a page are far apart.

    queue k   LRU. A page with u uses is in queue log2(u), or in the last one; a hit adds a use and moves the page there
    expiry    a leaf that was not used while life_time pages were requested moves to the end of the next lower queue
    ghosts    use counts of the ghost * capacity pages evicted last; they count again when the page returns
    victim    the first leaf of the lowest queue that has one
    """

    queues: int = 8
    life_time: int = 10_000
    ghost: float = 4.0

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "queues", "life_time")
        check_multiples(self, "ghost")

    def count_queues(self) -> int:
        return self.queues

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.ghost_pages = self.ghost * self.capacity_pages
        self._oldest = 0
        """No leaf above queue 0 has a lower place."""

    def on_evictable(self, node: Node) -> None:
        super().on_evictable(node)
        place = self.mark(node).place
        if place < self._oldest:
            self._oldest = place

    def advance(self, pages: int) -> None:
        """Advance the clock. Places are times in pages times the number of queues, plus 1 per queue sunk: no two are equal."""
        self.clock += pages * self.queues

    def enter(self, ghost: int | None) -> Mark:
        return self._mark(1 + (ghost or 0))

    def use(self, mark: Mark) -> Mark:
        uses: int = mark.value
        return self._mark(uses + 1)

    def _mark(self, uses: int) -> Mark:
        queue, left = 0, uses >> 1
        while left and queue < self.queues - 1:
            queue, left = queue + 1, left >> 1
        return Mark(queue, self.clock, uses)

    def remember(self, extents: tuple[Extent, ...], mark: Mark) -> None:
        self.ghosts.append(extents, value=mark.value)

    def choose(self) -> tuple[int, float] | None:
        if self._oldest < self.clock - self.life_time * self.queues:
            self._expire()
        return self.first_of(0)

    def _expire(self) -> None:
        """Move leaves that were not used for a life time to lower queues."""
        life_time = self.life_time * self.queues
        expired, oldest = self.clock - life_time, self.clock
        for queue in range(self.queues - 1, 0, -1):
            leaves = self.leaves[queue]
            while (entry := leaves.first()) is not None and entry.place < expired and (leaf := self.first(queue)) is not None:
                mark = self.mark(leaf)
                if mark.place >= expired:
                    break
                self.move(leaf, Mark(queue - 1, mark.place + life_time + 1, mark.value))
        for leaves in self.leaves[1:]:
            if (entry := leaves.first()) is not None and entry.place < oldest:
                oldest = entry.place
        self._oldest = oldest
