"""LightLLM's cache for hybrid models: KV from the GPU or the CPU, recurrent states of the tree or detached from it."""

from dataclasses import asdict
from typing import Any

from kvsim.core.request import Request
from kvsim.core.rules import HybridSettings, Rules
from kvsim.core.serving import NEVER_FITS
from kvsim.core.tier import Edge, Tier
from kvsim.core.tree import Node
from kvsim.engines.lightllm.cache import LightLLMCache
from kvsim.engines.lightllm.state_pool import StatePool
from kvsim.pages.extents import Extent, count_pages, split_extents


class HybridLease:
    """What a running request holds: a pinned path of the tree, and slots for all its other pages."""

    __slots__ = ("duplicates", "hits", "known", "node", "pages", "request", "slots", "taken")

    def __init__(self, request: Request, node: Node, pages: int, slots: Any) -> None:
        self.request = request
        self.node = node
        self.pages = pages
        """All pages of the request, found or not."""
        self.known = self.taken = node.depth + node.pages
        """Leading pages that are the tree's, and all pages that the request has so far."""
        self.slots = slots
        """Slots of pages that are not in the tree."""
        self.duplicates = slots
        """Slots of pages that the request computed before it found them in the tree."""
        self.hits = 0, 0, 0


class LightLLMHybridCache(LightLLMCache):
    """Serves a hybrid model from one or two tiers. A node of the tree always has KV; it may have a state (``StatePool``).

    look-up     CPU as in ``LightLLMCache``. On the GPU, the deepest node with a state; only its path is pinned, but the whole
                known path is refreshed and cut where it ends
    detached    the deepest detached state is used if it lies behind that node, within the pages that the GPU knows or within
                those found on the CPU, whichever are more. The KV up to it comes from the tree and, behind that, from the CPU;
                then the path and the state are inserted. All of these pages are booked as CPU hits
    prefill     in chunks, from the hit on. Each takes its pages when it begins; all but the last are inserted, each with a
                state. Pages that the tree has by then stay with the request as duplicates to its end
    finish      inserts nothing; first, the CPU stores what placement wants of the prompt, as in ``LightLLMCache``
    admission   as in ``LightLLMCache``, and each running request has a slot for its state

    LightLLM's hybrid radix cache with detached checkpoints (``HybridRadixCache``, ``DetachedMambaCheckpointCache``).
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int, hybrid: HybridSettings) -> None:
        super().__init__(tiers, edges, rules, page_tokens)
        assert hybrid.state_tiers is not None
        self.known_pages: dict[int, int] = {}
        self.states = StatePool(hybrid.state_tiers[0], edges[0].lower.unit_pages if edges else None)
        self.residency.on_leave = self.states.leave
        self._chunk_pages = hybrid.prefill_chunk_tokens // page_tokens
        self._state_bytes = hybrid.state_bytes
        self._running: list[HybridLease] = []

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + [(page, 1) for page in self.states.detached or ()]

    def pages_known(self) -> dict[int, int]:
        return self.known_pages

    def describe_checkpoints(self) -> dict[str, int]:
        return asdict(self.states.describe(self._state_bytes))

    def serve(self, request: Request, pages: int, now: float) -> object:
        """As ``LightLLMCache.serve``."""
        gpu = self.gpu
        if pages >= gpu.pool.capacity:
            return NEVER_FITS
        extents, full = request.runs, request.prompt_tokens // self.page_tokens
        if full < request.prompt_pages:
            extents = split_extents(extents, full)[0]
        self.look_up(request)
        if not self.has_room(pages):
            return None
        self.residency.notices.request(request, self.residency.tick(now))
        found_pages = self.pages_beyond(request, 0)
        if self.store is not None:
            self.store.give_back(self.waiting.pop(request.index))
        path, _ = self.residency.follow(self.tree.root, extents, self.usable_pages(request))
        self.residency.use(path, self.residency.now, is_first=True)
        node = self._deepest_state(path)
        self.residency.pin(node, gpu)
        self.states.use(node)
        self.states.begin(node)
        lease = HybridLease(request, node, pages, self.residency.take(gpu, 0))
        self._running.append(lease)
        self.running_pages += pages
        hit_pages = lease.known
        known_pages = path[-1].depth + path[-1].pages if path else 0
        self._use_detached(lease, extents, known_pages, found_pages)
        lease.hits = hit_pages, lease.taken - hit_pages, 0
        self._count(request, max(known_pages, found_pages), lease.taken)
        self._prefill(lease, extents)
        return lease

    def has_room(self, pages: int) -> bool:
        return super().has_room(pages) and len(self._running) < self.states.tier.pool.capacity

    def finish_request(self, lease: Any) -> None:
        """End a request whose answer is complete: store its prompt and free what is not the tree's."""
        held: HybridLease = lease
        pool, request = self.gpu.pool, held.request
        if self.store is not None:
            self.store.give_back(self.hold_prompt(request, held.node).held, are_ready=True)
        self.residency.notices.finish(request, held.node, self.residency.now)
        self._running.remove(held)
        self.running_pages -= held.pages
        self.residency.give(self.gpu, pool.join(held.slots, held.duplicates))
        self.residency.unpin(held.node, self.gpu)
        self.states.end()

    def _deepest_state(self, path: list[Node]) -> Node:
        """Return the last node of a path with a state, or the root."""
        for node in reversed(path):
            if node in self.states:
                return node
        return self.tree.root

    def _use_detached(self, lease: HybridLease, extents: tuple[Extent, ...], known_pages: int, found_pages: int) -> None:
        """Begin from a detached state instead if there is one behind the hit."""
        depth = self.states.longest_detached(extents, max(known_pages, found_pages))
        if depth <= lease.known:
            return
        self.states.counts.used += not lease.known
        shared, now = min(known_pages, depth), self._tick()
        path, _ = self.residency.follow(self.tree.root, extents, shared)
        held = path[-1] if path else self.tree.root
        self.residency.pin(held, self.gpu)
        lease.known = lease.taken = max(lease.known, shared)
        self.counts.loaded_pages += depth - lease.taken
        self._take(lease, depth, now)
        self._insert_checkpoint(lease, extents, depth)
        self.residency.unpin(held, self.gpu)

    def _prefill(self, lease: HybridLease, extents: tuple[Extent, ...]) -> None:
        """Take the pages of each chunk; insert all chunks but the last."""
        tokens, page_tokens, chunk_pages = lease.request.prompt_tokens, self.page_tokens, self._chunk_pages
        full = count_pages(extents)
        while chunk_pages and (lease.taken + chunk_pages) * page_tokens < tokens:
            end = lease.taken + chunk_pages
            self._take(lease, end, self._tick())
            if end <= full:
                self._insert_checkpoint(lease, extents, end)
        self._take(lease, lease.pages, self._tick())

    def _insert_checkpoint(self, lease: HybridLease, extents: tuple[Extent, ...], depth: int) -> None:
        """Insert a request's first ``depth`` pages, pin them, mark them as used now, and save the state after them."""
        gpu, pool, now = self.gpu, self.gpu.pool, self._tick()
        start = lease.node.depth + lease.node.pages
        own = split_extents(split_extents(extents, depth)[0], start)[1]
        path, rest = self.residency.follow(lease.node, own)
        for node in path:
            self.residency.pin_alone(node, gpu)
            node.hits += 1
            lease.node = node
            if node.depth >= lease.known:
                duplicate, lease.slots = pool.split(lease.slots, node.pages)
                lease.duplicates = pool.join(lease.duplicates, duplicate)
        self.residency.notices.hits(path, now)
        if rest:
            pages = count_pages(rest)
            mine, lease.slots = pool.split(lease.slots, pages)
            lease.node = self.residency.add_leaf(lease.node, rest, pages, gpu, mine, now)
        used = lease.node
        while used.parent is not None:
            used.last_used = now
            used = used.parent
        lease.known = depth
        self.states.save(lease.node)

    def _take(self, lease: HybridLease, upto: int, now: float) -> None:
        """Take slots for a request's pages up to ``upto``, evicting as needed; if that is not enough, give back duplicates."""
        pool = self.gpu.pool
        missing = upto - lease.taken - pool.free
        if missing > self.gpu.evictable_pages:
            for other in self._running:
                self.residency.give(self.gpu, other.duplicates)
                other.duplicates = self.residency.take(self.gpu, 0)
            missing = upto - lease.taken - pool.free
        if missing > 0:
            self._evict(missing, now)
        lease.slots = pool.join(lease.slots, self.residency.take(self.gpu, upto - lease.taken))
        lease.taken = upto

    def _tick(self) -> float:
        """Return a time later than that of any use before."""
        return self.residency.tick(self.residency.now)

    def _count(self, request: Request, known_pages: int, used_pages: int) -> None:
        self.known_pages[request.index] = known_pages
        self.states.counts.tokens_lost_to_missing_state += (known_pages - used_pages) * self.page_tokens
