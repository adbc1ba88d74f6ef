"""LightLLM's cache: a radix tree on the GPU, and below it a CPU cache of single pages."""

from dataclasses import dataclass

from kvsim.core.lease import FIRST, Lease
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.rules import Rules
from kvsim.core.serving import NEVER_FITS, Server
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node, RadixTree
from kvsim.core.victims import check_enough, victim, victims
from kvsim.engines.lightllm.page_store import NOT_STORED, PageStore, Stored
from kvsim.pages.extents import Extent, count_pages, join_extents, split_extents


@dataclass(slots=True)
class LightLLMCounts:
    """Pages loaded, stored or lost since the start of the run."""

    loaded_pages: int = 0
    """Loaded to the GPU."""
    written_pages: int = 0
    """Stored in CPU memory."""
    no_room_pages: int = 0
    """Not stored, because the prompt itself or other requests held every page."""
    dropped_pages: int = 0
    """Evicted from the GPU, whether or not the CPU has them."""


class RunningLease(Lease):
    """What a running request holds: the pinned path that it found, and slots for all other pages.

    ``rest`` are the page ids after those found on the GPU, of all pages that enter the tree when the request finishes.
    """

    __slots__ = ("found", "load", "others", "pages", "stored")

    def __init__(self, request: Request, gpu: Tier, root: Node, why: int = FIRST) -> None:
        super().__init__(request, gpu, root, why)
        self.pages = 0
        """All pages of the request, found or not."""
        self.found: tuple[Extent, ...] = ()
        """CPU pages that its look-up has found, held until they have been loaded."""
        self.load: Transfer | None = None
        """What loads them in time, if anything does."""
        self.stored = NOT_STORED
        """CPU pages of its prompt, held while they are stored."""
        self.others: list[RunningLease] = []
        """In a replay: those of its other samples."""

    def arriving(self) -> list[Transfer]:
        return [] if self.load is None or self.load.done else [self.load]


