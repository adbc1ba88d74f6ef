"""A request's whole life in a cache of one tier, in one pass.

What ``TieredCache.match``, ``admit`` and ``insert`` do one after another is done here without the steps between them: with one
tier nothing is loaded, written down or waited for. Tree, tier, policy and every count are the cache's own, and decisions are
the same (a test plays both). It exists for speed: replaying one tier takes half the time, and a fifth where requests never
overlap.
"""

from heapq import heappop, heapreplace
from math import nextafter
from typing import Any, cast

from kvsim.core.cache import TieredCache
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.runs import Run, count_pages, drop_last_pages, join_runs, split_runs
from kvsim.core.tier import overridden
from kvsim.core.tree import ABSENT, NO_CHILDREN, READY, Node, matching_pages, runs_after

INFINITY = float("inf")


class HeldPages:
    """What a served request keeps until it is released: a pinned path and slots of its own. A small ``Lease``."""

    __slots__ = ("hits", "node", "request", "rest", "slots")
    owed_pages = 0
    loading = None

    rest: tuple[Run, ...]
    """What is left to insert, for ``join_known`` only."""

    def __init__(self, request: Request, node: Node, hit_pages: int, slots: Any) -> None:
        self.request = request
        self.node = node
        self.hits = hit_pages, 0, 0
        self.slots = slots


