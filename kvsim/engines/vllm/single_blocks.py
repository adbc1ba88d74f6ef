"""Blocks like those of vLLM's pool for hybrid models: pages and recurrent states, each of which may leave by itself."""

from typing import Any

from kvsim.core.answers import check_enough, victim, victims
from kvsim.core.residency import Residency
from kvsim.core.runs import Run
from kvsim.core.states import Place, StateIndex
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, NO_CHILDREN, Node, RadixTree

StateBlocks = list[list[Node]]
"""The blocks of one state, by Mamba group; in each group the copies, the oldest first."""


class SingleBlocks:
    """Blocks with a key: pages, in a tree, and states, each of ``groups`` blocks.

    A block that nobody holds leaves when it has been without a holder for longer than all others, whatever comes after it on
    its path. A page or state may be stored several times. A look-up finds the oldest copy; the others are outside the tree
    and age separately. When the oldest leaves, the next one takes its place.

    A node stands for several blocks, given back together, the deepest first. All copies of a node's pages are nodes of the
    same pages: they are cut together. ``children_in`` is 0 in all nodes, so any node without a holder can be evicted. A node
    leaves the tree after its children, since who holds a page holds a copy of each page before it for as long.
    """

    def __init__(self, gpu: Tier, groups: int) -> None:
        self.gpu = gpu
        self.groups = groups
        self.residency = Residency([gpu])
        self.tree: RadixTree = self.residency.tree
        self.states: StateIndex[StateBlocks] = StateIndex()
        self.new_states = 0
        """Number of states stored at places that had no block of one."""
        self.held: list[list[Node]] = []
        """The pages of each running request, from the root down; a node that is cut is replaced by its parts."""
        self._copies: dict[int, list[Node]] = {}
        """Nodes of the same pages, the oldest first, by their first page; only where there are several."""
        self._aside = Node((), 0, 0, None, self.tree, 0.0)
        """The parent of all nodes outside the tree."""
        self._aside.children = {}

    # --- look-up ---------------------------------------------------------------------------------------------------------

    def known_pages(self, runs: tuple[Run, ...], limit: int) -> tuple[list[Node], int]:
        """Return the nodes that begin within the longest stored prefix of at most ``limit`` pages, and its pages."""
        path, part, agreed, _ = self.tree.walk(self.tree.root, runs, limit)
        known = path[-1].depth + path[-1].pages if path else 0
        if part is not None:
            path.append(part)
            known += agreed
        return path, known

    def first_pages(self, path: list[Node], pages: int) -> list[Node]:
        """Return the nodes of the first ``pages`` pages of a path, cutting one if need be."""
        first = [node for node in path if node.depth < pages]
        if first and first[-1].depth + first[-1].pages > pages:
            first[-1] = self._cut(first[-1], pages - first[-1].depth)
        return first

    def deepest_state(self, runs: tuple[Run, ...], limit: int) -> tuple[int, list[Node]]:
        """Return (depth in pages, oldest block of each group) of a prompt's deepest state within its first ``limit`` pages."""
        for depth, blocks in self.states.deepest_first(runs, limit):
            if all(blocks):
                return depth, [copies[0] for copies in blocks]
        return 0, []

    # --- holders ---------------------------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """Keep a node's blocks from leaving."""
        if not node.pins[0]:
            self.gpu.evictable_pages -= node.pages
        node.pins[0] += 1

    def give_back(self, node: Node, now: float) -> None:
        """Undo one ``hold``. With the last one, the node's blocks become the most recent ones."""
        node.pins[0] -= 1
        if not node.pins[0]:
            node.last_used = now
            self.gpu.evictable_pages += node.pages
            self.gpu.eviction.on_evictable(node)

    # --- new blocks ------------------------------------------------------------------------------------------------------

    def add_pages(self, nodes: list[Node], runs: tuple[Run, ...], pages: int, slots: Any, now: float) -> Any:
        """Store the ``pages`` pages of ``runs``, which follow on a request's hit ``nodes``; append the new nodes, held.

        Pages that are stored already become copies. Returns the slots that are left.
        """
        tree, pool = self.tree, self.gpu.pool
        parent = nodes[-1] if nodes else tree.root
        path, part, agreed, rest = tree.walk(parent, runs)
        if part is not None:
            path.append(self._cut(part, agreed))
        for older in path:
            copy = Node(older.runs, older.pages, older.depth, self._aside, tree, now)
            self._copies.setdefault(older.runs[0][0], [older]).append(copy)
            mine, slots = pool.split(slots, older.pages)
            nodes.append(self._ready(copy, mine, now))
            pages -= older.pages
            parent = older
        if pages:
            mine, slots = pool.split(slots, pages)
            nodes.append(self._ready(tree.add(parent, rest, pages, now), mine, now))
        return slots

    def add_state(self, place: Place, slots: Any, now: float) -> list[Node]:
        """Store the state at a place, a block for each group. Returns its nodes, held."""
        blocks = self.states.get(place.page)
        if blocks is None:
            blocks = [[] for _ in range(self.groups)]
            self.states.put(place, blocks)
            self.new_states += 1
        nodes = []
        for group, copies in enumerate(blocks):
            name = place.page * self.groups + group
            node = Node(((name, 1),), 1, place.depth - 1, self._aside, self.tree, now)
            node.is_state = True
            mine, slots = self.gpu.pool.split(slots, 1)
            copies.append(self._ready(node, mine, now))
            nodes.append(node)
        return nodes

    def _ready(self, node: Node, slots: Any, now: float) -> Node:
        node.slots[0] = slots
        node.pins[0] = 1
        self.residency.set_ready(node, self.gpu, now)
        return node

    # --- eviction --------------------------------------------------------------------------------------------------------

    def make_room(self, missing: int, now: float) -> None:
        """Evict exactly ``missing`` blocks; the caller has checked that so many have no holder."""
        gpu = self.gpu
        for offered in victims(gpu, now):
            node = victim(offered, self.tree, gpu)
            gpu.eviction.cut_offered(node)
            if node.pages > missing:
                if node.runs[0][0] not in self._copies:
                    self.residency.trim(node, gpu, missing)
                    return
                self._cut(node, node.pages - missing)
            missing -= node.pages
            self._remove(node)
            if not missing:
                break
        check_enough(gpu, missing)

    def _remove(self, node: Node) -> None:
        gpu = self.gpu
        node.state[0] = ABSENT
        gpu.pool.give(node.slots[0])
        gpu.evictable_pages -= node.pages
        gpu.evicted_pages += node.pages
        self.residency.counts.dropped_pages += node.pages
        if gpu.wants_removals:
            gpu.eviction.on_remove(node)
        name = node.runs[0][0]
        if node.is_state:
            self._remove_state(node, *divmod(name, self.groups))
        elif name in self._copies:
            self._remove_copy(node, name)
        else:
            assert node.parent is not None and not node.children
            del node.parent.children[name]

    def _remove_state(self, node: Node, page: int, group: int) -> None:
        blocks = self.states.get(page)
        assert blocks is not None
        blocks[group].remove(node)
        if not any(blocks):
            self.states.pop(page)

    def _remove_copy(self, node: Node, page: int) -> None:
        """Remove one of several copies. If it was in the tree, the next one takes its place."""
        copies = self._copies[page]
        if copies[0] is node:
            parent, heir = node.parent, copies[1]
            assert parent is not None
            parent.children[page] = heir
            heir.parent, heir.children = parent, node.children
            for child in heir.children.values():
                child.parent = heir
        copies.remove(node)
        if len(copies) == 1:
            del self._copies[page]

    # --- cuts ------------------------------------------------------------------------------------------------------------

    def _cut(self, node: Node, pages: int) -> Node:
        """Cut a node and all its copies after ``pages`` pages. Returns the upper part; ``node`` becomes the lower part."""
        copies = self._copies.get(node.runs[0][0])
        if copies is None:
            return self._cut_one(node, pages)
        at = copies.index(node)
        uppers = [self._cut_one(copy, pages) for copy in copies]
        for upper, lower in zip(uppers[1:], copies[1:], strict=True):
            upper.children = NO_CHILDREN
            upper.parent = lower.parent = self._aside
        self._aside.children.clear()
        self._copies[uppers[0].runs[0][0]] = uppers
        self._copies[node.runs[0][0]] = copies
        return uppers[at]

    def _cut_one(self, node: Node, pages: int) -> Node:
        upper = self.residency.cut(node, pages)
        upper.children_in[0] = 0
        if not node.pins[0]:
            self.gpu.eviction.on_evictable(upper)
            self.gpu.eviction.on_evictable(node)  # now deeper than before, so it leaves before the upper part
        else:
            for nodes in self.held:
                if node in nodes:
                    nodes.insert(nodes.index(node), upper)
        return upper
