"""The radix tree over extents of page ids."""

from collections.abc import Iterator
from typing import Any, Final

from kvsim.core.pool import UNLIMITED
from kvsim.pages.extents import Extent, drop_last_pages, join_extents, split_extents

ABSENT: Final = 0
INCOMING: Final = 1
READY: Final = 2
LEAVING: Final = 3
DOOMED: Final = 4
"""States of a node's copy in a tier: no copy; being filled; usable; being written to the tier below, then freed; in use, but
freed as soon as its last user ends."""


class Carrier:
    """What copies nodes from one tier to another, as far as the tree knows it: a ``Transfer``."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: "list[Node]") -> None:
        self.nodes = nodes
        """The nodes to copy, in order of arrival: parents before children."""


class Node:
    """A piece of a path: consecutive pages that share one history and are stored in the same tiers.

    Lists have one entry per tier, top to bottom. ``state`` and ``slots`` describe the copy in that tier; its slots are None
    while they are reserved but not yet taken. ``pins`` counts the requests and transfers that need this node, or a node below
    it, to stay in the tier. ``children_in`` counts the children in the tier. Nodes share lists of the tree that most of them
    have: write to them by ``set_state``, ``own_pins`` and ``own_children_in``.
    """

    __slots__ = (
        "runs", "pages", "depth", "parent", "children", "state", "slots", "pins", "children_in", "transfers", "created",
        "last_used", "hits", "own_uses", "notes", "partner", "is_state", "tree", "copies",
    )  # fmt: skip

    def __init__(
        self,
        extents: tuple[Extent, ...],
        pages: int,
        depth: int,
        parent: "Node | None",
        tree: "RadixTree",
        now: float,
        pins: list[int] | None = None,
    ) -> None:
        """``pins`` are copied, unless they are the tree's ``zeros``; without them, nothing pins the node."""
        self.runs = extents
        self.pages = pages
        self.depth = depth
        """Pages before this node. For a recurrent state (``is_state``), depth + pages is where its prefix ends."""
        self.parent = parent
        self.children = NO_CHILDREN
        self.tree = tree
        """The tree that the node was made for, even after it has left it."""
        zeros = tree.zeros
        self.state: list[int] = tree.no_copies
        self.copies = 0
        """Number of tiers that have a copy, in any state."""
        self.slots: list[Any] = tree.no_slots.copy()
        self.pins: list[int] = zeros if pins is None or pins is zeros else pins.copy()
        self.children_in: list[int] = zeros
        self.transfers: tuple[Carrier, ...] = ()
        """Transfers that carry this node now."""
        self.notes: Any = tree.no_notes
        """What each tier's eviction policy has noted about these pages (``note``); both parts of a cut keep it."""
        self.is_state = False
        """Whether this is a recurrent state instead of a piece of a path; it takes ``pages`` slots."""
        self.created = self.last_used = now
        self.hits = 1
        """Number of requests that have used these pages, including the one that computed them."""
        self.own_uses: dict[int, tuple[float, int, float]] | None = None
        """Where several GPU tiers share a tree: last use, hits and first use by the requests of each, by the GPU tier's index."""
        self.partner: Node | None = None
        """Where recurrent states share a tier with pages: the state saved after these pages, or, of a state, those pages."""

    def __repr__(self) -> str:
        return f"Node({self.runs}, depth={self.depth}, hits={self.hits}, state={self.state})"

    def place(self, tier: int, slots: Any) -> None:
        """Say which slots a copy has that belongs to a node outside the tree, which no tier counts."""
        self.slots[tier] = slots

    def set_state(self, tier: int, state: int) -> None:
        """Set the state of the copy in a tier."""
        states, tree = self.state, self.tree
        if states is tree.no_copies or states is tree.in_first:
            if tier == 0 and state in (READY, ABSENT):
                self.state = tree.in_first if state == READY else tree.no_copies
                return
            states = self.state = states.copy()
        states[tier] = state

    def share_state(self, other: "Node") -> None:
        """Take over the states of another node of the same tree."""
        states, tree = other.state, self.tree
        self.state = states if states is tree.no_copies or states is tree.in_first else states.copy()

    def own_pins(self) -> list[int]:
        """Return ``pins`` to be written to: a list of this node alone."""
        pins = self.pins
        if pins is self.tree.zeros:
            pins = self.pins = pins.copy()
        return pins

    def own_children_in(self) -> list[int]:
        """Return ``children_in`` to be written to: a list of this node alone."""
        children_in = self.children_in
        if children_in is self.tree.zeros:
            children_in = self.children_in = children_in.copy()
        return children_in

    def share_pins(self) -> None:
        """Share the list of a node that nothing pins any more, where it is long."""
        tree = self.tree
        if tree.is_wide and self.pins == tree.zeros:
            self.pins = tree.zeros

    def note(self, tier: int, value: Any) -> None:
        """Store a value for the tier's eviction policy with these pages."""
        if type(self.notes) is tuple:
            self.notes = list(self.notes)
        self.notes[tier] = value

    def last_used_in(self, tier: int) -> float:
        """Return when these pages were last used, as the tier sees it: a GPU tier sees only the requests that it serves."""
        if self.own_uses is None:
            return self.last_used
        own = self.own_uses.get(tier)
        return self.last_used if own is None else own[0]

    def hits_in(self, tier: int) -> int:
        """Return the number of requests that have used these pages, as the tier sees it."""
        if self.own_uses is None:
            return self.hits
        own = self.own_uses.get(tier)
        return self.hits if own is None else own[1]

    def created_in(self, tier: int) -> float:
        """Return when these pages were first computed or, in one of several GPU tiers, first used there."""
        if self.own_uses is None:
            return self.created
        own = self.own_uses.get(tier)
        return self.created if own is None else own[2]

    def is_evictable(self, tier: int) -> bool:
        """Whether this is an unpinned leaf of the tier: ready there, with no child there."""
        return self.state[tier] == READY and not self.pins[tier] and not self.children_in[tier]

    def path(self) -> list["Node"]:
        """Return the nodes from the first one below the root down to this one; none for the root."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def descendants(self) -> Iterator["Node"]:
        """Iterate over all nodes below this one, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


