"""A request's whole life in a cache of several tiers, in one pass, where no other request runs and the GPU has all it reuses.

What ``InstantCache.match``, ``admit``, ``insert`` and ``finish_request`` do one after another is done here without the steps
between them. Decisions and counts are the same (a test plays both). It exists for speed, like ``single.py``.
"""

from math import inf, nextafter

from kvsim.core.cache import Lease
from kvsim.core.instant import InstantCache
from kvsim.core.request import Request
from kvsim.core.runs import Run, split_runs
from kvsim.core.sinking import Sinking
from kvsim.core.tree import NO_CHILDREN, READY, Node


class AloneOnGpu:
    """Serves requests that reuse nothing but GPU pages."""

    def __init__(self, cache: InstantCache) -> None:
        self.cache = cache
        self._recompute_last_token = cache.rules.recompute_last_token
        self._offers = any(tier.after_use for tier in cache.tiers)
        self._line_up = cache.gpu.eviction.line_up  # type: ignore[attr-defined]

    @staticmethod
    def suits(cache: InstantCache) -> bool:
        """Whether eviction goes through ``Sinking`` and nothing else happens for requests, hits, prompts and answers."""
        hears = cache.announced or cache.finished or cache.listeners or cache.offering
        by_prompt = any(tier.wanted_pages for tier in cache.tiers)
        return Sinking.suits(cache.tiers) and not (hears or by_prompt or cache.early or cache.rules.cache_output)

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
        if rest:
            node = self._add_leaf(node, rest, request.prompt_pages - depth, now)
        if self._offers:
            cache.pin(node, 0)
            cache.offer(node, now)
            cache.unpin(node, 0)
        elif not node.kids[0] and node is not tree.root:
            self._line_up(node)
        return depth

    def _add_leaf(self, parent: Node, runs: tuple[Run, ...], pages: int, now: float) -> Node:
        """The computed pages; nothing pins them."""
        gpu, start = self.cache.gpu, runs[0][0]
        leaf = Node(runs, pages, parent.depth + parent.pages, parent, self.cache.tree.tiers, now)
        leaf.state[0] = READY
        leaf.slots[0] = pages
        if parent.children is NO_CHILDREN:
            parent.children = {start: leaf}
        else:
            parent.children[start] = leaf
        parent.kids[0] += 1
        gpu.pool.free -= pages
        gpu.inserted_pages += pages
        gpu.evictable_pages += pages
        return leaf
