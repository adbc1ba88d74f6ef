"""ARC (Megiddo and Modha: ARC: a self-tuning, low overhead replacement cache, FAST 2003)."""

from dataclasses import dataclass
from math import floor
from typing import Final

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.offload_order import ArcOffload, OffloadOrder
from kvsim.policies.eviction.offload_order_by_use import ArcByUse
from kvsim.policies.eviction.queues import Mark, QueueEviction, forget_beyond

ONCE: Final = 0
AGAIN: Final = 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ARC(QueueEviction):
    """Splits the tier between pages used once (T1) and pages used again (T2), and adapts the split to what it evicts too early.

    T1, T2   LRU each. A page enters T1, or T2 if a ghost list knows it; a hit moves it to T2
    B1, B2   ghosts of pages evicted from T1 and T2: |T1| + |B1| <= capacity, all four <= 2 capacities
    p        pages that T1 should have, initially 0. A request with m pages in B1 and n in B2 adds ``m max(1, |B2| / |B1|)
             - n max(1, |B1| / |B2|)``, once, by the sizes when it arrives; p stays between 0 and the capacity
    victim   the first leaf of T1 while T1 has more than p pages, else that of T2
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.target_pages = 0.0
        """p, the pages that T1 should have."""
        self.b1 = ExtentOrder()
        self.b2 = ExtentOrder()
        """The value of a ghost is whether p has been adjusted for it; its page then is about to enter the tier."""

    def expect(self, extents: tuple[Extent, ...]) -> bool:
        if not (self.b1.may_hold(extents) or self.b2.may_hold(extents)):
            return False
        pieces = [[piece for piece in ghosts.pieces(extents) if piece[1] is not None] for ghosts in (self.b1, self.b2)]
        in_b1, in_b2 = pieces
        if not in_b1 and not in_b2:
            return False
        self._adapt(uncounted_pages(in_b1), uncounted_pages(in_b2))
        self.b1.append([extent for extent, _ in in_b1], value=True)
        self.b2.append([extent for extent, _ in in_b2], value=True)
        return True

    def _adapt(self, of_b1: int, of_b2: int) -> None:
        b1, b2 = self.b1.pages, self.b2.pages
        more = of_b1 * max(1.0, b2 / b1) if of_b1 else 0.0
        less = of_b2 * max(1.0, b1 / b2) if of_b2 else 0.0
        self.target_pages = min(max(self.target_pages + more - less, 0.0), self.capacity_pages)

    def recall(self, extents: tuple[Extent, ...]) -> list[tuple[int, bool | None]]:
        pieces: list[tuple[Extent, bool | None]] = []
        of_b1 = of_b2 = 0
        for piece in self.b1.pieces(extents):
            if piece[1] is not None:
                pieces.append(piece)
                of_b1 += 0 if piece[1] else piece[0][1]
            else:
                more = self.b2.pieces((piece[0],))
                pieces += more
                of_b2 += uncounted_pages(more)
        if of_b1 or of_b2:
            self._adapt(of_b1, of_b2)
        if len(pieces) > 1 or pieces[0][1] is not None:
            self.b1.remove(extents)
            self.b2.remove(extents)
        return [(pages, ghost) for (_, pages), ghost in pieces]

    def enter(self, ghost: bool | None) -> Mark:
        return Mark(ONCE if ghost is None else AGAIN, self.clock)

    def on_insert(self, node: Node, now: float) -> None:
        super().on_insert(node, now)
        once, again = self.sizes
        forget_beyond(self.b1, self.capacity_pages - float(once))
        forget_beyond(self.b2, 2 * self.capacity_pages - float(once + again + self.b1.pages))

    def use(self, mark: Mark) -> Mark:
        return Mark(AGAIN, self.clock)

    def remember(self, extents: tuple[Extent, ...], mark: Mark) -> None:
        (self.b1 if mark.queue == ONCE else self.b2).append(extents, value=False)

    def choose(self) -> tuple[int, float] | None:
        surplus = float(self.sizes[ONCE] + self.left_pages) - self.target_pages
        return self.first_of(ONCE) if surplus > 0 else self.first_of(AGAIN, floor(-surplus) + 1)

    def offload_order(self, capacity_pages: int) -> OffloadOrder:
        return ArcOffload(capacity_pages)

    def offload_order_by_use(self, capacity_pages: int) -> OffloadOrder:
        return ArcByUse(capacity_pages)


def uncounted_pages(pieces: list[tuple[Extent, bool | None]]) -> int:
    """Return the pages of ghosts for which p has not been adjusted."""
    return sum([pages for (_, pages), counted in pieces if counted is False])
