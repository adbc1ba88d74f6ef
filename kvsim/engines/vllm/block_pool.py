"""A pool of single blocks like vLLM's: pages become recent when a request finishes, and a page may be stored twice."""

from math import inf
from typing import Any

from kvsim.core.answers import check_enough, victim, victims
from kvsim.core.lease import Lease
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.runs import Run, count_pages, last_pages, split_runs
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, NO_LIMIT, READY, Node, RadixTree


class BlockLease(Lease):
    """What an admitted request holds until it finishes: a pinned path, and its own slots for pages without a key."""

    __slots__ = ("held_pages", "offload")
    offload: Any
    """The request's ``OffloadUse``, if there is a CPU tier."""

    def __init__(self, request: Request, gpu: Tier, root: Node) -> None:
        super().__init__(request, gpu, root)
        self.held_pages = 0
        """Pages of the path and of ``slots`` together."""


class BlockPool:
    """The GPU's pages, in a tree.

    match   finds pages as a prefix; changes nothing, but may cut a node
    hold    pins what was matched
    take    takes pages from the pool, evicting as needed
    name    gives pages their keys: from now on they can be found
    free    unpins the path and makes it the most recent, tail before head; slots without a key become free at once

    A page that a request computes although it is stored (the last page of a fully cached prompt) takes a second slot. A match
    finds the older copy. The two age separately: the younger is a node outside the tree, and takes the place of the older when
    that is evicted. What the request computes after such a page is below its own copy, and a match that ends at the older copy
    goes on there: what it finds moves below the older copy, unless it is in use.
    """

    def __init__(self, gpu: Tier, tiers: int = 1) -> None:
        """``tiers`` is the number of tiers in a node's lists."""
        self.residency = Residency([gpu], tiers)
        self.gpu = gpu
        self._younger: dict[tuple[Node, int], list[Node]] = {}
        """Younger copies of a page, each a node of one page, by parent and page id, oldest first."""
        self._can_trim = not gpu.wants_splits and not gpu.wants_removals

    @property
    def tree(self) -> RadixTree:
        """The radix tree of pages with a key, without younger copies."""
        return self.residency.tree

    def match(self, runs: tuple[Run, ...], limit: int = NO_LIMIT) -> tuple[list[Node], tuple[Run, ...]]:
        """Return the nodes of the longest stored prefix, of at most ``limit`` pages, and the rest of the path."""
        path, rest = self.residency.follow(self.tree.root, runs, limit)
        while self._younger and rest and path and path[-1].depth + path[-1].pages < limit:
            below, rest = self._match_below_copies(path[-1], rest, limit - path[-1].depth - path[-1].pages)
            if not below:
                break
            path += below
        return path, rest

    def _match_below_copies(self, node: Node, rest: tuple[Run, ...], limit: int) -> tuple[list[Node], tuple[Run, ...]]:
        """Continue a match that ended at ``node`` below its younger copies. What is found there moves below ``node``."""
        assert node.parent is not None
        for copy in self._younger.get((node.parent, node.runs[0][0]), ()):
            below, left = self.residency.follow(copy, rest, limit)
            if below and not below[0].pins[0] and (copy, rest[0][0]) not in self._younger:
                self._move(below[0], copy, node)
                return below, left
        return [], rest

    def _move(self, child: Node, copy: Node, node: Node) -> None:
        """Put an unpinned child of a younger copy below the older copy."""
        page = child.runs[0][0]
        del copy.children[page]
        copy.children_in[0] -= 1
        if copy.is_evictable(0):
            self.gpu.eviction.on_evictable(copy)
        self.tree.attach(child, node)
        node.children_in[0] += 1

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
        residency = self.residency
        now = residency.tick(now)
        residency.notify_request(lease.request, now)
        if path:
            lease.node = node = path[-1]
            lease.held_pages = node.depth + node.pages
            residency.pin_path(path, self.gpu, lease.held_pages)
            residency.use(path, now, is_first=not lease.is_resumed)
        lease.slots = self.gpu.pool.take(0)

    def make_room(self, pages: int) -> bool:
        """Evict exactly what is missing to ``pages`` free slots. Returns False, with nothing changed, if that is impossible."""
        gpu = self.gpu
        missing = wanted = pages - gpu.pool.free
        if wanted > gpu.evictable_pages:
            return False
        if wanted <= 0:
            return True
        for offered in victims(gpu, self.residency.now):
            node = victim(offered, self.tree, gpu)
            gpu.eviction.cut_offered(node)
            pages = node.pages
            if pages > missing:
                self._cut_off(node, missing)
                missing = 0
                break
            self._remove(node)
            missing -= pages
            if not missing:
                break
        check_enough(gpu, missing)
        gpu.evictable_pages -= wanted
        gpu.evicted_pages += wanted
        return True

    def take(self, lease: BlockLease, pages: int) -> bool:
        """Give a request ``pages`` slots. Returns False, with nothing changed, if there is not enough room."""
        pool = self.gpu.pool
        if pages > pool.free and not self.make_room(pages):
            return False
        slots = pool.take(pages)
        lease.slots = pool.join(lease.slots, slots) if lease.held_pages else slots
        lease.held_pages += pages
        return True

    def name(self, lease: BlockLease, runs: tuple[Run, ...]) -> None:
        """Add the next pages of the request as a leaf, which it pins; its first slots hold them."""
        gpu, residency, parent, now = self.gpu, self.residency, lease.node, self.residency.now
        page, pages = runs[0][0], count_pages(runs)
        older = parent.children.get(page)
        if older is not None:
            runs, after = split_runs(runs, 1)
            if older.pages > 1:
                residency.cut(older, 1)
            leaf = Node(runs, 1, parent.depth + parent.pages, parent, self.tree, now)
            self._younger.setdefault((parent, page), []).append(leaf)
        else:
            leaf, after = self.tree.add(parent, runs, pages, now), ()
        leaf.slots[0], lease.slots = gpu.pool.split(lease.slots, leaf.pages)
        leaf.pins[0] = 1
        parent.children_in[0] += 1
        lease.node = leaf
        residency.set_ready(leaf, gpu, now)
        if after:
            self.name(lease, after)

    def free(self, lease: BlockLease) -> None:
        """Unpin a request's path, make it the most recent, and free the slots without a key."""
        gpu, now = self.gpu, self.residency.tick(self.residency.now)
        gpu.pool.give(lease.slots)
        node = lease.node
        while node.parent is not None:
            node.last_used = now
            node = node.parent
        self.residency.unpin(lease.node, gpu)

    def finish(self, lease: BlockLease, now: float = -inf) -> None:
        """End a request: notify policies, and free what it holds. Without a clock, the pool's last use gives the time."""
        residency = self.residency
        residency.notify_finish(lease.request, lease.node, residency.tick(max(now, residency.now)))
        self.free(lease)

    def reset(self) -> None:
        """Drop every page. Slots in use are freed when their requests end."""
        copies = [copy for younger in self._younger.values() for copy in younger]
        self._younger.clear()
        self.residency.clear(copies)

    def check(self, leases: list[BlockLease]) -> None:
        """Recount everything, with what the running requests hold; raise AssertionError if a count or an invariant is wrong."""
        gpu, residency = self.gpu, self.residency
        tops = [copy for younger in self._younger.values() for copy in younger]
        linked = list(self.tree.root.descendants())
        apart = [node for copy in tops for node in (copy, *copy.descendants())]
        nodes = [*linked, *apart]
        for copy in tops:
            parent = copy.parent
            assert parent is not None and copy.pages == 1 and copy not in linked, f"{copy}: not a younger copy"
            assert parent.children[copy.runs[0][0]].pages == 1, f"{copy}: the older copy is not a node of one page"
        for node in nodes:
            parent = node.parent
            assert parent is not None and node.depth == parent.depth + parent.pages, f"{node}: depth"
            assert node in tops or parent.children[node.runs[0][0]] is node, f"{node}: not found under its parent"
            assert node.pages == count_pages(node.runs) == gpu.pool.count(node.slots[0]), f"{node}: slots"
            assert node.state[0] == READY, f"{node}: not ready"
            assert node.children_in[0] == sum(child.parent is node for child in nodes), f"{node}: children"
        pins: dict[Node, int] = {}
        for lease in leases:
            path = lease.node.path()
            for node in path:
                pins[node] = pins.get(node, 0) + 1
            assert lease.held_pages == sum(node.pages for node in path) + gpu.pool.count(lease.slots), f"{lease}: pages"
        for node in [*nodes, *residency.doomed]:
            assert node.pins[0] == pins.get(node, 0), f"{node}: pins"
        assert gpu.evictable_pages == sum(node.pages for node in nodes if not node.pins[0]), "evictable pages"
        slots = [node.slots[0] for node in [*nodes, *residency.doomed]] + [lease.slots for lease in leases]
        assert gpu.pool.free + sum(map(gpu.pool.count, slots)) == gpu.pool.capacity, "slots leaked"
        if isinstance(gpu.pool, SlotPool):
            owned = {slot for some in (*slots, gpu.pool.free_slots()) for slot in some.tolist()}
            assert len(owned) == gpu.pool.capacity, "a slot has two owners"

    def _cut_off(self, node: Node, pages: int) -> None:
        """Evict the last ``pages`` pages of a leaf."""
        if not self._can_trim:
            self.residency.cut(node, node.pages - pages)
            self._remove(node)
            return
        pool = self.gpu.pool
        if self.gpu.watch is not None:
            self.gpu.watch.dropped(last_pages(node.runs, pages))
        self.tree.shorten(node, pages)
        node.slots[0], freed = pool.split(node.slots[0], node.pages)
        pool.give(freed)
        self.gpu.eviction.on_evictable(node)

    def _remove(self, node: Node) -> None:
        """Evict a leaf. If its page has another copy, that takes its place."""
        gpu, parent, page = self.gpu, node.parent, node.runs[0][0]
        assert parent is not None
        node.state[0] = ABSENT
        gpu.pool.give(node.slots[0])
        if gpu.wants_removals:
            gpu.eviction.on_remove(node)
        if gpu.watch is not None:
            gpu.watch.dropped(node.runs)
        if (parent, page) in self._younger:
            self._remove_copy(node, parent, page)
        else:
            del parent.children[page]
        children_in = parent.children_in
        left = children_in[0] = children_in[0] - 1
        if not left and not parent.pins[0] and parent.state[0] == READY:
            gpu.eviction.on_evictable(parent)

    def _remove_copy(self, node: Node, parent: Node, page: int) -> None:
        younger = self._younger[parent, page]
        if parent.children[page] is node:
            parent.children[page] = younger.pop(0)
        else:
            younger.remove(node)
        if not younger:
            del self._younger[parent, page]
