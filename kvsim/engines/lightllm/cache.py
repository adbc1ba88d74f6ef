"""LightLLM's cache: a radix tree on the GPU, and below it a CPU cache of single pages."""

from dataclasses import dataclass
from typing import Any

from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.rules import Rules
from kvsim.core.serving import NEVER_FITS, Server
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.tree import Node, RadixTree
from kvsim.core.victims import check_enough, victim, victims
from kvsim.engines.lightllm.page_store import PageStore
from kvsim.pages.extents import Extent, count_pages, join_extents


@dataclass(slots=True)
class LightLLMCounts:
    """Pages loaded, stored or lost since the start of the run."""

    loaded_pages: int = 0
    """Loaded to the GPU."""
    written_pages: int = 0
    """Stored in CPU memory."""
    no_room_pages: int = 0
    """Not stored, because the prompt itself or a waiting look-up had every page."""
    dropped_pages: int = 0
    """Evicted from the GPU, whether or not the CPU has them."""


class RunningLease:
    """What a running request holds: the pinned path that it found, and slots for all other pages."""

    __slots__ = ("computed", "hits", "node", "pages", "request", "slots")

    def __init__(
        self, request: Request, node: Node, computed: tuple[Extent, ...], pages: int, slots: Any, hits: tuple[int, int, int]
    ) -> None:
        self.request = request
        self.node = node
        self.computed = computed
        """Page ids after those found on the GPU, of all pages that enter the tree when the request finishes."""
        self.pages = pages
        """All pages of the request, found or not."""
        self.slots = slots
        self.hits = hits


