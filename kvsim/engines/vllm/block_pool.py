"""A pool of single blocks like vLLM's: pages become recent when a request finishes, and a page may be stored twice."""

from typing import Any

from kvsim.core.answers import check_enough, victim, victims
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.runs import Run, count_pages
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, NO_LIMIT, READY, Node, RadixTree


class BlockLease:
    """What an admitted request holds until it finishes: a pinned path, and its own slots for pages without a key."""

    __slots__ = ("hits", "node", "offload", "request", "slots")
    hits: tuple[int, int, int]
    """Hit pages by tier: gpu, cpu, disk."""
    offload: Any
    """The request's ``OffloadUse``, if there is a CPU tier."""

    def __init__(self, request: Request, node: Node, slots: Any) -> None:
        self.request = request
        self.node = node
        self.slots = slots


class BlockPool:
    """The GPU's pages, in a tree.

    match    finds pages as a prefix; changes nothing, but may cut a node
    admit    pins what was matched and takes the rest from the pool; from now on all full pages of the prompt can be found
    finish   unpins the path and makes it the most recent, tail before head; slots without a key become free at once

    A page that a request computes although it is stored (the last page of a fully cached prompt) takes a second slot. A match
    finds the older copy. The two age separately: the younger is a leaf outside the tree, and takes the place of the older when
    that is evicted. Neither has children then, since only leaves are evicted and new pages are added below the older copy.
    """

    def __init__(self, gpu: Tier, tiers: int = 1) -> None:
        """``tiers`` is the number of tiers in a node's lists."""
        self.residency = Residency([gpu], tiers)
        self.tree: RadixTree = self.residency.tree
        self.gpu = gpu
        self._younger: dict[int, list[Node]] = {}
        """Younger copies of a page, each a node of one page, by page id, oldest first."""
        self._can_trim = not gpu.wants_splits and not gpu.wants_removals

    def match(self, runs: tuple[Run, ...], limit: int = NO_LIMIT) -> tuple[list[Node], tuple[Run, ...]]:
        """Return the nodes of the longest stored prefix, of at most ``limit`` pages, and the rest of the path."""
        return self.residency.follow(self.tree.root, runs, limit)

    def admit(self, request: Request, path: list[Node], rest: tuple[Run, ...], pages: int, now: float) -> BlockLease | None:
        """Admit a request that takes ``pages`` pages: those of ``path``, which it shares, of ``rest``, and some without a key.

        Returns None, with nothing changed, if there is not enough room.
        """
        gpu, pool = self.gpu, self.gpu.pool
        node = path[-1] if path else self.tree.root
        hit_pages = node.depth + node.pages
        missing = pages - hit_pages - pool.free
        if missing > 0 and missing + hit_pages > gpu.evictable_pages:
            idle = sum([node.pages for node in path if not node.pins[0]])
            if missing + idle > gpu.evictable_pages:
                return None
        now = self.residency.tick(now)
        self.residency.notify_request(request, now)
        self.residency.pin_path(path, gpu, hit_pages)
        self.residency.use(path, now, is_first=True)
        if missing > 0:
            self._make_room(missing, now)
        lease = BlockLease(request, node, pool.take(pages - hit_pages))
        if rest:
            self._name(lease, rest, now)
        return lease

    def finish(self, lease: BlockLease) -> None:
        """End a request: unpin its path, make it the most recent, and free the slots without a key."""
        gpu, now = self.gpu, self.residency.tick(self.residency.now)
        self.residency.notify_finish(lease.request, lease.node, now)
        gpu.pool.give(lease.slots)
        node = lease.node
        while node.parent is not None:
            node.last_used = now
            node = node.parent
        self.residency.unpin(lease.node, gpu)

    def _name(self, lease: BlockLease, rest: tuple[Run, ...], now: float) -> None:
        """Add the request's own full pages as a leaf, which it pins."""
        gpu, parent, page = self.gpu, lease.node, rest[0][0]
        pages = count_pages(rest)
        older = parent.children.get(page)
        if older is None:
            leaf = self.tree.add(parent, rest, pages, now)
        else:
            if older.pages > pages:
                self.residency.cut(older, pages)
            leaf = Node(rest, pages, parent.depth + parent.pages, parent, self.tree, now)
            self._younger.setdefault(page, []).append(leaf)
        leaf.slots[0], lease.slots = gpu.pool.split(lease.slots, pages)
        leaf.pins[0] = 1
        parent.children_in[0] += 1
        lease.node = leaf
        self.residency.set_ready(leaf, gpu, now)

    def _make_room(self, missing: int, now: float) -> None:
        """Evict exactly ``missing`` pages; the caller has checked that they exist."""
        gpu, wanted = self.gpu, missing
        for offered in victims(gpu, now):
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

    def _cut_off(self, node: Node, pages: int) -> None:
        """Evict the last ``pages`` pages of a leaf."""
        if not self._can_trim:
            self.residency.cut(node, node.pages - pages)
            self._remove(node)
            return
        pool = self.gpu.pool
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
        if page not in self._younger:
            del parent.children[page]
        else:
            self._remove_copy(node, parent, page)
        children_in = parent.children_in
        left = children_in[0] = children_in[0] - 1
        if not left and not parent.pins[0] and parent.state[0] == READY:
            gpu.eviction.on_evictable(parent)

    def _remove_copy(self, node: Node, parent: Node, page: int) -> None:
        younger = self._younger[page]
        if parent.children[page] is node:
            parent.children[page] = younger.pop(0)
        else:
            younger.remove(node)
        if not younger:
            del self._younger[page]
