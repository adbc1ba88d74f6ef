"""LARU (Chen et al.: Toward robust and efficient ML-based GPU caching for modern inference, arXiv:2509.20979, 2025)."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf
from operator import itemgetter
from typing import Final

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import Node
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, last_pages
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.sampled import SampledEviction

Use = tuple[int, float, float]
"""What is noted with a node: (phase of its last use, mean time between its uses or 0 after the first, time of the last)."""
Entry = tuple[float, int, int, Node]
"""A leaf: (last use, minus its end in pages, number of the entry, node)."""
ORDER: Final = itemgetter(0, 1)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LearningAugmented(SampledEviction):
    """LARU: evicts what is predicted to be used last, among fewer of the least recently used pages the more it is wrong.

    candidates  the first lambda of all leaves by last use, at least one; the one that is predicted to be used last leaves
    mistake     a page that left by prediction is computed again in the same phase: lambda halves, and the next victim is LRU's
    phase       until other pages have been used than the tier has room for; each begins with lambda = 1

    The authors predict with gradient-boosted trees. Here the next use is the last one plus the mean time between the page's
    uses, of which each weighs as much as all before; after the first use, plus the mean of all pages / the share that was used
    again before it left. A use that is overdue is as far away as the last one is past. LCR, the system around it, is not here.

    Of more candidates than ``samples``, so many are drawn. Of equal ones, the least recently used leaves. A leaf that has come
    into use counts as one until it is drawn. A page whose first request has not finished leaves last.
    """

    samples: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.share = 1.0
        """lambda."""
        self.phase = 0
        self._used_pages = 0
        """Used in this phase."""
        self._room_pages = inf
        self._line: list[Entry] = []
        self._entries = 0
        self._compact_at = 64
        self._by_use = False
        """Whether the next victim is LRU's."""
        self._offered: Node | None = None
        self._predicted = False
        """Whether the node that was offered was chosen by prediction."""
        self._left = ExtentOrder()
        """What has left by choice in this phase: (by prediction, used in this phase)."""
        self._seen = self._again = 0
        """Nodes that have been used, and those of them that have been used again."""
        self._gap_s = 0.0
        self._gaps = 0

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        if context.capacity_pages is not None:
            self._room_pages = float(context.capacity_pages)

    # --- uses --------------------------------------------------------------------------------------------------------

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        path: list[Node] = []
        end: Node = node
        while end.parent is not None:
            path.append(end)
            end = end.parent
        fresh = sum([part.pages for part in path if self._phase_of(part) != self.phase])
        if self._used_pages + fresh > self._room_pages:
            self.phase += 1
            self.share, self._by_use = 1.0, False
            self._left = ExtentOrder()
            self._used_pages, fresh = 0, sum([part.pages for part in path])
        self._used_pages += fresh
        for part in [*path, *self.request_states]:
            self._note(part, now)

    def _phase_of(self, node: Node) -> int:
        use: Use | None = node.notes[self.tier]
        return -1 if use is None else use[0]

    def _note(self, node: Node, now: float) -> None:
        before: Use | None = node.notes[self.tier]
        gap_s = 0.0
        if before is None:
            self._seen += 1
        else:
            passed_s = now - before[2]
            gap_s = (before[1] + passed_s) / 2 if before[1] else passed_s
            self._again += before[1] == 0
            self._gaps += 1
            self._gap_s += (passed_s - self._gap_s) / self._gaps
        node.note(self.tier, (self.phase, gap_s, now))

    def score(self, node: Node, now: float) -> float:
        """Return minus the seconds until the node is predicted to be used."""
        use: Use | None = node.notes[self.tier]
        if use is None:
            return inf
        gap_s = use[1] or self._gap_s * (self._seen + 2) / (self._again + 1)
        past_s = now - use[2]
        return past_s - gap_s if past_s <= gap_s else -past_s

    # --- mistakes ----------------------------------------------------------------------------------------------------

    def on_insert(self, node: Node, now: float) -> None:
        if node.is_state or not self._left.may_hold(node.runs):
            return
        for (_, pages), left in self._left.pieces(node.runs):
            if left is None:
                continue
            by_prediction, used = left
            if used and self._phase_of(node) != self.phase:
                self._used_pages -= pages
            if by_prediction and not self._by_use:
                self.share /= 2
                self._by_use = True
        self._left.remove(node.runs)

    def on_remove(self, node: Node) -> None:
        if node is self._offered:
            self._offered = None
            self._leave(node, node.runs)

    def on_shorten(self, node: Node, pages: int) -> None:
        self._leave(node, last_pages(node.runs, pages))

    def _leave(self, node: Node, extents: tuple[Extent, ...]) -> None:
        if not node.is_state:
            self._left.append(extents, value=(self._predicted, self._phase_of(node) == self.phase))

    # --- leaves ------------------------------------------------------------------------------------------------------

    def on_evictable(self, node: Node) -> None:
        if node is self._offered:
            self._offered = None
        self._entries += 1
        insort(self._line, (node.last_used_in(self.tier), -node.depth - node.pages, self._entries, node))
        if len(self._line) > self._compact_at:
            self._line = list({entry[3]: entry for entry in self._line if self._is_current(entry)}.values())
            self._compact_at = max(64, 2 * len(self._line))

    def _is_current(self, entry: Entry) -> bool:
        node = entry[3]
        if not node.is_evictable(self.tier) or node.last_used_in(self.tier) != entry[0]:
            return False
        return -node.depth - node.pages == entry[1]

    def victims(self, now: float) -> Iterator[Node]:
        while (node := self._lowest(now)) is not None:
            self._take(node)
            self._offered = node
            yield node

    def _take(self, node: Node) -> None:
        """Remove the entries of a node."""
        line, key = self._line, (node.last_used_in(self.tier), -node.depth - node.pages)
        place = bisect_left(line, key, key=ORDER)
        while place < len(line) and ORDER(line[place]) == key:
            if line[place][3] is node:
                del line[place]
            else:
                place += 1

    def _candidates(self) -> list[Node]:
        """Return the leaves to compare."""
        line = self._line
        while line and not self._is_current(line[0]):
            del line[0]
        count = 1 if self._by_use else ceil(self.share * len(line))
        self._predicted = count > 1
        self._by_use = False
        if count <= self.samples:
            return [entry[3] for entry in line[:count] if self._is_current(entry)]
        drawn = [line[int(fraction * count)] for fraction in self._rng.random(self.samples).tolist()]
        return [entry[3] for entry in drawn if self._is_current(entry)] or [line[0][3]]