WIDE: Final = 16
"""Tiers from which on it pays to look through a node's pins for what can be shared."""
NO_CHILDREN: Final[dict[int, Node]] = {}
"""The children of every leaf; shared, never modified."""


def matching_pages(node: Node, extents: tuple[Extent, ...], at: int, left: int, limit: int) -> tuple[int, int, int]:
    """Match a node of several extents against a path, over at most ``limit`` pages.

    The unmatched path begins with the last ``left`` pages of ``extents[at]`` and starts at the node's first page. Returns
    (matching pages, at, left): where the path continues after the match.
    """
    agreed = 0
    start = extents[at][0] + extents[at][1] - left
    for first, pages in node.runs:
        if first != start or agreed == limit:
            break
        step = pages if pages < left else left
        if step > limit - agreed:
            step = limit - agreed
        agreed, start, left = agreed + step, start + step, left - step
        if not left:
            at += 1
            if at == len(extents):
                break
            start, left = extents[at]
        if step < pages:
            break
    return agreed, at, left


def extents_after(extents: tuple[Extent, ...], at: int, left: int) -> tuple[Extent, ...]:
    """Return the last ``left`` pages of ``extents[at]`` and all extents after it; () if ``at`` is past the last extent."""
    if at == len(extents):
        return ()
    start, pages = extents[at]
    return ((start + pages - left, left), *extents[at + 1 :])


