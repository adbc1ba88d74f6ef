"""The leaves of a tier, for policies that draw some of them."""

from typing import TYPE_CHECKING, Final

import numpy as np

from kvsim.core.tree import Node

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int that compiled code does not box

AHEAD: Final = 1024
"""Numbers drawn at once: a call of numpy for each victim takes longer than to compare its leaves."""
BITS: Final = 24
"""The first bits of a number say which place it stands for, nearly always."""
UNKNOWN: Final = 0.0
"""When a leaf is used next before its policy has asked."""


class Draws:
    """Places in lists, drawn by numbers of a generator from 0 to below 1 in its order: int(number * size).

    The numbers stay in their array, and their first bits are read as bytes: an object for each would take most of a draw's time.
    """

    __slots__ = ("_at", "_bits", "_numbers", "_rng")

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._numbers = np.zeros(0)
        self._bits = b""
        """Of each number, in four bytes."""
        self._at: i64 = AHEAD - 1
        """The number that was taken last."""

    def place(self, size: int) -> int:
        """Take the next number. Returns its place in a list of this size."""
        self._at += 1
        if self._at == AHEAD:
            self._numbers = self._rng.random(AHEAD)
            self._bits = (self._numbers * float(1 << BITS)).astype("<u4").tobytes()
            self._at = 0
        return self.place_again(size)

    def place_again(self, size: int) -> int:
        """Return the place of the number that was taken last in a list of this size."""
        bits = self._bits
        at: i64 = 4 * self._at
        low: i64 = bits[at]
        middle: i64 = bits[at + 1]
        high: i64 = bits[at + 2]
        first: i64 = low | middle << 8 | high << 16
        count: i64 = size
        place: i64 = first * count >> BITS
        if place == (first + 1) * count >> BITS:
            return place
        return int(float(self._numbers[self._at]) * float(size))  # the other bits decide


class Leaf:
    """A node that is a leaf, or has been one, with what its policy compares it by.

    What is drawn is spread over memory. To read one such object takes a quarter of the time of asking a node and its lists.
    """

    __slots__ = ("column", "due", "is_leaf", "is_noted", "node", "place", "used_s", "worth")

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
        self.column = 0
        """A number of its own while it is in the list, below the most leaves that there have been; a table can have it there."""
        self.is_noted = False
        """For the policy, which notes a leaf in its table; False again whenever something may have changed."""


class Leaves:
    """Leaves in a list without order: adding, removing and drawing one take constant time.

    One that is no leaf any more stays in its place until it is drawn.
    """

    __slots__ = ("_are_shared", "_draws", "_free_columns", "_tier", "all", "of")

    def __init__(self, tier: int, rng: np.random.Generator) -> None:
        self.all: list[Leaf] = []
        self.of: dict[Node, Leaf] = {}
        self._tier = tier
        self._draws = Draws(rng)
        self._free_columns: list[int] = []
        self._are_shared = False
        """Whether several GPU tiers share the nodes: not all uses by requests of the others are announced."""

    def add(self, node: Node) -> None:
        """Add a node, or note that one that is there is a leaf again or has changed."""
        leaf = self.of.get(node)
        if leaf is None:
            leaf = self.of[node] = Leaf(node, node.last_used_in(self._tier))
            leaf.place = len(self.all)
            leaf.column = self._free_columns.pop() if self._free_columns else leaf.place
            self.all.append(leaf)
            if node.own_uses is not None:
                self._are_shared = True
        else:
            leaf.is_leaf, leaf.due, leaf.is_noted = True, UNKNOWN, False
            leaf.used_s = node.last_used_in(self._tier)

    def lose(self, node: Node) -> None:
        """Note that a node is no leaf any more."""
        if (leaf := self.of.get(node)) is not None:
            leaf.is_leaf = False

    def use(self, node: Node) -> None:
        """Note that a node has been used or changed; it need not be there."""
        if (leaf := self.of.get(node)) is not None:
            leaf.used_s = node.last_used_in(self._tier)
            leaf.is_noted = False

    def remove(self, leaf: Leaf) -> None:
        """Remove a leaf that is there; the last one takes its place."""
        last = self.all.pop()
        if last is not leaf:
            self.all[leaf.place] = last
            last.place = leaf.place
        del self.of[leaf.node]
        self._free_columns.append(leaf.column)

    def sample(self, count: int) -> list[Leaf]:
        """Return all leaves or, if there are more, ``count`` drawn with replacement. Removes those that it meets and are none."""
        leaves = self.all
        if len(leaves) > count:
            leaves = self._draw(count)
        else:
            for leaf in [leaf for leaf in leaves if not leaf.is_leaf]:
                self.remove(leaf)
        if self._are_shared:
            for leaf in leaves:
                leaf.used_s = leaf.node.last_used_in(self._tier)
                leaf.is_noted = False
        return leaves

    def _draw(self, count: int) -> list[Leaf]:
        """Draw leaves. A number that meets one that is none any more draws again from the others."""
        everything, draws = self.all, self._draws
        drawn: list[Leaf] = []
        left = count
        while left:
            left -= 1
            place = draws.place(len(everything))
            while everything:
                leaf = everything[place]
                if leaf.is_leaf:
                    drawn.append(leaf)
                    break
                self.remove(leaf)
                place = draws.place_again(len(everything))
        return drawn


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

    def take(self, place: int) -> Node:
        """Remove the node at this place of the list, and return it; the last one takes its place."""
        nodes = self.nodes
        node, last = nodes[place], nodes.pop()
        if last is not node:
            nodes[place] = last
        self.members.remove(node)
        return node