class SingleTier:
    """Serves requests from a cache of one tier."""

    def __init__(self, cache: TieredCache) -> None:
        if len(cache.tiers) != 1:
            raise ValueError(f"this cache has {len(cache.tiers)} tiers, not one")
        self.cache = cache
        self.tier = tier = cache.gpu
        self._recompute_last_token = cache.rules.recompute_last_token
        self._can_trim = tier.on_remove is None or tier.on_trim is not None
        self._heap: Any = getattr(tier.eviction, "pass_heap", None)
        self._rank: Any = getattr(tier.eviction, "rank", None)
        self._before_pass: Any = overridden(tier.eviction, "before_pass") if self._heap is not None else None
        self._after_pass: Any = overridden(tier.eviction, "after_pass") if self._heap is not None else None
        self._in_one_pass = type(tier.pool) is Pool
        """Slots are numbers."""
        self._uses_heap = self._heap is not None and tier.on_remove is None and self._in_one_pass
        """Victims can be taken from the policy's heap without telling anybody."""
        self._queues: Any = getattr(tier.eviction, "pass_queues", None) if self._in_one_pass else None
        self._may_lengthen = self._uses_heap and tier.eviction.recency_only and not self._is_told()
        """What a request adds below a leaf that only it uses may become part of that leaf."""

    def _is_told(self) -> bool:
        """Whether the policy hears of requests or of nodes."""
        return bool(self.tier.on_insert or self.tier.on_hit or self.cache.announced or self.cache.finished)

    def serve(self, request: Request, pages: int, now: float) -> HeldPages | None:
        """Match, admit with room for ``pages`` pages in all, and insert. None, and nothing changed but a cut, without room."""
        cache, tier, runs = self.cache, self.tier, request.runs
        tree, pool = cache.tree, tier.pool
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
        for announce in cache.announced:
            announce(request, now)
        cache.use_path(path, hit_pages, now)
        if missing > 0:
            if self._uses_heap:
                self._make_room_from_heap(missing, now)
            elif self._queues is not None:
                self._make_room_from_queues(missing, now)
            else:
                self._make_room(missing, now)
        held = HeldPages(request, node, hit_pages, pool.take(pages - hit_pages))
        cache.leases[held] = None
        if rest and rest[0][0] in node.children:
            held.rest = rest
            rest = cache.join_known(cast(Any, held), now)
            node = held.node
        if not rest:
            return held
        start, pages = rest[0]
        if len(rest) > 1:
            pages = count_pages(rest)
        if self._may_lengthen and not node.kids[0] and node.pins[0] == 1:
            node.runs = join_runs(node.runs, rest)
            node.pages += pages
            mine, held.slots = pool.split(held.slots, pages)
            node.slots[0] = pool.join(node.slots[0], mine)
            tier.inserted_pages += pages
            return held
        held.node = leaf = Node(rest, pages, node.depth + node.pages, node, 1, now)
        if node.children is NO_CHILDREN:
            node.children = {start: leaf}
        else:
            node.children[start] = leaf
        leaf.slots[0], held.slots = pool.split(held.slots, pages)
        leaf.state[0] = READY
        leaf.pins[0] = 1
        node.kids[0] += 1
        tier.inserted_pages += pages
        if tier.on_insert:
            tier.on_insert(leaf, now)
        return held

    def serve_alone(self, request: Request, pages: int, now: float) -> tuple[int, int, int] | None:
        """As ``serve`` and at once ``finish_request``, while no other request runs. Returns the hit pages; None without room.

        No path is pinned: all but its last node have a child, so that they are no victims, and what is held before and after
        is the tree alone.
        """
        cache, tier, runs = self.cache, self.tier, request.runs
        pool = tier.pool
        if not self._in_one_pass or pages > pool.capacity or not runs:
            held = self.serve(request, pages, now)
            if held is None:
                return None
            self.finish_request(held)
            return held.hits
        if now <= cache.now:
            now = nextafter(cache.now, INFINITY)
        cache.now = now
        recomputes = self._recompute_last_token and (request.prompt_tokens - 1) // cache.page_tokens < request.prompt_pages
        if recomputes:
            runs = split_runs(runs, (request.prompt_tokens - 1) // cache.page_tokens)[0]
        for announce in cache.announced:
            announce(request, now)
        node, rest = self._use(cache.tree.root, runs, now) if runs else (cache.tree.root, runs)
        depth = hit_pages = node.depth + node.pages
        if recomputes:
            rest = split_runs(request.runs, depth)[1]
        free = pool.free - (pages - hit_pages)
        node.pins[0] = 1
        if free < 0:
            if self._uses_heap:
                self._make_room_from_heap(-free, now)
            elif self._queues is not None:
                self._make_room_from_queues(-free, now)
            else:
                self._make_room(-free, now)
            free = 0
        if free < pool.least_free:
            pool.least_free = free
        if rest and rest[0][0] in node.children:
            node.pins[0] = 0
            node, rest = self._join_known(node, rest, now)
            node.pins[0] = 1
            depth = node.depth + node.pages
        if rest:
            new_pages = request.prompt_pages - depth
            pool.free -= new_pages
            tier.inserted_pages += new_pages
            tier.evictable_pages += new_pages
            if self._may_lengthen and depth and not node.kids[0]:
                node.runs = join_runs(node.runs, rest)
                node.slots[0] = node.pages = node.pages + new_pages
            else:
                leaf = Node(rest, new_pages, depth, node, 1, now)
                if node.children is NO_CHILDREN:
                    node.children = {rest[0][0]: leaf}
                else:
                    node.children[rest[0][0]] = leaf
                node.kids[0] += 1
                node.pins[0] = 0
                leaf.state[0] = READY
                leaf.slots[0] = new_pages
                node = leaf
                if tier.on_insert:
                    node.pins[0] = 1
                    tier.on_insert(node, now)
        if cache.finished:
            node.pins[0] = 1
            for finish in cache.finished:
                finish(request, node, now)
        node.pins[0] = 0
        if not node.kids[0]:
            tier.on_evictable(node)
        return hit_pages, 0, 0

    def _use(self, node: Node, runs: tuple[Run, ...], now: float) -> tuple[Node, tuple[Run, ...]]:
        """Follow ``runs`` down from ``node`` and count and tell hits. Returns the last node and the rest of the runs.

        No path is pinned, but a node is while its hit is told: to the policy it is in use.
        """
        at, last, on_hit = 0, len(runs) - 1, self.tier.on_hit
        start, left = runs[0]
        children = node.children
        while start in children:
            node = children[start]
            pages = node.pages
            if len(node.runs) > 1:
                agreed, at, left = matching_pages(node, runs, at, left)
                if agreed < pages:
                    node = self._cut(node, agreed)
                node.hits += 1
                node.last_used = now
                if on_hit:
                    node.pins[0] = 1
                    on_hit(node, now)
                    node.pins[0] = 0
                if agreed < pages or at > last:
                    return node, runs_after(runs, at, left)
                start = runs[at][0] + runs[at][1] - left
            elif pages > left:
                node = self._cut(node, left)
                node.hits += 1
                node.last_used = now
                if on_hit:
                    on_hit(node, now)
                return node, runs[at + 1 :]
            else:
                node.hits += 1
                node.last_used = now
                if on_hit:
                    node.pins[0] = 1
                    on_hit(node, now)
                    node.pins[0] = 0
                if pages < left:
                    start += pages
                    left -= pages
                elif at == last:
                    return node, ()
                else:
                    at += 1
                    start, left = runs[at]
            children = node.children
        if at == last:
            return node, ((start, left),)
        return node, ((start, left), *runs[at + 1 :])

    def _cut(self, node: Node, pages: int) -> Node:
        """``TieredCache.cut`` for one tier that counts its slots."""
        upper = self.cache.tree.cut(node, pages)
        upper.state[0], upper.kids[0] = READY, 1
        upper.slots[0], node.slots[0] = pages, node.pages
        if self.tier.on_split:
            self.tier.on_split(upper, node)
        return upper

    def _join_known(self, node: Node, runs: tuple[Run, ...], now: float) -> tuple[Node, tuple[Run, ...]]:
        """Follow what has been computed again, and is in the tree, down from ``node``: no hit, but a use."""
        path, partial, agreed, rest = self.cache.tree.walk(node, runs)
        if partial is not None:
            path.append(self.cache.cut(partial, agreed))
        for node in path:
            node.last_used = now
        return node, rest

    def _make_room(self, missing: int, now: float) -> None:
        """Evict so many pages, of which there are as many."""
        tier, pool, counts_slots = self.tier, self.tier.pool, self._in_one_pass
        tier.evictable_pages -= missing
        tier.evicted_pages += missing
        self.cache.counts.dropped_pages += missing
        if counts_slots:
            pool.free += missing
        on_evictable, on_remove = tier.on_evictable, tier.on_remove
        for node in tier.eviction.victims(now):
            pages = node.pages
            if pages > missing:
                if self._can_trim:
                    self._trim(node, pages - missing)
                    return
                self.cache.cut(node, pages - missing)
                pages = missing
            node.state[0] = ABSENT
            if not counts_slots:
                pool.give(node.slots[0])
            if on_remove:
                on_remove(node)
            parent: Any = node.parent
            del parent.children[node.runs[0][0]]
            kids = parent.kids
            left = kids[0] = kids[0] - 1
            if not left and not parent.pins[0] and parent.state[0] == READY:
                on_evictable(parent)
            missing -= pages
            if not missing:
                return

    def _make_room_from_heap(self, missing: int, now: float) -> None:
        """As ``_make_room``, with ``RankedEviction.victims`` and ``_free`` put in line."""
        tier, heap, rank = self.tier, self._heap, self._rank
        if self._before_pass:
            self._before_pass(now)
        tier.evictable_pages -= missing
        tier.evicted_pages += missing
        tier.pool.free += missing
        self.cache.counts.dropped_pages += missing
        while missing:
            then, number, node = heap[0]
            if node.kids[0] or node.state[0] != READY or node.pins[0]:
                heappop(heap)
                continue
            if (now_rank := rank(node)) != then:
                heapreplace(heap, (now_rank, number, node))
                continue
            pages, runs = node.pages, node.runs
            if pages > missing:
                node.slots[0] = node.pages = pages = pages - missing
                node.runs = ((runs[0][0], pages),) if len(runs) == 1 else drop_last_pages(runs, missing)
                break
            heappop(heap)
            missing -= pages
            parent = node.parent
            node.state[0] = ABSENT
            del parent.children[runs[0][0]]
            kids = parent.kids
            left = kids[0] = kids[0] - 1
            if not left and not parent.pins[0] and parent.state[0] == READY:
                tier.on_evictable(parent)
        if self._after_pass:
            self._after_pass(node, then)

    def _make_room_from_queues(self, missing: int, now: float) -> None:
        """As ``_make_room``, with ``QueueEviction.victims`` put in line."""
        tier, heaps = self.tier, self._queues
        policy: Any = tier.eviction
        tier.evictable_pages -= missing
        tier.evicted_pages += missing
        tier.pool.free += missing
        self.cache.counts.dropped_pages += missing
        policy.begin_pass()
        choose, mixed = policy.choose, policy.mixed
        while missing:
            queue, most = choose()
            heap = heaps[queue]
            node = heap[0][4]
            pages = node.pages
            if most < pages or mixed and node in mixed:
                pages = policy.cut_victim(node, most)
            runs = node.runs
            if pages > missing:
                kept = node.slots[0] = node.pages = pages - missing
                if len(runs) == 1:
                    start = runs[0][0]
                    node.runs = ((start, kept),)
                    policy.on_trim(node, ((start + kept, missing),))
                else:
                    node.runs, gone = split_runs(runs, kept)
                    policy.on_trim(node, gone)
                return
            heappop(heap)
            missing -= pages
            parent = node.parent
            node.state[0] = ABSENT
            policy.on_victim(node)
            del parent.children[runs[0][0]]
            kids = parent.kids
            left = kids[0] = kids[0] - 1
            if not left and not parent.pins[0] and parent.state[0] == READY:
                tier.on_evictable(parent)

    def _trim(self, node: Node, pages: int) -> None:
        """Evict a node's last pages; so many stay. Slots that are only counted have been given back."""
        tier, runs = self.tier, node.runs
        gone: tuple[Run, ...]
        if len(runs) == 1:
            node.runs, gone = ((runs[0][0], pages),), ((runs[0][0] + pages, node.pages - pages),)
        else:
            node.runs, gone = split_runs(runs, pages)
        node.pages = pages
        if self._in_one_pass:
            node.slots[0] = pages
        else:
            node.slots[0], freed = tier.pool.split(node.slots[0], pages)
            tier.pool.give(freed)
        if tier.on_trim:
            tier.on_trim(node, gone)

    def finish_request(self, held: HeldPages) -> None:
        """The request is over: unpin its path and give back its slots."""
        cache, tier = self.cache, self.tier
        for finish in cache.finished:
            finish(held.request, held.node, cache.now)
        tier.pool.give(held.slots)
        del cache.leases[held]
        cache.leave_path(held.node)
