"""SGLang's radix cache as its scheduler calls it in time: look-ups, chunks, answers, retractions, finishes."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple, cast

from kvsim.core.lease import FINISHED, FIRST, LOOK, LOST, Lease
from kvsim.core.request import Request
from kvsim.core.serving import CLAIMED, Claim, Growth, ServedCache
from kvsim.core.tier import Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.tree import Node
from kvsim.engine.queue import JobQueue
from kvsim.engine.schedule import Parts
from kvsim.engines.sglang.answers import pad
from kvsim.engines.sglang.node_copies import NodeCopies
from kvsim.engines.sglang.versions import LATEST, VERSIONS, Version
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.pages.extents import Extent, join_extents, page_at, split_extents


class NodesLease(Lease):
    """What a running request holds: a pinned path down to ``node``, and ``slots`` for everything after it."""

    __slots__ = ("counted_pages", "declared", "filled", "flying", "tokens")

    def __init__(self, request: Request, gpu: Tier, root: Node, why: int) -> None:
        super().__init__(request, gpu, root, why)
        self.tokens = 0
        """Tokens that have memory, those of the tree included."""
        self.filled = 0
        """End of the last chunk of its prompt that has been formed."""
        self.declared = 0
        """Tokens of answer that its request declares."""
        self.flying = 0
        """Tokens of its answer that are being computed."""
        self.counted_pages = 0
        """Leading pages whose nodes this request has counted as hit."""

    @property
    def kept_pages(self) -> int:
        """Pages of the pinned path."""
        return self.node.depth + self.node.pages


class Found(NamedTuple):
    """What a look-up for the order of the queue has found: tokens, those of them on the GPU, and the last node there."""

    tokens: int
    gpu_tokens: int
    node: Node


class SteppedNodes(ServedCache):
    """SGLang's radix cache on one GPU tier, call by call. Its tree is that of a replay (``WholeNodeCache``).

    match     looks up, which refreshes what it finds; cuts a node where the match ends
    admit     pins what was found; takes no pages
    hold      takes the pages of the next tokens, which are free
    store     enters the tokens so far into the tree, in whole pages: a copy of what is there already is given back, and the pin
              moves to the end of what was entered. An answer is a node of its own
    finish    the same with the whole answer but its last token, unless that has memory; then gives back everything
    release   gives back everything, without entering it

    Without ``caches_answers``, answers are left out.
    """

    def __init__(
        self,
        gpu: Tier,
        page_tokens: int,
        *,
        caches_answers: bool,
        nodes: WholeNodeCache | None = None,
        version: Version = VERSIONS[LATEST],
    ) -> None:
        """``nodes`` has more tiers than the GPU; None: there are no others."""
        self.differs = version
        self.takes_pages_late, self.pauses_after_retraction = False, True
        self.nodes = nodes or WholeNodeCache([gpu], page_tokens)
        self.residency = self.nodes.residency
        self.lower = None
        self.watches = []
        self.gpu = gpu
        self.tiers = self.nodes.tiers
        self.page_tokens = page_tokens
        self.leases = {}
        self._caches_answers = caches_answers

    # --- look-ups ------------------------------------------------------------------------------------------------------------

    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        """Look up all of a request's tokens but the last; with LOOK, all of them."""
        tokens = tokens or request.prompt_tokens
        lease = NodesLease(request, self.gpu, self.tree.root, why)
        path, rest = self._follow(request, tokens if why == LOOK else tokens - 1)
        on_gpu = self._on_gpu(path)
        end = self._end_of(on_gpu)
        lease.set_match(path, end.depth + end.pages, rest)
        lease.node, lease.gpu_nodes = end, len(on_gpu)
        if len(path) > len(on_gpu):
            lease.leading_pages = path[-1].depth + path[-1].pages - lease.gpu_pages
            lease.below = [0, lease.leading_pages]
        if why != LOOK:
            for watch in self.watches:
                watch.matched(lease)
        return lease

    def _on_gpu(self, path: list[Node]) -> list[Node]:
        """Return the nodes of a path that are on the GPU."""
        return path

    def _end_of(self, path: list[Node]) -> Node:
        return path[-1] if path else self.tree.root

    def _path(self, request: Request) -> tuple[Extent, ...]:
        """Return the pages of a request that can be entered into the tree."""
        answer = request.output_runs
        if answer is None or not self._caches_answers or request.prompt_pages * self.page_tokens > request.prompt_tokens:
            return request.runs
        path = join_extents(request.runs, answer) if request.runs and answer else request.runs or answer
        if self.differs.decodes_past_end:
            return pad(path, request, (request.prompt_tokens + max(request.output_tokens, 1)) // self.page_tokens)
        return path

    def _follow(self, request: Request, tokens: int) -> tuple[list[Node], tuple[Extent, ...]]:
        """Look up a request's first ``tokens`` tokens, in whole pages. Returns the nodes found, and the pages after them.

        n tokens make n keys or, with ``bigram``, n - 1 pairs.
        """
        runs = self._pages_of(request, tokens)
        path = self.nodes.find(runs)
        end = self._end_of(path)
        return path, split_extents(runs, end.depth + end.pages)[1]

    def _pages_of(self, request: Request, tokens: int) -> tuple[Extent, ...]:
        """Return the whole pages of a request's first ``tokens`` tokens."""
        return split_extents(self._path(request), max(0, tokens - request.bigram) // self.page_tokens)[0]

    def find(self, request: Request, tokens: int) -> Found:
        """Look up a request's first ``tokens`` tokens for the order of the queue."""
        path = self.nodes.find(self._pages_of(request, tokens))
        last, node, page_tokens = self._end_of(path), self._end_of(self._on_gpu(path)), self.page_tokens
        return Found((last.depth + last.pages) * page_tokens, (node.depth + node.pages) * page_tokens, node)

    def page_at(self, request: Request, shared_tokens: int, tokens: int) -> int | None:
        """Return the page with the last of a request's first ``shared_tokens`` tokens: requests that share it share these tokens.

        None if the page is not full with the first ``tokens`` tokens: those of a partial page are not known.
        """
        left = -(-shared_tokens // self.page_tokens)
        if tokens < left * self.page_tokens:
            return None
        return page_at(self._path(request), left - 1)

    # --- admission and pages -------------------------------------------------------------------------------------------------

    def loose_pages(self, lease: Lease) -> int:
        """Return how many of the GPU's pages that a request has found no one else pins."""
        return sum([node.pages for node in lease.path[: lease.gpu_nodes] if not node.pins[self.gpu.index]])

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        """Pin what the request has found, and load what only the host has. Its scheduler has checked that there is room."""
        held = cast(NodesLease, lease)
        self.residency.tick(now)
        self.residency.notices.request(lease.request, self.residency.now, self.gpu)
        self.residency.pin(held.node, self.gpu)
        self._load(held)
        held.tokens = held.filled = held.kept_pages * self.page_tokens
        held.slots = self.residency.take(self.gpu, 0)
        self.leases[lease] = None
        if self.watches:
            self._tell_admission(lease, pages, held.loaded_pages, is_admitted=True)
        return True

    def _load(self, lease: NodesLease) -> None:
        """Load what only tiers below have of the pages found."""

    def refuse(self, lease: Lease) -> None:
        """Tell watches that a request has been looked up and is not admitted."""
        if self.watches:
            self._tell_admission(lease, 0, 0, is_admitted=False)

    def copies(self, parts: Parts, queue: JobQueue) -> NodeCopies:
        """Return the copies that an engine's passes decide about."""
        return NodeCopies()

    def claim(self, lease: Lease, now: float) -> Claim:
        """Do nothing: nothing was promised."""
        return CLAIMED

    def make_room(self, pages: int) -> bool:
        """Evict until this many pages are free, as far as possible. Returns whether they are."""
        pool = self.gpu.pool
        if pool.free < pages:
            missing = min(pages if self.differs.evicts_in_full else pages - pool.free, self.gpu.evictable_pages)
            if missing > 0:
                self.nodes.evict(missing, self.residency.now)
        return pool.free >= pages

    def hold(self, leases: Iterable[NodesLease], tokens: int) -> None:
        """Let requests have memory for so many more tokens each; the pages that they lack are free."""
        page_tokens, pool = self.page_tokens, self.gpu.pool
        for lease in leases:
            held = lease.tokens
            lease.tokens = held + tokens
            pages = (held + tokens - 1) // page_tokens - (held - 1) // page_tokens
            if pages:
                lease.slots = pool.join(lease.slots, self.residency.take(self.gpu, pages))

    def take_chunks(self, ends: Sequence[tuple[NodesLease, int]]) -> None:
        """Let requests have memory for their tokens up to these ends, in one step. Room is made as if each began a page more."""
        new_tokens = sum([end - lease.tokens for lease, end in ends])
        page_tokens = self.page_tokens
        self.make_room(new_tokens if page_tokens == 1 else -(-new_tokens // page_tokens) + len(ends))
        for lease, end in ends:
            self.hold((lease,), end - lease.tokens)

    def has_room(self, leases: Sequence[NodesLease]) -> bool:
        """Make room for the pages that a step begins with a token of each request. Returns whether there is."""
        if self.gpu.pool.free >= len(leases):
            return True
        return self.make_room(sum([not lease.tokens % self.page_tokens for lease in leases]))

    def take_tokens(self, leases: Sequence[NodesLease]) -> None:
        """Let each request have memory for its next token. Room is made as if each began a page."""
        self.make_room(len(leases))
        self.hold(leases, 1)

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        """Do nothing: the scheduler makes room for a step, and takes its pages with ``hold``."""
        return Growth(True, NO_TRANSFERS)

    # --- what enters the tree ------------------------------------------------------------------------------------------------

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        self.store(cast(NodesLease, lease), cast(NodesLease, lease).tokens, now)
        return NO_TRANSFERS

    def store(self, lease: NodesLease, tokens: int, now: float) -> None:
        """Enter a request's first ``tokens`` tokens, in whole pages, and pin them."""
        residency, gpu = self.residency, self.gpu
        residency.tick(now)
        path, rest = self._follow(lease.request, tokens)
        found = path[-1].depth + path[-1].pages if path else 0
        if (duplicates := found - lease.kept_pages) > 0:
            copies, lease.slots = gpu.pool.split(lease.slots, duplicates)
            residency.give(gpu, copies)
        self._count(lease, path, found)
        before, node = lease.node, path[-1] if path else self.tree.root
        residency.pin(node, gpu)
        if rest:
            pages = sum([length for _, length in rest])
            mine, lease.slots = gpu.pool.split(lease.slots, pages)
            node = residency.add_leaf(node, rest, pages, gpu, mine, residency.now)
            lease.counted_pages = found + pages
        lease.node = node
        residency.unpin(before, gpu)
        if tokens > lease.request.prompt_tokens and self.differs.looks_up_at_end:
            self._follow(lease.request, lease.request.prompt_tokens)

    def _count(self, lease: NodesLease, path: list[Node], pages: int) -> None:
        """Count a hit of each node that the request has not counted before."""
        passed = [node for node in path if node.depth >= lease.counted_pages]
        if passed:
            self.residency.use(passed, self.residency.now, is_first=True)
            lease.counted_pages = pages

    # --- the end of a request ------------------------------------------------------------------------------------------------

    def finish(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        held, request = cast(NodesLease, lease), lease.request
        self.store(held, min(held.tokens, request.prompt_tokens + max(request.output_tokens, 1)), now)
        self.residency.notices.finish(request, held.node, self.residency.now, self.gpu)
        return self._let_go(held, FINISHED)

    def release(self, lease: Lease, why: str = LOST, now: float = -inf, tokens: int = 0) -> list[Transfer]:
        return self._let_go(cast(NodesLease, lease), why)

    def _let_go(self, lease: NodesLease, why: str) -> list[Transfer]:
        self.residency.give(self.gpu, lease.slots)
        self.residency.unpin(lease.node, self.gpu)
        lease.slots = None
        del self.leases[lease]
        for watch in self.watches:
            watch.released(lease, why)
        return NO_TRANSFERS

    def reset(self, gpu: Tier | None = None, now: float = -inf) -> None:
        self.residency.clear()
        for watch in self.watches:
            watch.emptied(gpu)

    def check(self) -> None:
        pool, index = self.gpu.pool, self.gpu.index
        nodes = list(self.tree.root.descendants())
        held = sum([node.pages for node in nodes])
        for one in self.leases:
            lease = cast(NodesLease, one)
            own = pool.count(lease.slots)
            assert lease.kept_pages + own == -(-lease.tokens // self.page_tokens), "a request has too few or too many pages"
            held += own
        assert pool.free + held == pool.capacity, "pages are lost"
        loose = sum([node.pages for node in nodes if not node.pins[index]])
        assert loose == self.gpu.evictable_pages, "evictable pages are counted wrong"