class RadixTree:
    """Paths of pages, cut into nodes. It only stores; what to add, cut or remove is decided elsewhere."""

    def __init__(self, tiers: int) -> None:
        self.no_notes: tuple[None, ...] = (None,) * tiers
        """The notes of every node without notes: shared, one entry per tier."""
        self.zeros = [0] * tiers
        """The pins, and the children in each tier, of every node that has none: shared, never modified."""
        self.is_wide = tiers >= WIDE
        self.no_copies = [ABSENT] * tiers
        """The states of every node without copies: shared, never modified."""
        self.in_first = [READY, *[ABSENT] * (tiers - 1)]
        """The states of nodes that are ready in the first tier and in no other; shared, never modified."""
        self.no_slots: list[Any] = [None] * tiers
        """What its list of slots is a copy of."""
        self.root = Node((), 0, 0, None, self, 0.0)

    def walk(
        self, node: Node, extents: tuple[Extent, ...], limit: int = UNLIMITED
    ) -> tuple[list[Node], Node | None, int, tuple[Extent, ...]]:
        """Follow ``extents`` down from ``node``, over at most ``limit`` pages.

        Returns the nodes that match in full, the next node if it matches in part (else None), the number of its matching
        pages, and the unmatched rest of the extents.
        """
        path: list[Node] = []
        if not extents:
            return path, None, 0, ()
        children = node.children
        at, last = 0, len(extents) - 1
        start, left = extents[0]
        while limit > 0:
            child = children.get(start)
            if child is None:
                break
            pages = child.pages
            if len(child.runs) > 1:
                agreed, at, left = matching_pages(child, extents, at, left, limit)
                if agreed < pages or at > last:
                    return (
                        (path, child, agreed, extents_after(extents, at, left))
                        if agreed < pages
                        else ([*path, child], None, 0, ())
                    )
                start = extents[at][0] + extents[at][1] - left
            elif pages > left or pages > limit:
                agreed = left if left < limit else limit
                if agreed == left:
                    return path, child, agreed, extents[at + 1 :]
                return path, child, agreed, extents_after(extents, at, left - agreed)
            elif pages < left:
                start += pages
                left -= pages
            elif at == last:
                path.append(child)
                return path, None, 0, ()
            else:
                at += 1
                start, left = extents[at]
            limit -= pages
            path.append(child)
            children = child.children
        if left == extents[at][1]:
            return path, None, 0, extents[at:] if at else extents
        return path, None, 0, ((start, left),) if at == last else ((start, left), *extents[at + 1 :])

    def add(self, parent: Node, extents: tuple[Extent, ...], pages: int, now: float) -> Node:
        """Add a leaf below ``parent`` and return it."""
        node = Node(extents, pages, parent.depth + parent.pages, parent, self, now)
        self.attach(node, parent)
        return node

    def attach(self, node: Node, parent: Node) -> None:
        """Put a node, with everything below it, below ``parent``, which ends where the node begins."""
        node.parent = parent
        if parent.children is NO_CHILDREN:
            parent.children = {node.runs[0][0]: node}
        else:
            parent.children[node.runs[0][0]] = node

    def cut(self, node: Node, pages: int) -> Node:
        """Cut ``node`` after its first ``pages`` pages. Returns the upper part, a new node; ``node`` becomes the lower part.

        Both parts keep the history and the pins. The caller must divide the copies.
        """
        parent, extents, depth = node.parent, node.runs, node.depth
        before: tuple[Extent, ...]
        assert parent is not None
        if len(extents) == 1:
            start, length = extents[0]
            middle = start + pages
            before, node.runs = ((start, pages),), ((middle, length - pages),)
        else:
            start = extents[0][0]
            before, node.runs = split_extents(extents, pages)
            middle = node.runs[0][0]
        upper = Node(before, pages, depth, parent, self, node.created, node.pins)
        upper.last_used, upper.hits = node.last_used, node.hits
        if node.own_uses is not None:
            upper.own_uses = node.own_uses.copy()
        if type(node.notes) is list:
            upper.notes = node.notes.copy()
        parent.children[start] = upper
        upper.children = {middle: node}
        node.parent = upper
        node.pages -= pages
        node.depth = depth + pages
        return upper

    def shorten(self, node: Node, pages: int) -> None:
        """Remove the last ``pages`` pages of a leaf from the tree."""
        node.pages -= pages
        if len(node.runs) == 1:
            node.runs = ((node.runs[0][0], node.pages),)
        else:
            node.runs = drop_last_pages(node.runs, pages)

    def join(self, node: Node, child: Node) -> None:
        """Undo a cut: ``child`` takes the place of ``node``, its parent, with the pages of both; ``node`` leaves the tree."""
        parent = node.parent
        assert parent is not None
        child.runs = join_extents(node.runs, child.runs)
        child.pages += node.pages
        child.depth = node.depth
        child.parent = parent
        parent.children[node.runs[0][0]] = child
        node.state = self.no_copies
        node.copies = 0

    def remove(self, node: Node) -> None:
        """Remove a node and everything below it from the tree."""
        assert node.parent is not None
        del node.parent.children[node.runs[0][0]]