class LightLLMCache(Server):
    """Serves requests from one or two tiers.

    look-up     on the CPU when a request arrives; the pages found are held until they have been loaded. On the GPU at admission
    admission   when its pages and those of all running requests, counted in full, are fewer than the GPU has
    hits        pages of the tree, then those of the CPU pages found that lie beyond them; a load may begin inside a CPU page
    eviction    on the GPU whole unpinned leaves in the policy's order until there is room; on the CPU see ``PageStore``
    recency     a look-up or an insert refreshes its whole path; what it cuts off keeps its time
    finish      first the CPU stores what placement wants of the prompt; then the pages that the tree lacks enter it, and the
                slots of those that it has by now are given back; from then on, other requests can find them

    A replay calls ``serve`` and ``finish_request``: loads and stores take no time. ``SteppedRadix`` calls their parts.
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int) -> None:
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.page_tokens = page_tokens
        self.residency = Residency([self.gpu], len(tiers))
        self.counts = LightLLMCounts()
        self.store = PageStore(edges[0]) if edges else None
        self.waiting: dict[int, tuple[Extent, ...]] = {}
        """CPU pages that requests which wait for their turn have found, by the request's index."""
        self.running_pages = 0
        """Pages of all running requests, those that they share counted for each."""
        self._edges = edges
        self._rules = rules

    @property
    def tree(self) -> RadixTree:
        """The radix tree of the pages on the GPU."""
        return self.residency.tree

    def held_extents(self) -> list[Extent]:
        return super().held_extents() + ([] if self.store is None else self.store.held())

    def serve(self, request: Request, pages: int, now: float) -> object:
        """Look up and admit with room for ``pages`` pages in all.

        Returns None if running requests leave too little room, and NEVER_FITS if the request never fits.
        """
        pages = self.needed_pages(request, pages)
        if pages >= self.gpu.pool.capacity:
            return NEVER_FITS
        self.look_up(request)
        if not self.has_room(pages):
            return None
        lease = RunningLease(request, self.gpu, self.tree.root)
        self.admit(lease, pages, now)
        self.end_load(lease)
        lease.hits = lease.gpu_pages, lease.loaded_pages, 0
        if request.samples > 1:
            lease.others = self.fork(lease, now)
        return lease

    def finish_request(self, lease: RunningLease) -> None:
        """End a request whose answer is complete: store its prompt, insert what it computed, and free the rest."""
        self.begin_store(lease)
        self.end_store(lease)
        for each in (lease, *lease.others):
            self.end_request(each, self.residency.now)

    def reset(self) -> None:
        self.residency.clear()
        self.waiting.clear()
        if self.store is not None:
            self.store.clear()

    # --- requests ------------------------------------------------------------------------------------------------------------

    def needed_pages(self, request: Request, pages: int) -> int:
        """Return how many pages a request takes of whose samples each has ``pages`` with the last token of its answer.

        The KV of that token is never computed; where answers are cached, it takes no page. Samples share the prompt's full pages.
        """
        if self._rules.cache_output:
            pages = request.pages_for(computed_tokens(request), self.page_tokens)
        return pages + (request.samples - 1) * (pages - self._shared_pages(request, pages))

    def _shared_pages(self, request: Request, pages: int) -> int:
        """Return how many of its ``pages`` a request shares with its other samples."""
        return min(request.prompt_tokens // self.page_tokens, pages)

    def has_room(self, pages: int) -> bool:
        """Whether a request of ``pages`` pages can run beside those that do."""
        return self.running_pages + pages < self.gpu.pool.capacity

    def admit(self, lease: RunningLease, pages: int, now: float) -> None:
        """Begin a request of ``pages`` pages, for which there is room: pin what the GPU has, and take slots for all others."""
        gpu, residency, request = self.gpu, self.residency, lease.request
        now = residency.tick(now)
        residency.notices.request(request, now)
        path, rest = residency.follow(self.tree.root, self.path_of(request), self.usable_pages(request))
        hit_pages = path[-1].depth + path[-1].pages if path else 0
        lease.set_match(path, hit_pages, rest)
        lease.epoch = residency.epoch
        residency.pin_path(path, gpu, hit_pages)
        residency.use(path, now, is_first=lease.is_first)
        if path:
            lease.node = path[-1]
        lease.loaded_pages = self.pages_beyond(request, hit_pages)
        self.counts.loaded_pages += lease.loaded_pages
        lease.found = self.waiting.pop(request.index, ())
        missing = pages - hit_pages - gpu.pool.free
        if missing > 0:
            self._evict(missing, now)
        lease.pages = pages
        self.running_pages += pages
        lease.slots = residency.take(gpu, pages - hit_pages)

    def fork(self, lease: RunningLease, now: float) -> list[RunningLease]:
        """Enter the full pages of a request's prompt, which has been computed, for all of its samples, and divide its slots.

        Returns the leases of the samples after the first.
        """
        assert lease.epoch == self.residency.epoch, "LightLLM is not reset while it computes"
        pool, request = self.gpu.pool, lease.request
        shared = self._shared_pages(request, lease.pages)
        prompt, rest = split_extents(lease.rest, max(0, shared - lease.node.depth - lease.node.pages))
        lease.rest = prompt
        self._enter(lease, self.residency.tick(now))
        lease.rest = rest
        own_pages = (lease.pages - shared) // request.samples
        others = []
        for sample in request.other_samples():
            other = RunningLease(sample, self.gpu, self.tree.root)
            other.epoch, other.node, other.pages = lease.epoch, lease.node, own_pages
            other.rest = split_extents(self.path_of(sample), shared)[1]
            other.slots, lease.slots = pool.split(lease.slots, own_pages)
            self.residency.pin(other.node, self.gpu)
            lease.pages -= own_pages
            others.append(other)
        return others

    def end_request(self, lease: RunningLease, now: float) -> None:
        """End a request whose prompt has been stored: what it has computed enters the tree."""
        if lease.epoch == self.residency.epoch and (lease.rest or lease.node.parent is not None):
            self._enter(lease, self.residency.tick(now))
            self.residency.notices.finish(lease.request, lease.node, self.residency.now)
        self.give_up(lease)

    def give_up(self, lease: RunningLease) -> None:
        """Give back all that a request holds on the GPU."""
        self.running_pages -= lease.pages
        self.residency.give(self.gpu, lease.slots)
        self.residency.unpin(lease.node, self.gpu)

    def usable_pages(self, request: Request) -> int:
        """Return how many pages of a prompt a look-up covers."""
        return request.lookup_pages(self.page_tokens) if self._rules.recompute_last_token else request.prompt_pages

    def path_of(self, request: Request) -> tuple[Extent, ...]:
        """Return the page ids of everything that enters the tree."""
        if not self._rules.cache_output:
            return request.runs
        if request.own_path is not None:
            return request.own_path
        return join_extents(request.runs, request.output_runs or ())

    # --- GPU -------------------------------------------------------------------------------------------------------------

    def _enter(self, lease: RunningLease, now: float) -> None:
        """Add the computed pages that the tree lacks, in slots of the request; pin the whole path and mark it as used now."""
        gpu = self.gpu
        path, rest = self.residency.follow(lease.node, lease.rest)
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

    def look_up(self, request: Request) -> None:
        """Look a request up on the CPU unless that has been done; what is found is held from now on."""
        store = self.store
        if store is None or request.index in self.waiting:
            return
        self.waiting[request.index] = store.find(store.named(self.path_of(request), self.usable_pages(request)))

    def pages_beyond(self, request: Request, hit_pages: int) -> int:
        """Return how many pages beyond the GPU's hit a request that waits has found on the CPU."""
        if self.store is None:
            return 0
        return max(0, count_pages(self.waiting.get(request.index, ())) * self.store.tier.unit_pages - hit_pages)

    def end_load(self, lease: RunningLease) -> None:
        """Give back what a request has found on the CPU, since it has been loaded or need not be."""
        if self.store is not None and lease.epoch == self.residency.epoch:
            self.store.give_back(lease.found)
        lease.found = ()

    def begin_store(self, lease: RunningLease) -> None:
        """Hold the CPU pages that will have what placement wants of a request's prompt; its first sample stores it for all."""
        if lease.epoch == self.residency.epoch and not lease.request.sample:
            lease.stored = self.hold_prompt(lease.request, lease.node)

    def hold_prompt(self, request: Request, node: Node) -> Stored:
        """Hold what placement wants of a prompt in CPU pages, as far as they have room; ``node`` ends its path on the GPU."""
        store, now = self.store, self.residency.now
        if store is None:
            return NOT_STORED
        edge = self._edges[0]
        if edge.wants_requests:
            edge.placement.on_request(request, now)
        wanted = edge.wanted_pages(request, node.path(), now)
        if self._rules.recompute_last_token:
            wanted = min(wanted, request.lookup_pages(self.page_tokens))
        stored = store.store(store.named(self.path_of(request), wanted))
        self.counts.written_pages += count_pages(stored.copied) * store.tier.unit_pages
        self.counts.no_room_pages = store.no_room_pages
        return stored

    def end_store(self, lease: RunningLease, *, is_copied: bool = True) -> None:
        """Give back what a request has stored; others can find it from now on if it has been copied."""
        if self.store is not None and lease.epoch == self.residency.epoch:
            self.store.give_back(lease.stored.held, are_ready=is_copied)
        lease.stored = NOT_STORED


def computed_tokens(request: Request) -> int:
    """Return the number of tokens whose KV a request computes or reuses: all but the last token of its answer."""
    return request.prompt_tokens + max(request.output_tokens, 1) - 1
