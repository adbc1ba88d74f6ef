"""Base class of policies under which many leaves share a rank, and a victim gives up a page or a few before others are due."""

from abc import abstractmethod

from kvsim.core.pool import UNLIMITED
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import DEPTH, SteppingEviction
from kvsim.policies.eviction.leaf_queue import trimmed


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

    def pop(self) -> None:
        """Remove the first entry; there must be one."""
        self.head = trimmed(self.entries, self.head + 1)

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
        run = self._first_run()
        return run.entries[run.head]

    def pop(self) -> Entry:
        """Remove the first entry and return it; there must be one."""
        run = self._first_run()
        entry = run.entries[run.head]
        run.pop()
        return entry

    def _first_run(self) -> Run:
        """Return the run with the first entry; there must be one."""
        by_use, by_loss = self.by_use, self.by_loss
        if not by_loss.entries:
            return by_use
        if not by_use.entries or by_loss.entries[by_loss.head].is_before(by_use.entries[by_use.head]):
            return by_loss
        return by_use

    def is_empty(self) -> bool:
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
        self._grades: list[Grade] = []
        """By descending rank; none is empty. Leaves that have lost a page come near the end, where insertions are quick."""
        self._spare: list[Grade] = []
        """Empty ones, to be used again."""
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
            grade = self._latest = self._grade(rank)
        grade.add(entry)

    def _grade(self, rank: float) -> Grade:
        """Return the grade of a rank; a new one, to be filled at once, if there is none."""
        grades = self._grades
        low, high = 0, len(grades)
        while low < high:
            middle = (low + high) // 2
            if grades[middle].rank > rank:
                low = middle + 1
            else:
                high = middle
        if low < len(grades) and grades[low].rank == rank:
            return grades[low]
        if self._spare:
            grade = self._spare.pop()
            grade.rank = rank
        else:
            grade = Grade(rank)
        grades.insert(low, grade)
        return grade

    def _compact(self) -> None:
        """Keep one entry per leaf."""
        places: dict[Node, float] = {}
        for grade in self._grades:
            for entry in grade.all():
                node = entry.node
                if node.is_evictable(self.tier) and entry.place <= places.get(node, entry.place):
                    places[node] = entry.place
        self._grades.clear()
        self._latest = None
        self._entries = 0
        entries = [Entry(node.last_used_in(self.tier), place, node) for node, place in places.items()]
        entries.sort(key=lambda entry: (entry.used_s, entry.place))
        for entry in entries:
            self._enter(self.rank(entry.node), entry)
        self._compact_at = max(1024, 2 * self._entries)

    def next_victim(self) -> Node | None:
        tier, grades = self.tier, self._grades
        while grades:
            grade = grades[-1]
            rank, entry = grade.rank, grade.pop()
            is_alone = grade.is_empty()
            if is_alone:
                self._spare.append(grades.pop())
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
        if not self._grades:
            return UNLIMITED
        following = self._grades[-1]
        return self.pages_before(node, following.rank, used_s < following.first().used_s)
