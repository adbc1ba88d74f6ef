"""Base class of policies under which many leaves share a rank, and a victim gives up a page or a few before others are due."""

from abc import abstractmethod
from heapq import heappop, heappush
from typing import Final

from kvsim.core.pool import UNLIMITED
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import DEPTH, SteppingEviction

LEFT: Final = 64
"""Entries that have left a run, at least, before their places are freed."""


class Entry:
    """A leaf: its last use, and its place among equals, which lie on one path; the deepest leaves first."""

    __slots__ = ("node", "place", "used_s")

    def __init__(self, used_s: float, place: float, node: Node) -> None:
        self.used_s = used_s
        self.place = place
        self.node = node

    def is_before(self, other: "Entry") -> bool:
        """Whether this one leaves before another one of the same rank."""
        return self.used_s < other.used_s or self.used_s == other.used_s and self.place < other.place


class Run:
    """Entries in ascending order."""

    __slots__ = ("entries", "head")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        """Empty if all have left."""
        self.head = 0
        """Entries that have left."""

    def first(self) -> Entry | None:
        entries = self.entries
        return entries[self.head] if entries else None

    def pop(self) -> None:
        """Remove the first entry; there must be one."""
        entries = self.entries
        head = self.head + 1
        if head == len(entries):
            entries.clear()
            head = 0
        elif head > LEFT and 2 * head > len(entries):
            del entries[:head]
            head = 0
        self.head = head

    def insert(self, entry: Entry) -> None:
        """Insert an entry where it belongs."""
        entries = self.entries
        low, high = self.head, len(entries)
        while low < high:
            middle = (low + high) // 2
            if entry.is_before(entries[middle]):
                high = middle
            else:
                low = middle + 1
        entries.insert(low, entry)


class Grade:
    """The leaves of one rank, as two runs: those that came to it by use, and those that came by the loss of pages.

    Both come in order, the least recently used first, so that nearly every entry goes to the end of one of the runs.
    """

    __slots__ = ("by_loss", "by_use", "rank")

    def __init__(self, rank: float) -> None:
        self.rank = rank
        self.by_use, self.by_loss = Run(), Run()

    def add(self, entry: Entry) -> None:
        run = self.by_use.entries
        if not run or run[-1].is_before(entry):
            run.append(entry)
            return
        run = self.by_loss.entries
        if not run or run[-1].is_before(entry):
            run.append(entry)
        else:
            self.by_loss.insert(entry)

    def first(self) -> Entry:
        """Return the entry of the leaf that leaves first; there must be one."""
        one, other = self.by_use.first(), self.by_loss.first()
        if one is None or other is not None and other.is_before(one):
            one = other
        assert one is not None
        return one

    def pop(self, entry: Entry) -> bool:
        """Remove the first entry. Returns whether that was the last one."""
        run = self.by_use
        if run.first() is not entry:
            run = self.by_loss
        run.pop()
        return not self.by_use.entries and not self.by_loss.entries

    def all(self) -> list[Entry]:
        return [*self.by_use.entries[self.by_use.head :], *self.by_loss.entries[self.by_loss.head :]]


@mypyc_attr(allow_interpreted_subclasses=True)
class GradedEviction(SteppingEviction):
    """Evicts by a rank that depends on the node alone, lowest first, and among equals the least recently used first.

    A leaf ranks higher once it has lost its last page. So a victim gives up one page or, if it is alone at its rank, as many as
    leave before the leaves of the next rank; then it is announced again. Entries whose leaf has left, or ranks higher now, are
    dropped or corrected when they reach the front. A policy that lowers the rank of an evictable node must call ``enter``.
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._grades: dict[float, Grade] = {}
        """By rank; none is empty."""
        self._ranks: list[float] = []
        """A heap of the ranks of ``_grades``."""
        self._first: Grade | None = None
        """That of the lowest rank, if known."""
        self._latest: Grade | None = None
        """The one that an entry has been added to last, if it is not empty."""
        self._offered: Node | None = None
        self._offered_entry: Entry | None = None
        """Its entry, which has left its grade."""
        self._entries = 0
        self._made = 0
        self._compact_at = 1024

    @abstractmethod
    def rank(self, node: Node) -> float:
        """Return the node's rank; the lowest leaves first."""

    @abstractmethod
    def pages_before(self, node: Node, next_rank: float, is_earlier: bool) -> int:
        """Return how many pages a leaf that is alone at its rank loses before the next leaf is due, at least 1.

        That one has ``next_rank``; ``is_earlier`` says whether the leaf was used before it.
        """

    def on_evictable(self, node: Node) -> None:
        self.enter(node, self.rank(node), node.depth)
        if self._entries > self._compact_at:
            self._compact()

    def enter(self, node: Node, rank: float, depth: int) -> None:
        """Enter a leaf that begins at a depth, at a rank."""
        self._made += 1
        used_s, place = node.last_used_in(self.tier), float(self._made) - float(depth) * DEPTH
        if node is self._offered and (entry := self._offered_entry) is not None:
            self._offered = self._offered_entry = None
            entry.used_s, entry.place = used_s, place
            self._enter(rank, entry)
        else:
            self._enter(rank, Entry(used_s, place, node))

    def _enter(self, rank: float, entry: Entry) -> None:
        self._entries += 1
        grade = self._latest
        if grade is None or grade.rank != rank:
            grade = self._grades.get(rank)
            if grade is None:
                grade = self._grades[rank] = Grade(rank)
                heappush(self._ranks, rank)
                if self._first is not None and rank < self._first.rank:
                    self._first = None
            self._latest = grade
        grade.add(entry)

    def _compact(self) -> None:
        """Keep one entry per leaf."""
        places: dict[Node, float] = {}
        for grade in self._grades.values():
            for entry in grade.all():
                node = entry.node
                if node.is_evictable(self.tier) and entry.place <= places.get(node, entry.place):
                    places[node] = entry.place
        self._grades.clear()
        self._ranks.clear()
        self._first = self._latest = None
        self._entries = 0
        entries = [Entry(node.last_used_in(self.tier), place, node) for node, place in places.items()]
        entries.sort(key=lambda entry: (entry.used_s, entry.place))
        for entry in entries:
            self._enter(self.rank(entry.node), entry)
        self._compact_at = max(1024, 2 * self._entries)

    def next_victim(self) -> Node | None:
        tier, ranks = self.tier, self._ranks
        while ranks:
            grade = self._first
            if grade is None:
                grade = self._first = self._grades[ranks[0]]
            rank = grade.rank
            entry = grade.first()
            is_alone = grade.pop(entry)
            if is_alone:
                del self._grades[rank]
                heappop(ranks)
                self._first = None
                if self._latest is grade:
                    self._latest = None
            self._entries -= 1
            node = entry.node
            if node.state[tier] != READY or node.pins[tier] or node.children_in[tier]:
                continue
            now_ranked, used_s = self.rank(node), node.last_used_in(tier)
            if used_s != entry.used_s or now_ranked != rank:
                self._enter(now_ranked, Entry(used_s, entry.place, node))
                continue
            self.most_pages = self._pages_alone(node, used_s) if is_alone else 1
            self._offered, self._offered_entry = node, entry
            return node
        return None

    def _pages_alone(self, node: Node, used_s: float) -> int:
        if not self._ranks:
            return UNLIMITED
        next_rank = self._ranks[0]
        return self.pages_before(node, next_rank, used_s < self._grades[next_rank].first().used_s)