class LightLLMCache(Server):
    """Serves requests from one or two tiers.

    look-up     on the CPU when a request is first tried; the pages found stay taken until it is admitted. On the GPU at admission
    admission   when its pages and those of all running requests, counted in full, are fewer than the GPU has
    hits        pages of the tree, then those of the CPU pages found that lie beyond them; a load may begin inside a CPU page
    eviction    on the GPU whole unpinned leaves in the policy's order until there is room; on the CPU see ``PageStore``
    recency     a look-up or an insert refreshes its whole path; what it cuts off keeps its time
    finish      first the CPU stores what placement wants of the prompt; then the pages that the tree lacks enter it, and the
                slots of those that it has by now are given back; from then on, other requests can find them
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int) -> None:
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.page_tokens = page_tokens
        self.residency = Residency([self.gpu], len(tiers))
        self.counts = LightLLMCounts()
        self.store = PageStore(edges[0]) if edges else None
        self._edges = edges
        self._rules = rules
        self._running_pages = 0
        """Pages of all running requests, those that they share counted for each."""
        self._waiting: Request | None = None
        """The request that waits for room; what it has found on the CPU is taken."""
        self._found: tuple[Extent, ...] = ()
        """CPU pages that the last look-up has found."""

    @property
    def tree(self) -> RadixTree:
        """The radix tree of the pages on the GPU."""
        return self.residency.tree

    def serve(self, request: Request, pages: int, now: float) -> object:
        """Look up and admit with room for ``pages`` pages in all.

        Returns None if running requests leave too little room, and NEVER_FITS if the request never fits.
        """
        gpu, path = self.gpu, self._path(request)
        if self._rules.cache_output:
            pages = request.pages_for(computed_tokens(request), self.page_tokens)
        if pages >= gpu.pool.capacity:
            return NEVER_FITS
        if not self._begin(request, path, pages, now):
            return None
        now = self.residency.now
        node, computed = self._pin_known(path, self._usable_pages(request), now)
        hit_pages = node.depth + node.pages
        loaded_pages = self._load(hit_pages)
        missing = pages - hit_pages - gpu.pool.free
        if missing > 0:
            self._evict(missing, now)
        self._running_pages += pages
        return RunningLease(
            request, node, computed, pages, self.residency.take(gpu, pages - hit_pages), (hit_pages, loaded_pages, 0)
        )

    def finish_request(self, lease: RunningLease) -> None:
        """End a request whose answer is complete: store its prompt, insert what it computed, and free the rest."""
        gpu, request = self.gpu, lease.request
        if self.store is not None:
            self._store_prompt(request, lease.node)
        if lease.computed or lease.node.parent is not None:
            self._insert(lease, self.residency.tick(self.residency.now))
        self._running_pages -= lease.pages
        self.residency.give(gpu, lease.slots)
        self.residency.unpin(lease.node, gpu)

    def _begin(self, request: Request, path: tuple[Extent, ...], pages: int, now: float) -> bool:
        """Look up on the CPU and, if there is room for ``pages`` pages in all, begin a request; otherwise return False."""
        has_room = self._has_room(pages)
        if self.store is not None:
            self._look_up(self.store, request, path, self._usable_pages(request), has_room)
        if has_room:
            self.residency.notices.request(request, self.residency.tick(now))
        return has_room

    def _has_room(self, pages: int) -> bool:
        """Whether a request of ``pages`` pages can run beside those that do."""
        return self._running_pages + pages < self.gpu.pool.capacity

    def _usable_pages(self, request: Request) -> int:
        """Return how many pages of a prompt a look-up covers."""
        return request.lookup_pages(self.page_tokens) if self._rules.recompute_last_token else request.prompt_pages

    def _path(self, request: Request) -> tuple[Extent, ...]:
        """Return the page ids of everything that enters the tree."""
        if not self._rules.cache_output:
            return request.runs
        if request.own_path is not None:
            return request.own_path
        return join_extents(request.runs, request.output_runs or ())

    # --- GPU -------------------------------------------------------------------------------------------------------------

    def _pin_known(self, extents: tuple[Extent, ...], usable: int, now: float) -> tuple[Node, tuple[Extent, ...]]:
        """Pin the nodes that match. Returns the last of them, cut where the match ends, and the rest of the path."""
        path, rest = self.residency.follow(self.tree.root, extents, usable)
        node = path[-1] if path else self.tree.root
        self.residency.pin_path(path, self.gpu, node.depth + node.pages)
        self.residency.use(path, now, is_first=True)
        return node, rest

    def _insert(self, lease: RunningLease, now: float) -> None:
        """Add the computed pages that the tree lacks, in slots of the request; pin the whole path and mark it as used now."""
        gpu = self.gpu
        path, rest = self.residency.follow(lease.node, lease.computed)
        for node in path:
            self.residency.pin_alone(node, gpu)
            node.hits += 1
            lease.node = node
            surplus, lease.slots = gpu.pool.split(lease.slots, node.pages)
            self.residency.give(gpu, surplus)
        self.residency.notices.hits(path, now)
        if rest:
            pages = count_pages(rest)
            mine, lease.slots = gpu.pool.split(lease.slots, pages)
            lease.node = self.residency.add_leaf(lease.node, rest, pages, gpu, mine, now)
        used = lease.node
        while used.parent is not None:
            used.last_used = now
            used = used.parent
        self.residency.notices.finish(lease.request, lease.node, now)

    def _evict(self, pages: int, now: float) -> None:
        """Evict whole leaves until at least ``pages`` pages are free; the admission test has made sure that there are."""
        gpu = self.gpu
        for offered in victims(gpu, now):
            node = victim(offered, self.tree, gpu)
            gpu.eviction.cut_offered(node)
            pages -= node.pages
            self.counts.dropped_pages += node.pages
            self.residency.free(node, gpu)
            if pages <= 0:
                break
        check_enough(gpu, pages)

    # --- CPU -------------------------------------------------------------------------------------------------------------

    def _look_up(self, store: PageStore, request: Request, path: tuple[Extent, ...], usable: int, has_room: bool) -> None:
        """Look a request up on the CPU when it is first tried, and refresh what it finds when there is room for it."""
        if self._waiting is request:
            if has_room:
                store.give_back(self._found)
                self._waiting = None
            return
        self._found = store.find(store.named(path, usable))
        if has_room:
            store.refresh(self._found)
        else:
            store.take(self._found)
            self._waiting = request

    def _load(self, hit_pages: int) -> int:
        """Load what the look-up has found. Returns how many of these pages, in GPU pages, lie beyond the hit."""
        if self.store is None:
            return 0
        loaded_pages = max(0, count_pages(self._found) * self.store.tier.unit_pages - hit_pages)
        self.counts.loaded_pages += loaded_pages
        return loaded_pages

    def _store_prompt(self, request: Request, node: Node) -> None:
        store, edge, now = self.store, self._edges[0], self.residency.now
        assert store is not None
        if edge.wants_requests:
            edge.placement.on_request(request, now)
        wanted = edge.wanted_pages(request, node.path(), now)
        if self._rules.recompute_last_token:
            wanted = min(wanted, request.lookup_pages(self.page_tokens))
        before = store.tier.inserted_pages
        store.store(store.named(self._path(request), wanted))
        self.counts.written_pages += store.tier.inserted_pages - before
        self.counts.no_room_pages = store.no_room_pages


def computed_tokens(request: Request) -> int:
    """Return the number of tokens whose KV a request computes or reuses: all but the last token of its answer."""
    return request.prompt_tokens + max(request.output_tokens, 1) - 1
