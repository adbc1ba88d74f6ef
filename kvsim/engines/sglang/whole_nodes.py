"""SGLang's radix cache, on one tier: nodes are evicted as a whole."""

from typing import Any

from kvsim.core.lease import Holder
from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.serving import Server
from kvsim.core.tier import DISK, GPU, Tier
from kvsim.core.tree import Node, RadixTree
from kvsim.core.victims import check_enough, victim, victims
from kvsim.pages.extents import Extent, count_pages


class NodeLease(Holder):
    """What a running request holds: a pinned path down to ``node``, and slots for its answer and a partial page."""

    __slots__ = ("hits", "request")

    def __init__(self, request: Request, node: Node, hits: tuple[int, int, int], slots: Any) -> None:
        super().__init__(node, slots)
        self.request = request
        self.hits = hits


class WholeNodeCache(Server):
    """Serves requests from one tier; the unit of eviction is a node.

    node        everything that one request inserted below the path it found; cut only where a later look-up or insert ended
                inside it
    eviction    whole unpinned leaves in the policy's order until there is room, so possibly more than needed
    recency     a look-up counts, even for a request that finds no room; both parts of a cut are as recent as the look-up, and
                the upper one counts as created by it
    hits        one for the insert that made a node, one for each later insert that passes it; both parts of a cut keep them
    room        free + evictable >= pages not reused, tested with the path pinned; otherwise nothing is evicted

    A request has two moments, its look-up and its insert: if it cuts a node and then adds a leaf, the part that it cut off is
    older than the new leaf.
    """

    def __init__(self, tiers: list[Tier], page_tokens: int, *, recompute_last_token: bool = True) -> None:
        self.residency = Residency([tier for tier in tiers if tier.level < DISK], len(tiers))  # nodes are in no storage
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.page_tokens = page_tokens
        self.counts = self.residency.counts
        self._recompute_last_token = recompute_last_token

    @property
    def tree(self) -> RadixTree:
        """The radix tree of stored pages."""
        return self.residency.tree

    def serve(self, request: Request, pages: int, now: float) -> NodeLease | None:
        """Look up, admit with room for ``pages`` pages in all, and insert. Returns None, after the look-up, without room."""
        gpu = self.gpu
        pool = gpu.pool
        path, rest, now = self.look_up(request, now)
        node = path[-1] if path else self.tree.root
        hit_pages = node.depth + node.pages
        missing = pages - hit_pages - pool.free
        if missing > 0 and not self.can_evict(missing, path, hit_pages):
            self.touch(path, now)
            return None
        self.residency.notices.request(request, now)
        inserted = self.residency.tick(now)
        self.residency.pin_path(path, gpu, hit_pages)
        self.residency.use(path, inserted, is_first=True)
        if missing > 0:
            self.evict(missing, now)
        lease = NodeLease(request, node, (hit_pages, 0, 0), self.residency.take(gpu, pages - hit_pages))
        if rest:
            if rest[0][0] in node.children:
                rest = self._insert_known(lease, rest, inserted)
            if rest:
                self.add_leaf(lease, rest, inserted)
        return lease

    def look_up(self, request: Request, now: float) -> tuple[list[Node], tuple[Extent, ...], float]:
        """Return a prompt's cached nodes, cutting the last where the match ends, the rest of its pages, and the time."""
        now = self.residency.tick(now)
        pages = request.prompt_pages
        if self._recompute_last_token:
            pages = request.lookup_pages(self.page_tokens)
        path, partial, agreed, rest = self.tree.walk(self.tree.root, request.runs, pages)
        if partial is not None:
            path.append(self.cut_at(partial, agreed, now))
        return path, rest, now

    def find(self, runs: tuple[Extent, ...], limit: int = UNLIMITED) -> list[Node]:
        """Return the nodes cached of a path's first ``limit`` pages, and refresh them. The last is cut where they end."""
        residency = self.residency
        now = residency.tick(residency.now)
        path, partial, agreed, _ = self.tree.walk(self.tree.root, runs, limit)
        if partial is not None:
            path.append(self.cut_at(partial, agreed, now))
        residency.reannounce(path, residency.tick(now))
        return path

    def cut_at(self, node: Node, pages: int, now: float) -> Node:
        """Cut a node after its first ``pages`` pages, which alone are touched. Returns the upper part."""
        node.last_used = now
        upper = self.residency.cut(node, pages)
        upper.created = upper.last_used = now
        self._notify_evictable(node)
        return upper

    def _notify_evictable(self, node: Node) -> None:
        """Announce a node again where it is evictable, since its place in the order of eviction may have changed."""
        for tier in self.tiers:
            if node.is_evictable(tier.index):
                tier.eviction.on_evictable(node)

    def can_evict(self, pages: int, path: list[Node], path_pages: int) -> bool:
        """Whether ``pages`` GPU pages can be evicted while the path stays, which has ``path_pages`` pages on the GPU."""
        evictable = self.gpu.evictable_pages
        return pages + path_pages <= evictable or pages + sum([node.pages for node in path if not node.pins[GPU]]) <= evictable

    def touch(self, path: list[Node], now: float) -> None:
        """Refresh a path that has been looked up but is not used."""
        for node in path:
            node.last_used = now
            self._notify_evictable(node)

    def evict(self, pages: int, now: float) -> None:
        """Evict at least ``pages`` pages."""
        gpu, counts = self.gpu, self.counts
        for offered in victims(gpu, now):
            node = victim(offered, self.tree, gpu)
            gpu.eviction.cut_offered(node)
            pages -= node.pages
            counts.dropped_pages += node.pages
            self.residency.free(node, gpu)
            if pages <= 0:
                break
        check_enough(gpu, pages)

    def _insert_known(self, lease: NodeLease, extents: tuple[Extent, ...], now: float) -> tuple[Extent, ...]:
        """Give back computed pages that the cache has already. Returns those that it lacks."""
        gpu = self.gpu
        path, partial, agreed, rest = self.tree.walk(lease.node, extents)
        if partial is not None:
            path.append(self.cut_at(partial, agreed, now))
        for node in path:
            node.hits += 1
            self.pin_known(lease, node, now)
            mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
            self.residency.give(gpu, mine)
        self.residency.notices.hits(path, now)
        return rest

    def pin_known(self, lease: Holder, node: Node, now: float) -> None:
        """Extend a request's pinned path by a node that is on the GPU."""
        node.last_used = now
        self.residency.pin_alone(node, self.gpu)
        lease.node = node

    def add_leaf(self, lease: Holder, extents: tuple[Extent, ...], now: float) -> None:
        """Add a node for the pages that the cache lacks, in slots of the request."""
        gpu, parent = self.gpu, lease.node
        pages = extents[0][1] if len(extents) == 1 else count_pages(extents)
        mine, lease.slots = gpu.pool.split(lease.slots, pages)
        lease.node = self.residency.add_leaf(parent, extents, pages, gpu, mine, now)

    def finish_request(self, lease: NodeLease) -> None:
        """End a request whose answer is complete: unpin its path and give back its other slots."""
        self.residency.notices.finish(lease.request, lease.node, self.residency.now)
        self.residency.give(self.gpu, lease.slots)
        self.residency.unpin(lease.node, self.gpu)
