"""A pool of single blocks like vLLM's: pages become recent when a request finishes, and a page may be stored several times."""

from math import inf
from typing import Any

from kvsim.core.lease import FIRST, Lease
from kvsim.core.pool import UNLIMITED, SlotPool
from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.core.tree import NO_CHILDREN, READY, Node, RadixTree
from kvsim.core.victims import check_enough, cut_after, victim, victims
from kvsim.engines.vllm.block_numbers import BlockNumbers
from kvsim.engines.vllm.block_residency import BlockResidency
from kvsim.pages.extents import Extent, count_pages


class BlockLease(Lease):
    """What an admitted request holds until it finishes: a path of pages, and its own slots for pages without a key."""

    __slots__ = ("copies", "held_pages", "offload")
    offload: Any
    """The request's ``OffloadUse``, if there is a CPU tier."""

    def __init__(self, request: Request, gpu: Tier, root: Node, why: int = FIRST) -> None:
        super().__init__(request, gpu, root, why)
        self.held_pages = 0
        """Pages of the path and of ``slots`` together."""
        self.copies: dict[int, Node] = {}
        """What the request holds instead of nodes of its path, by their first page: younger copies, which it has computed."""


class BlockPool:
    """The GPU's pages, in a tree.

    match   finds pages as a prefix; changes nothing, but may cut a node
    hold    pins what was matched
    take    takes pages from the pool, evicting as needed
    name    gives pages their keys: from now on they can be found
    free    unpins the path and makes it the most recent, tail before head; slots without a key become free at once

    A page that a request computes although it is stored takes a second slot. A match finds the oldest copy; the others are
    nodes outside the tree and age separately. When the oldest leaves, the next one takes its place. All copies of a node's pages
    are nodes of the same pages: they are cut together. The parent of each is the node in the tree that they come after.

    ``children_in`` of a node with copies is 0, also in the tree: it can leave before its children. By last use, no other node
    ever would: who holds a page holds a copy of each page before it for as long.
    """

    def __init__(self, gpu: Tier, tiers: int = 1) -> None:
        """``tiers`` is the number of tiers in a node's lists."""
        self.residency = BlockResidency([gpu], tiers)
        self.gpu = gpu
        gpu.eviction.cut = self._cut_for
        self._copies: dict[int, list[Node]] = {}
        """Nodes of the same pages, the oldest first, by their first page; only where there are several."""
        self._owners: dict[Node, BlockLease] = {}
        """Who holds a node outside the tree."""
        self.handed: list[Any] | None = None
        """Where the slots are noted that requests take or find; None: nowhere."""

    @property
    def tree(self) -> RadixTree:
        """The radix tree of pages with a key, each page once."""
        return self.residency.tree

    # --- look-up ---------------------------------------------------------------------------------------------------------

    def match(
        self, extents: tuple[Extent, ...], limit: int = UNLIMITED, below: Node | None = None
    ) -> tuple[list[Node], tuple[Extent, ...]]:
        """Return the nodes of the longest stored prefix, of at most ``limit`` pages, and the rest of the path.

        Both begin after ``below``, a node of the tree; by default after the root.
        """
        tree = self.residency.tree
        path, part, agreed, rest = tree.walk(below or tree.root, extents, limit)
        if part is not None:
            path.append(self._cut(part, agreed))
        return path, rest

    def first_pages(self, path: list[Node], pages: int) -> list[Node]:
        """Return the nodes of the first ``pages`` pages of a path, cutting one if need be."""
        first = [node for node in path if node.depth < pages]
        if first and first[-1].depth + first[-1].pages > pages:
            first[-1] = self._cut(first[-1], pages - first[-1].depth)
        return first

    # --- requests --------------------------------------------------------------------------------------------------------

    def has_room(self, path: list[Node], pages: int) -> bool:
        """Whether a request that takes ``pages`` pages, among them those of ``path``, finds room."""
        gpu = self.gpu
        hit_pages = path[-1].depth + path[-1].pages if path else 0
        missing = pages - hit_pages - gpu.pool.free
        if missing <= 0 or missing + hit_pages <= gpu.evictable_pages:
            return True
        idle = sum([node.pages for node in path if not node.pins[0]])
        return missing + idle <= gpu.evictable_pages

    def hold(self, lease: BlockLease, path: list[Node], now: float) -> None:
        """Pin what a request reuses."""
        gpu, residency = self.gpu, self.residency
        now = residency.tick(now)
        residency.notices.request(lease.request, now)
        for node in path:
            residency.pin_alone(node, gpu)
            if self.handed is not None:
                self.handed.append(node.slots[gpu.index])
        if path:
            lease.node = node = path[-1]
            lease.held_pages = node.depth + node.pages
            residency.use(path, now, is_first=lease.is_first)
        lease.slots = residency.take(gpu, 0)

    def take(self, lease: BlockLease, pages: int) -> bool:
        """Give a request ``pages`` slots. Returns False, with nothing changed, if there is not enough room."""
        pool = self.gpu.pool
        if pages > pool.free and not self.make_room(pages):
            return False
        slots = self.residency.take(self.gpu, pages)
        if self.handed is not None:
            self.handed.append(slots)
        lease.slots = pool.join(lease.slots, slots) if lease.held_pages else slots
        lease.held_pages += pages
        return True

    def name(self, lease: BlockLease, extents: tuple[Extent, ...]) -> None:
        """Add the next pages of the request below its path and pin them; its first slots hold them.

        Pages that are stored already become copies.
        """
        residency, pool, parent = self.residency, self.gpu.pool, lease.node
        if lease.copies:
            parent = self._oldest(parent)
        if extents[0][0] in parent.children:
            path, extents = self.match(extents, below=parent)
            for older in path:
                self._add_copy(lease, older)
            if not extents:
                return
            parent = path[-1]
        pages = count_pages(extents)
        slots, lease.slots = pool.split(lease.slots, pages)
        lease.node = residency.add_leaf(parent, extents, pages, self.gpu, slots, residency.now)
        if self._copies and self._copies_of(parent):
            residency.ignore_children(parent, self.gpu)

    def free(self, lease: BlockLease) -> None:
        """Unpin what a request holds, make it the most recent, and free the slots without a key."""
        gpu, residency = self.gpu, self.residency
        now = residency.tick(residency.now)
        residency.give(gpu, lease.slots)
        node, copies = lease.node, lease.copies
        parent = node.parent
        while parent is not None:
            if copies:
                node = copies.get(node.runs[0][0], node)
            if node.pins[0] == 1:
                node.last_used = now
            residency.unpin_alone(node, gpu)
            node = parent
            parent = node.parent
        if copies:
            for copy in copies.values():
                self._owners.pop(copy, None)

    def finish(self, lease: BlockLease, now: float = -inf) -> None:
        """End a request: notify policies, and free what it holds. Without a clock, the pool's last use gives the time."""
        residency = self.residency
        residency.notices.finish(lease.request, lease.node, residency.tick(max(now, residency.now)))
        for copy in lease.copies.values():
            older = self._oldest(copy)  # on the path that policies were shown, but perhaps not held
            if older.is_evictable(0):
                self.gpu.eviction.on_evictable(older)
        self.free(lease)

    def held(self, lease: BlockLease) -> list[Node]:
        """Return the nodes that a request holds, from the root down."""
        path = lease.node.path()
        return [lease.copies.get(node.runs[0][0], node) for node in path] if lease.copies else path

    # --- copies ----------------------------------------------------------------------------------------------------------

    def _copies_of(self, node: Node) -> list[Node] | None:
        """Return all copies of a node's pages, the oldest first; None if there is only one, or for the root."""
        return self._copies.get(node.runs[0][0]) if self._copies and node.runs else None

    def _oldest(self, node: Node) -> Node:
        """Return the copy of a node's pages that is in the tree."""
        copies = self._copies_of(node)
        return copies[0] if copies else node

    def _add_copy(self, lease: BlockLease, older: Node) -> None:
        """Store the pages of a node again, in the request's first slots."""
        gpu, residency, page = self.gpu, self.residency, older.runs[0][0]
        copy = Node(older.runs, older.pages, older.depth, older.parent, self.tree, residency.now)
        self._copies.setdefault(page, [older]).append(copy)
        if older.children_in[0]:
            residency.ignore_children(older, gpu)
            self._announce(older)
        self._owners[copy] = lease
        lease.node = lease.copies[page] = copy
        mine, lease.slots = gpu.pool.split(lease.slots, copy.pages)
        residency.add_outside_tree(copy, gpu, mine, residency.now)

    def _announce(self, first: Node) -> None:
        """Announce a node that can leave before its children, and again those given back with it: deeper, they leave first."""
        node: Node | None = first
        while node is not None:
            if node.is_evictable(0):
                self.gpu.eviction.on_evictable(node)
            node = next((child for child in node.children.values() if child.last_used == first.last_used), None)

    def _remove_copy(self, node: Node, copies: list[Node]) -> None:
        """Evict one of several copies. If it was in the tree, the next one takes its place."""
        parent, page = node.parent, node.runs[0][0]
        assert parent is not None
        self._vacate(node)
        copies.remove(node)
        heir = copies[0]
        self.tree.attach(heir, parent)
        if node.children:
            heir.children = node.children
            for child in heir.children.values():
                for copy in self._copies_of(child) or (child,):
                    copy.parent = heir
        owner = self._owners.pop(heir, None)
        if owner is not None:
            del owner.copies[page]
        if len(copies) == 1:
            del self._copies[page]
            self.residency.count_children(heir, self.gpu)

    # --- eviction --------------------------------------------------------------------------------------------------------

    def make_room(self, pages: int) -> bool:
        """Evict exactly what is missing to ``pages`` free slots. Returns False, with nothing changed, if that is impossible."""
        gpu, residency = self.gpu, self.residency
        missing, tree = pages - gpu.pool.free, residency.tree
        if missing > gpu.evictable_pages:
            return False
        if missing <= 0:
            return True
        for offered in victims(gpu, residency.now):
            node = victim(offered, tree, gpu)
            gpu.eviction.cut_offered(node)
            if node.pages > missing:
                if self._shorten(node, missing):
                    return True
                self._cut(node, node.pages - missing)
            missing -= node.pages
            self._remove(node)
            if not missing:
                return True
        check_enough(gpu, missing)
        return True

    def _shorten(self, node: Node, pages: int) -> bool:
        """Evict the last ``pages`` pages of a victim; False, with nothing changed, if it has to be cut for that."""
        if not self.gpu.may_shorten or node.runs[0][0] in self._copies:
            return False
        self.residency.trim(node, self.gpu, pages)
        return True

    def _remove(self, node: Node) -> None:
        copies = self._copies.get(node.runs[0][0]) if self._copies else None
        if copies:
            self._remove_copy(node, copies)
            return
        parent = node.parent
        assert parent is not None
        self.residency.counts.dropped_pages += node.pages
        self.residency.free(node, self.gpu)
        if parent.children_in[0] < 0:  # it has copies
            self.residency.ignore_children(parent, self.gpu)

    def _vacate(self, node: Node) -> None:
        """Free the slots of a node that is evicted, wherever it is."""
        self.residency.counts.dropped_pages += node.pages
        self.residency.free_in_place(node, self.gpu)

    def reset(self) -> None:
        """Drop every page. Slots in use are freed when their requests end."""
        younger = [copy for copies in self._copies.values() for copy in copies[1:]]
        self._copies.clear()
        self._owners.clear()
        self.residency.clear(younger)

    # --- cuts ------------------------------------------------------------------------------------------------------------

    def _cut_for(self, node: Node, pages: object) -> Node:
        """Check and carry out a cut that the eviction policy asks for."""
        return self._cut(node, cut_after(node, pages, self.tree, self.gpu))

    def _cut(self, node: Node, pages: int) -> Node:
        """Cut a node and all its copies after ``pages`` pages. Returns the upper part; ``node`` becomes the lower part."""
        copies = self._copies.get(node.runs[0][0])
        if copies is None:
            return self.residency.cut(node, pages)
        at = copies.index(node)
        uppers = [self._cut_copy(copy, pages) for copy in reversed(copies)]  # the one in the tree last, which stays there
        uppers.reverse()
        for upper, lower in zip(uppers[1:], copies[1:], strict=True):
            upper.children, lower.parent = NO_CHILDREN, uppers[0]
        self._copies[uppers[0].runs[0][0]] = uppers
        self._copies[node.runs[0][0]] = copies
        return uppers[at]

    def _cut_copy(self, copy: Node, pages: int) -> Node:
        upper = self.residency.cut(copy, pages)
        self.residency.ignore_children(upper, self.gpu)
        owner = self._owners.get(copy)
        if owner is not None:
            self._owners[upper] = owner
            for part in (upper, copy):
                owner.copies[part.runs[0][0]] = part
        for part in (upper, copy):
            if part.is_evictable(0):
                self.gpu.eviction.on_evictable(part)  # the lower part is deeper than before, so that it leaves first
        return upper

    # --- recount ---------------------------------------------------------------------------------------------------------

    def check(self, leases: list[BlockLease]) -> None:
        """Recount everything, with what the running requests hold; raise AssertionError if a count or an invariant is wrong."""
        gpu, doomed = self.gpu, self.residency.doomed
        nodes = self.check_nodes(leases)
        assert gpu.evictable_pages == sum(node.pages for node in nodes if not node.pins[0]), "evictable pages"
        slots = [node.slots[0] for node in [*nodes, *doomed]] + [lease.slots for lease in leases]
        assert gpu.pool.free + sum(map(gpu.pool.count, slots)) == gpu.pool.capacity, "slots leaked"
        if isinstance(gpu.pool, (SlotPool, BlockNumbers)):
            owned = {int(slot) for some in (*slots, gpu.pool.free_slots()) for slot in some}
            assert len(owned) == gpu.pool.capacity, "a slot has two owners"

    def check_nodes(self, leases: list[BlockLease]) -> list[Node]:
        """Check the nodes of pages and their pins. Returns them, copies included."""
        linked = dict.fromkeys([self.tree.root, *self.tree.root.descendants()])
        younger = [copy for copies in self._copies.values() for copy in copies[1:]]
        for copies in self._copies.values():
            assert len(copies) > 1 and {copy.runs for copy in copies} == {copies[0].runs}, f"{copies}: not of the same pages"
            assert all(self._oldest(copy) in linked and not copy.children for copy in copies[1:]), f"{copies}: not the oldest"
        nodes = [*list(linked)[1:], *younger]
        for node in nodes:
            parent = node.parent
            assert parent is not None and parent in linked and node.depth == parent.depth + parent.pages, (
                f"{node}: parent and depth"
            )
            assert parent.children[node.runs[0][0]] is self._oldest(node), f"{node}: not found under its parent"
            assert node.pages == count_pages(node.runs) == self.gpu.pool.count(node.slots[0]), f"{node}: slots"
            assert node.state[0] == READY, f"{node}: not ready"
            assert node.children_in[0] == (0 if self._copies_of(node) else len(node.children)), f"{node}: children"
        pins: dict[Node, int] = {}
        for lease in leases:
            held = self.held(lease)
            for node in held:
                pins[node] = pins.get(node, 0) + 1
            assert lease.held_pages == sum(node.pages for node in held) + self.gpu.pool.count(lease.slots), f"{lease}: pages"
        for node in [*nodes, *[node for node in self.residency.doomed if not node.is_state]]:
            assert node.pins[0] == pins.get(node, 0), f"{node}: pins"
        return nodes
