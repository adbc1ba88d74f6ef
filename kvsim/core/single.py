"""A request's whole life in a cache of one tier, in one pass.

What ``TieredCache.match``, ``admit`` and ``insert`` do one after another is done here without the steps between them: with one
tier nothing is loaded, written down or waited for. Tree, tier, policy and every count are the cache's own, and decisions are
the same (a test plays both). It exists for speed: replaying one tier takes half the time.
"""

from math import nextafter
from typing import Any, cast

from kvsim.core.cache import TieredCache
from kvsim.core.pages import Run, count_pages, split_runs
from kvsim.core.request import Request
from kvsim.core.tree import ABSENT, NO_CHILDREN, READY, Node

INFINITY = float("inf")


class HeldPages:
    """What a served request keeps until it is released: a pinned path and slots of its own. A small ``Lease``."""

    __slots__ = ("hit_pages", "node", "rest", "slots")
    owed_pages = 0
    loading = None

    def __init__(self, node: Node, hit_pages: int, rest: tuple[Run, ...], slots: Any) -> None:
        self.node = node
        self.hit_pages = hit_pages
        self.rest = rest
        self.slots = slots


class SingleTier:
    """Serves requests from a cache of one tier."""

    def __init__(self, cache: TieredCache) -> None:
        if len(cache.tiers) != 1:
            raise ValueError(f"this cache has {len(cache.tiers)} tiers, not one")
        self.cache = cache
        self.tier = cache.gpu
        self._recompute_last_token = cache.rules.recompute_last_token
        self._can_trim = self.tier.on_split is None and self.tier.on_remove is None

    def serve(self, request: Request, pages: int, now: float) -> HeldPages | None:
        """Match, admit with room for ``pages`` pages in all, and insert. None, and nothing changed but a cut, without room."""
        cache, tier = self.cache, self.tier
        pool, tree, runs = tier.pool, cache.tree, request.runs
        if self._recompute_last_token and (usable := (request.prompt_tokens - 1) // cache.page_tokens) < request.prompt_pages:
            runs = split_runs(runs, usable)[0]
        path, partial, agreed, rest = tree.walk(tree.root, runs)
        if partial is not None:
            path.append(cache.cut(partial, agreed))
        node = path[-1] if path else tree.root
        hit_pages = node.depth + node.pages
        if runs is not request.runs:
            rest = split_runs(request.runs, hit_pages)[1]
        missing = pages - hit_pages - pool.free
        if missing > 0 and missing + hit_pages > tier.evictable_pages:
            idle = sum([node.pages for node in path if not node.pins[0]])
            if missing + idle > tier.evictable_pages:
                return None
        if now <= cache.now:
            now = nextafter(cache.now, INFINITY)
        cache.now = now
        evictable = 0
        for node in path:
            pins = node.pins
            if not pins[0]:
                evictable += node.pages
            pins[0] += 1
            node.hits += 1
            node.last_used = now
        tier.evictable_pages -= evictable
        if cache.listeners:
            cache.tell_hits(path, now)
        if missing > 0:
            self._make_room(missing, now)
        held = HeldPages(node, hit_pages, rest, pool.take(pages - hit_pages))
        if rest and rest[0][0] in node.children:
            rest = cache.join_known(cast(Any, held), now)
        if rest:
            self._add_leaf(held, rest, now)
        cache.leases[held] = None
        return held

    def _add_leaf(self, held: HeldPages, runs: tuple[Run, ...], now: float) -> None:
        tier, parent = self.tier, held.node
        pages = runs[0][1] if len(runs) == 1 else count_pages(runs)
        node = Node(runs, pages, parent.depth + parent.pages, parent, 1, now)
        if parent.children is NO_CHILDREN:
            parent.children = {runs[0][0]: node}
        else:
            parent.children[runs[0][0]] = node
        node.slots[0], held.slots = tier.pool.split(held.slots, pages)
        node.state[0] = READY
        node.pins[0] = 1
        parent.kids[0] += 1
        held.node = node
        tier.inserted_pages += pages
        if tier.on_insert:
            tier.on_insert(node, now)

    def _make_room(self, missing: int, now: float) -> None:
        """Evict so many pages, of which there are as many."""
        cache, tier = self.cache, self.tier
        cache.counts.dropped_pages += missing
        tier.evictable_pages -= missing
        tier.evicted_pages += missing
        for node in tier.eviction.victims(now):
            pages = node.pages
            if pages > missing:
                if not self._can_trim:
                    cache.cut(node, pages - missing)
                    self._free(node)
                    return
                node.pages = pages = pages - missing
                runs = node.runs
                node.runs = ((runs[0][0], pages),) if len(runs) == 1 else split_runs(runs, pages)[0]
                node.slots[0], freed = tier.pool.split(node.slots[0], pages)
                tier.pool.give(freed)
                return
            self._free(node)
            missing -= pages
            if not missing:
                return

    def _free(self, node: Node) -> None:
        """Take an evictable node out of the tree, and so out of the cache."""
        tier, parent = self.tier, node.parent
        assert parent is not None
        node.state[0] = ABSENT
        tier.pool.give(node.slots[0])
        if tier.on_remove:
            tier.on_remove(node)
        del parent.children[node.runs[0][0]]
        kids = parent.kids
        left = kids[0] = kids[0] - 1
        if not left and not parent.pins[0] and parent.state[0] == READY:
            tier.on_evictable(parent)

    def release(self, held: HeldPages) -> None:
        """The request is over: unpin its path and give back its slots."""
        cache, tier = self.cache, self.tier
        tier.pool.give(held.slots)
        del cache.leases[held]
        node: Any = held.node
        parent = node.parent
        evictable = 0
        while parent is not None:
            pins = node.pins
            left = pins[0] = pins[0] - 1
            if not left and node.state[0] == READY:
                evictable += node.pages
                if not node.kids[0]:
                    tier.on_evictable(node)
            node, parent = parent, parent.parent
        tier.evictable_pages += evictable
