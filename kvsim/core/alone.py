"""A request's whole life in a cache of several tiers, in one pass, where no other request runs and the GPU has all it reuses.

What ``InstantCache.match``, ``admit``, ``insert`` and ``finish_request`` do one after another is done here without the steps
between them. Decisions and counts are the same (a test plays both). It exists for speed, like ``single.py``.
"""

from math import inf, nextafter

from kvsim.core.cache import Lease
from kvsim.core.instant import InstantCache
from kvsim.core.pages import split_runs
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.tree import NO_CHILDREN, READY, Node


class AloneOnGpu:
    """Serves requests that reuse nothing but GPU pages."""

    def __init__(self, cache: InstantCache) -> None:
        self.cache = cache
        self._recompute_last_token = cache.rules.recompute_last_token
        self._line_up = getattr(cache.gpu.eviction, "line_up", cache.gpu.on_evictable)

    @staticmethod
    def suits(cache: InstantCache) -> bool:
        """Whether nobody has to be told of requests, hits and inserts, nothing is offered after use, and GPU slots are numbers."""
        hears = cache.announced or cache.finished or cache.listeners or cache.gpu.on_insert
        return not hears and not any(tier.after_use for tier in cache.tiers) and type(cache.gpu.pool) is Pool

    def serve(self, request: Request, pages: int, now: float) -> int | Lease:
        """Serve and finish a request that takes ``pages`` pages in all, while no other runs. Returns its hit pages.

        Or, if it cannot be served here since lower tiers have some of its pages or since it does not fit, its match.

        Of the path that is reused only the last node is pinned: the others have a child on the GPU, so that they are no victims.
        """
        cache, runs = self.cache, request.runs
        gpu, tree = cache.gpu, cache.tree
        pool = gpu.pool
        if self._recompute_last_token and (usable := (request.prompt_tokens - 1) // cache.page_tokens) < request.prompt_pages:
            runs = split_runs(runs, usable)[0]
        path, partial, agreed, rest = tree.walk(tree.root, runs)
        if partial is not None:
            path.append(cache.cut(partial, agreed))
        node = path[-1] if path else tree.root
        depth = node.depth + node.pages
        if runs is not request.runs:
            rest = split_runs(request.runs, depth)[1]
        if path and node.state[0] != READY or pages > pool.capacity or rest and rest[0][0] in node.children:
            return cache.lease(request, path, depth, rest)
        if now <= cache.now:
            now = nextafter(cache.now, inf)
        for used in path:
            used.hits += 1
            used.last_used = now
        new_pages = pages - depth
        if new_pages > pool.free:
            if path:
                node.pins[0] = 1
            cache.make_room(gpu, new_pages, now)
            pinned: Node | None = node
            while pinned is not None and pinned.pins[0]:  # eviction from other tiers can have cut the node
                pinned.pins[0] = 0
                pinned = pinned.parent
        if pool.free - new_pages < pool.least_free:
            pool.least_free = pool.free - new_pages
        cache.now = now = nextafter(now, inf)
        if not rest:
            if path and not node.kids[0]:
                gpu.on_evictable(node)
            return depth
        new_pages = request.prompt_pages - depth
        leaf = Node(rest, new_pages, depth, node, tree.tiers, now)
        leaf.state[0] = READY
        leaf.slots[0] = new_pages
        if node.children is NO_CHILDREN:
            node.children = {rest[0][0]: leaf}
        else:
            node.children[rest[0][0]] = leaf
        node.kids[0] += 1
        pool.free -= new_pages
        gpu.inserted_pages += new_pages
        gpu.evictable_pages += new_pages
        self._line_up(leaf)
        return depth
