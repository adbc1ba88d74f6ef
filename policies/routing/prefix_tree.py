"""What a router believes is cached on each engine: the prompts that it has sent there."""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, nextafter
from typing import Any

from kvsim.core.request import Request
from kvsim.core.tree import Node, RadixTree
from kvsim.pages.extents import Extent


class Owned:
    """A node as one engine owns it."""

    def __init__(self, last_sent: float) -> None:
        self.last_sent = last_sent
        self.children = 0
        """Children that the engine owns as well."""
        self.is_queued = False
        """Whether it is in the engine's queue: every node without such children is, others may be."""


class Remembered:
    """What is remembered for one engine."""

    def __init__(self) -> None:
        self.pages = 0
        self.queue: list[tuple[float, int, Node]] = []
        """Ends of prompts, as (last sent when it was queued, number of the entry, node), a heap."""


class PrefixTree:
    """One radix tree of the prompts that all engines were sent. A node knows its owners: the engines that were sent it.

    Beyond ``max_pages`` pages of an engine, those sent least recently are forgotten for it, ends of prompts first. A node takes
    room only for its owners, and leaves the tree with the last of them; an engine owns all that precedes what it owns.
    """

    def __init__(self, engines: Sequence[int], max_pages: int) -> None:
        self._engines = {engine: Remembered() for engine in engines}
        self._max_pages = max_pages
        self._tree = RadixTree(0)
        self._now = -inf
        self._entries = 0

    def pages(self, engine: int) -> int:
        """Return how many pages are remembered for an engine."""
        return self._engines[engine].pages

    def longest(self, extents: tuple[Extent, ...]) -> tuple[int, int]:
        """Return how many leading pages of a path were sent to some engine, and that engine; (0, -1) if none were sent.

        Of several engines, the one that has had these pages longest.
        """
        path, partial, agreed, _ = self._tree.walk(self._tree.root, extents)
        if partial is not None and agreed:
            return partial.depth + agreed, next(iter(owners(partial)))
        if path:
            return path[-1].depth + path[-1].pages, next(iter(owners(path[-1])))
        return 0, -1

    def add(self, request: Request, engine: int, now: float) -> None:
        """Remember that a prompt was sent to an engine. A prompt of more than ``max_pages`` pages is not remembered."""
        if not 0 < request.prompt_pages <= self._max_pages:
            return
        self._now = max(now, nextafter(self._now, inf))  # no two prompts are sent at the same time
        tree, remembered = self._tree, self._engines[engine]
        path, partial, agreed, rest = tree.walk(tree.root, request.runs)
        if partial is not None and agreed:
            path.append(self._cut(partial, agreed))
        if rest:
            parent = path[-1] if path else tree.root
            node = tree.add(parent, rest, request.prompt_pages - parent.depth - parent.pages, now)
            node.notes = {}
            path.append(node)
        self._own(path, engine, remembered)
        self._forget_down_to(self._max_pages, engine, remembered)

    def forget(self, engine: int) -> None:
        """Forget all prompts of an engine."""
        self._forget_down_to(0, engine, self._engines[engine])

    def _own(self, path: list[Node], engine: int, remembered: Remembered) -> None:
        """Note that an engine was sent a path now."""
        above: Owned | None = None
        for node in path:
            owned = owners(node).get(engine)
            if owned is None:
                owned = owners(node)[engine] = Owned(self._now)
                remembered.pages += node.pages
                if above is not None:
                    above.children += 1
            owned.last_sent = self._now
            above = owned
        if above is not None and not above.children:
            self._queue(path[-1], above, remembered)

    def _queue(self, node: Node, owned: Owned, remembered: Remembered) -> None:
        if not owned.is_queued:
            owned.is_queued = True
            self._entries += 1
            heappush(remembered.queue, (owned.last_sent, self._entries, node))

    def _cut(self, node: Node, pages: int) -> Node:
        """Cut a node after ``pages`` pages, for all owners. Returns the upper part; ``node`` becomes the lower part."""
        upper = self._tree.cut(node, pages)
        upper.notes = above = {}
        for engine, owned in owners(node).items():  # in order, as the first owner is the one of longest standing
            above[engine] = Owned(owned.last_sent)
            above[engine].children = 1
        return upper

    def _forget_down_to(self, pages: int, engine: int, remembered: Remembered) -> None:
        """Forget what an engine was sent least recently, but for ``pages`` pages."""
        while remembered.pages > pages:
            queued_s, _, node = heappop(remembered.queue)
            owned = owners(node)[engine]
            owned.is_queued = False
            if owned.children:
                continue
            if owned.last_sent > queued_s:
                self._queue(node, owned, remembered)
            else:
                self._forget_end(node, remembered.pages - pages, engine, remembered)

    def _forget_end(self, node: Node, pages: int, engine: int, remembered: Remembered) -> None:
        """Forget the last ``pages`` pages of an end, or all of it if it has fewer."""
        left = node.pages - pages
        if left > 0 and len(owners(node)) == 1:
            self._tree.shorten(node, pages)
            remembered.pages -= pages
            self._queue(node, owners(node)[engine], remembered)
            return
        if left > 0:
            self._cut(node, left)
        remembered.pages -= node.pages
        parent = node.parent
        assert parent is not None
        del owners(node)[engine]
        if not owners(node):
            self._tree.remove(node)
        if parent.parent is not None:
            above = owners(parent)[engine]
            above.children -= 1
            if not above.children:
                self._queue(parent, above, remembered)


def owners(node: Node) -> dict[int, Owned]:
    """Return the engines that own a node, the one that has had it longest first."""
    notes: Any = node.notes
    owned: dict[int, Owned] = notes
    return owned
