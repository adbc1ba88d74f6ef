"""LARU (Chen et al.: Toward robust and efficient ML-based GPU caching for modern inference, arXiv:2509.20979, 2025)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, last_pages
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaves import Draws


class Use:
    """What is noted with a node: the phase of its last use, the mean time between its uses, or 0 after the first, and when that
    was. Never changes."""

    __slots__ = ("at_s", "gap_s", "phase")

    def __init__(self, phase: int, gap_s: float, at_s: float) -> None:
        self.phase = phase
        self.gap_s = gap_s
        self.at_s = at_s


class Entry:
    """A leaf, with its last use and where it ended, in pages, when it was entered."""

    __slots__ = ("end", "node", "used_s")

    def __init__(self, used_s: float, end: int, node: Node) -> None:
        self.used_s = used_s
        self.end = end
        self.node = node


def use_of(node: Node, tier: int) -> Use | None:
    """Return what is noted with a node."""
    notes = node.notes
    if isinstance(notes, list):  # so that compiled code need not ask what it is an item of
        use: Use | None = notes[tier]
        return use
    return None


def first_after(line: list[Entry], used_s: float, end: int) -> int:
    """Return the place in a line behind all leaves used before, and all of that time that end at this depth or deeper."""
    low, high = 0, len(line)
    while low < high:
        middle = (low + high) // 2
        entry = line[middle]
        if used_s < entry.used_s or used_s == entry.used_s and end > entry.end:
            high = middle
        else:
            low = middle + 1
    return low


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LearningAugmented(EvictionPolicy):
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
        check_settings(self, Whole(1), "samples")
        self.share = 1.0
        """lambda."""
        self.phase = 0
        self._used_pages = 0
        """Used in this phase."""
        self._room_pages = inf
        self._line: list[Entry] = []
        """The least recently used leaf first; among equals the deepest, then the one entered first."""
        self._compact_at = 64
        self._by_use = False
        """Whether the next victim is LRU's."""
        self._offered: Node | None = None
        self._predicted = False
        """Whether the node that was offered was chosen by prediction."""
        self._seen = self._again = 0
        """Nodes that have been used, and those of them that have been used again."""
        self._gap_s = 0.0
        self._gaps = 0

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._draws = Draws(context.rng)
        self._is_plain = type(self).score is LearningAugmented.score
        """Whether no subclass predicts otherwise."""
        self._left = ExtentOrder()
        """What has left by choice in this phase: (by prediction, used in this phase)."""
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
        use = use_of(node, self.tier)
        return -1 if use is None else use.phase

    def _note(self, node: Node, now: float) -> None:
        before = use_of(node, self.tier)
        gap_s = 0.0
        if before is None:
            self._seen += 1
        else:
            passed_s = now - before.at_s
            gap_s = (before.gap_s + passed_s) / 2 if before.gap_s else passed_s
            if before.gap_s == 0:
                self._again += 1
            self._gaps += 1
            self._gap_s += (passed_s - self._gap_s) / float(self._gaps)
        node.note(self.tier, Use(self.phase, gap_s, now))

    def score(self, node: Node, now: float) -> float:
        """Return minus the seconds until the node is predicted to be used."""
        return self._score(node, now, self._first_gap_s())

    def _first_gap_s(self) -> float:
        """Return the time between uses that is predicted after the first one."""
        return self._gap_s * float(self._seen + 2) / float(self._again + 1)

    def _score(self, node: Node, now: float, first_gap_s: float) -> float:
        use = use_of(node, self.tier)
        if use is None:
            return inf
        gap_s = use.gap_s if use.gap_s else first_gap_s
        past_s = now - use.at_s
        return past_s - gap_s if past_s <= gap_s else -past_s

    # --- mistakes ----------------------------------------------------------------------------------------------------

    def on_hit(self, node: Node, now: float) -> None:
        if node.is_evictable(self.tier):  # used from another tier: it has another place in the line
            self.on_evictable(node)

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
        line, used_s, end = self._line, node.last_used_in(self.tier), node.depth + node.pages
        entry = Entry(used_s, end, node)
        if not line or used_s > line[-1].used_s:
            line.append(entry)
        else:
            line.insert(first_after(line, used_s, end), entry)
        if len(line) > self._compact_at:
            self._line = list({entry.node: entry for entry in line if self._is_current(entry)}.values())
            self._compact_at = max(64, 2 * len(self._line))

    def _is_current(self, entry: Entry) -> bool:
        node, tier = entry.node, self.tier
        if node.state[tier] != READY or node.pins[tier] or node.children_in[tier]:
            return False
        used_s = node.last_used if node.own_uses is None else node.last_used_in(tier)  # asked of each candidate: a call less
        return used_s == entry.used_s and node.depth + node.pages == entry.end

    def victims(self, now: float) -> Iterator[Node]:
        while (node := self._lowest(now)) is not None:
            self._take(node)
            self._offered = node
            yield node

    def _take(self, node: Node) -> None:
        """Remove the entries of a node."""
        line, used_s, end = self._line, node.last_used_in(self.tier), node.depth + node.pages
        place = first_after(line, used_s, end) - 1
        while place >= 0 and line[place].used_s == used_s and line[place].end == end:
            if line[place].node is node:
                del line[place]
            place -= 1

    def _lowest(self, now: float) -> Node | None:
        """Return the candidate that is predicted to be used last; None if there is no leaf."""
        entries = self._candidates()
        lowest, least, gap_s = None, inf, self._first_gap_s()
        for entry in entries:
            if not self._is_current(entry):
                continue
            score = self._score(entry.node, now, gap_s) if self._is_plain else self.score(entry.node, now)
            if lowest is None or score < least or score == least and entry.used_s < lowest.used_s:
                lowest, least = entry, score
        if lowest is None and self._line:
            lowest = self._line[0]  # all that were drawn are out of date
        return None if lowest is None else lowest.node

    def _candidates(self) -> list[Entry]:
        """Return the entries to compare, and note whether that is a prediction."""
        line = self._line
        while line and not self._is_current(line[0]):
            del line[0]
        count = 1 if self._by_use else ceil(self.share * float(len(line)))
        self._predicted = count > 1
        self._by_use = False
        if count > self.samples:
            draws, size, samples = self._draws, min(count, len(line)), self.samples
            drawn: list[Entry] = []
            while len(drawn) < samples:
                drawn.append(line[draws.place(size)])
            return drawn
        return line[:count]
