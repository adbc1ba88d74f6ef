"""The leaves of a tier, for policies that draw some of them."""

from typing import Final

import numpy as np

from kvsim.core.tree import Node

AHEAD: Final = 1024
"""Numbers drawn at once: a call of numpy for each victim takes longer than to compare its leaves."""
UNKNOWN: Final = 0.0
"""What a leaf is worth before its policy has asked."""


class Draws:
    """Numbers of a generator, from 0 to below 1, in the order in which it would draw them one by one."""

    __slots__ = ("_at", "_numbers", "_rng")

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._numbers: list[float] = []
        self._at = 0
        """Those that have been taken."""

    def next(self) -> float:
        """Return the next number."""
        at = self._at
        if at == len(self._numbers):
            self._numbers = self._rng.random(AHEAD).tolist()
            at = 0
        self._at = at + 1
        return self._numbers[at]

    def take(self, count: int) -> list[float]:
        """Return the next ``count`` numbers."""
        end = self._at + count
        while end > len(self._numbers):
            self._numbers = self._numbers[self._at :] + self._rng.random(AHEAD).tolist()
            self._at, end = 0, count
        numbers = self._numbers[self._at : end]
        self._at = end
        return numbers


class Leaf:
    """A node that is a leaf, or has been one, with what its policy compares it by.

    What is drawn is spread over memory. To read one such object takes a quarter of the time of asking a node and its lists.
    """

    __slots__ = ("due", "is_leaf", "node", "place", "used_s", "worth")

    def __init__(self, node: Node, used_s: float) -> None:
        self.node = node
        self.used_s = used_s
        """Last use of the node; of one that is used while it is evictable, if the policy passes hits on to ``use``."""
        self.is_leaf = True
        self.place = 0
        """In the list of all."""
        self.worth = 1.0
        """For the policy, as is the next one."""
        self.due = UNKNOWN
        """The next use, if the policy knows it; ``UNKNOWN`` again whenever the node is announced."""


class Leaves:
    """Leaves in a list without order: adding, removing and drawing one take constant time.

    One that is no leaf any more stays in its place until it is drawn.
    """

    __slots__ = ("_are_shared", "_draws", "_tier", "all", "of")

    def __init__(self, tier: int, rng: np.random.Generator) -> None:
        self.all: list[Leaf] = []
        self.of: dict[Node, Leaf] = {}
        self._tier = tier
        self._draws = Draws(rng)
        self._are_shared = False
        """Whether several GPU tiers share the nodes: not all uses by requests of the others are announced."""

    def add(self, node: Node) -> None:
        """Add a node, or note that one that is there is a leaf again or has changed."""
        leaf = self.of.get(node)
        if leaf is None:
            leaf = self.of[node] = Leaf(node, node.last_used_in(self._tier))
            leaf.place = len(self.all)
            self.all.append(leaf)
            if node.own_uses is not None:
                self._are_shared = True
        else:
            leaf.is_leaf, leaf.due = True, UNKNOWN
            leaf.used_s = node.last_used_in(self._tier)

    def lose(self, node: Node) -> None:
        """Note that a node is no leaf any more."""
        if (leaf := self.of.get(node)) is not None:
            leaf.is_leaf = False

    def use(self, node: Node) -> None:
        """Note that a node has been used; it need not be there."""
        if (leaf := self.of.get(node)) is not None:
            leaf.used_s = node.last_used_in(self._tier)

    def remove(self, leaf: Leaf) -> None:
        """Remove a leaf that is there; the last one takes its place."""
        last = self.all.pop()
        if last is not leaf:
            self.all[leaf.place] = last
            last.place = leaf.place
        del self.of[leaf.node]

    def sample(self, count: int) -> list[Leaf]:
        """Return all leaves or, if there are more, ``count`` drawn with replacement. Removes what is none any more where it is met."""
        leaves = self.all
        if len(leaves) > count:
            leaves = self._draw(count)
        else:
            for leaf in [leaf for leaf in leaves if not leaf.is_leaf]:
                self.remove(leaf)
        if self._are_shared:
            for leaf in leaves:
                leaf.used_s = leaf.node.last_used_in(self._tier)
        return leaves

    def _draw(self, count: int) -> list[Leaf]:
        """Draw leaves. After one that is none any more has been removed, the same number draws again, and those after it."""
        drawn: list[Leaf] = []
        everything, numbers = self.all, self._draws.take(count)
        while everything:
            size = float(len(everything))
            leaves = [everything[int(number * size)] for number in numbers]
            good = count_leaves(leaves)
            if good == len(leaves):
                return drawn + leaves if drawn else leaves
            self.remove(leaves[good])
            drawn += leaves[:good]
            numbers = numbers[good:]
        return drawn


def count_leaves(leaves: list[Leaf]) -> int:
    """Return how many there are before the first one that is no leaf any more."""
    count = 0
    for leaf in leaves:
        if not leaf.is_leaf:
            break
        count += 1
    return count


def least_recently_used(leaves: list[Leaf]) -> Leaf:
    """Return the leaf that was used longest ago, the first of equals; there must be one."""
    oldest = leaves[0]
    for leaf in leaves:
        if leaf.used_s < oldest.used_s:
            oldest = leaf
    return oldest


class Pool:
    """Nodes in a list without order, of which none is removed but the one that is drawn: so nobody notes their places."""

    __slots__ = ("members", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.members: set[Node] = set()

    def add(self, node: Node) -> None:
        """Add a node; one that is there already stays."""
        if node not in self.members:
            self.members.add(node)
            self.nodes.append(node)

    def take(self, fraction: float) -> Node:
        """Remove the node at a fraction, from 0 to below 1, of the list, and return it; the last one takes its place."""
        nodes = self.nodes
        count = float(len(nodes))
        place = int(fraction * count)
        node, last = nodes[place], nodes.pop()
        if last is not node:
            nodes[place] = last
        self.members.remove(node)
        return node
