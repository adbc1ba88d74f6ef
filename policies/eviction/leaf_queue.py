"""A queue of leaves, for policies that keep several: entries are compared without leaving compiled code."""

from typing import Any, Final

from kvsim.core.tree import Node

LEFT: Final = 64
"""Entries that have left a line, at least, before their places are freed."""


def trimmed(line: list[Any], head: int) -> int:
    """Free the places of the first ``head`` entries of a line, which have left, if all have or enough. Returns the new head."""
    if head == len(line):
        line.clear()
        return 0
    if head > LEFT and 2 * head > len(line):
        del line[:head]
        return 0
    return head


class Leaf:
    """An entry of a queue: a leaf, with what it is ordered by. Entries never change."""

    __slots__ = ("end", "node", "number", "place", "used_s")

    def __init__(self, place: int, used_s: float, end: int, number: int, node: Node) -> None:
        self.place = place
        self.used_s = used_s
        """Last use of the leaf."""
        self.end = end
        """Depth at which it ends, in pages."""
        self.number = number
        """Of the entry."""
        self.node = node

    def is_before(self, other: "Leaf") -> bool:
        """Whether this one leaves before another: lowest place, then least recently used, then deepest, then first entered."""
        if self.place != other.place:
            return self.place < other.place
        if self.used_s != other.used_s:
            return self.used_s < other.used_s
        if self.end != other.end:
            return self.end > other.end
        return self.number < other.number


class LeafQueue:
    """Leaves in order. Nothing looks for one in the middle, so entries that are out of date stay until they come first.

    Nearly all entries belong behind all others, or before them, as the parent of a leaf that has just left. So there is a line,
    which grows at its end, a stack, whose last entry comes first, and a heap for all others.
    """

    __slots__ = ("_head", "_heap", "_line", "_stack")

    def __init__(self) -> None:
        self._line: list[Leaf] = []
        """In ascending order. Empty if all have left."""
        self._head = 0
        """Entries that have left the line."""
        self._stack: list[Leaf] = []
        """In descending order."""
        self._heap: list[Leaf] = []

    def __len__(self) -> int:
        return len(self._line) - self._head + len(self._stack) + len(self._heap)

    def push(self, leaf: Leaf) -> None:
        line, stack = self._line, self._stack
        if not line or line[-1].is_before(leaf):
            line.append(leaf)
        elif not stack or leaf.is_before(stack[-1]):
            stack.append(leaf)
        else:
            self._heap.append(leaf)
            self._rise(len(self._heap) - 1)

    def first(self) -> Leaf | None:
        """Return the first entry; None if there is none."""
        line, stack, heap = self._line, self._stack, self._heap
        first = line[self._head] if line else None
        if stack and (first is None or stack[-1].is_before(first)):
            first = stack[-1]
        if heap and (first is None or heap[0].is_before(first)):
            first = heap[0]
        return first

    def remove(self, first: Leaf) -> None:
        """Remove the first entry."""
        line = self._line
        if line and line[self._head] is first:
            self._head = trimmed(line, self._head + 1)
        elif self._stack and self._stack[-1] is first:
            self._stack.pop()
        else:
            last = self._heap.pop()
            if self._heap:
                self._heap[0] = last
                self._sink()

    def all(self) -> list[Leaf]:
        """Return all entries, in no order."""
        return [*self._line[self._head :], *self._stack, *self._heap]

    def keep_latest(self, current: list[Leaf]) -> None:
        """Replace all entries by the last one of each node among these."""
        current.sort(key=_order)
        latest = {leaf.node: leaf for leaf in current}
        self._line = sorted(latest.values(), key=_order)
        self._head = 0
        self._stack.clear()
        self._heap.clear()

    def _rise(self, at: int) -> None:
        """Move the entry of a place in the heap up to where it belongs."""
        heap = self._heap
        leaf = heap[at]
        while at:
            above = (at - 1) // 2
            if not leaf.is_before(heap[above]):
                break
            heap[at] = heap[above]
            at = above
        heap[at] = leaf

    def _sink(self) -> None:
        """Move the first entry of the heap down to where it belongs."""
        heap = self._heap
        leaf, count, at = heap[0], len(heap), 0
        while (below := 2 * at + 1) < count:
            if below + 1 < count and heap[below + 1].is_before(heap[below]):
                below += 1
            if not heap[below].is_before(leaf):
                break
            heap[at] = heap[below]
            at = below
        heap[at] = leaf


def _order(leaf: Leaf) -> tuple[int, float, int, int]:
    return leaf.place, leaf.used_s, -leaf.end, leaf.number
