"""The leaves of a tier, for policies that draw some of them."""

from typing import Final

import numpy as np

from kvsim.core.tree import Node

AHEAD: Final = 1024
"""Numbers drawn at once: a call of numpy for each victim takes longer than to compare its leaves."""


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


class Leaves:
    """Nodes in a list without order: adding, removing and drawing one take constant time.

    A node that is no leaf any more stays until it is removed: whoever draws it looks first.
    """

    __slots__ = ("nodes", "places")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.places: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        """Add a node; one that is there already stays."""
        if node not in self.places:
            self.places[node] = len(self.nodes)
            self.nodes.append(node)

    def remove(self, node: Node) -> None:
        """Remove a node that is there; the last one takes its place."""
        place, last = self.places.pop(node), self.nodes.pop()
        if last is not node:
            self.nodes[place] = last
            self.places[last] = place

    def at(self, fraction: float) -> Node:
        """Return the node at a fraction, from 0 to below 1, of the list; there must be one."""
        count = float(len(self.nodes))
        return self.nodes[int(fraction * count)]


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
