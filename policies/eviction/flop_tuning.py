"""How ``flop_aware`` finds its alpha: it replays a part of the run with each candidate (Marconi, MLSys 2025, section 4.2).

The paper collects 5 to 15 times as many requests as came before the first eviction; its code tries 0, 0.1 ... 2. Its experiments
use 5, and 15 for one of three workloads; here it is 5. As in that code, the alpha that saves most FLOPs wins.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Tier
from kvsim.core.tree import INCOMING, READY, Node
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy

ALPHAS = tuple(tenth / 10 for tenth in range(21))
COLLECTED = 5
"""Requests to collect, as a multiple of those before the first eviction."""


class Piece(NamedTuple):
    """A node of a snapshot."""

    parent: int
    """Position of the parent; -1 for the root."""
    extents: tuple[Extent, ...]
    pages: int
    created: float
    last_used: float
    hits: int
    depth: int = 0
    partner: int = -1
    """For a recurrent state, the position of the pages that it was saved after, or -1 if they are missing; -1 for pages."""


class Tuning:
    """Collects requests from the first eviction on, then finds the alpha that would have saved most FLOPs.

    The trial replays them on this tier alone, one after another, with room for each answer. A request that needs more than the
    whole tier is left out. Recurrent states share the tier's memory with the pages, in the trial too.
    """

    def __init__(
        self,
        context: PolicyContext,
        policy_of: Callable[[float, list[float]], EvictionPolicy],
        cache_of: Callable[[Tier], ServedCache],
    ) -> None:
        self._context = replace(context, tier=0)
        self._tier = context.tier
        self._policy_of = policy_of
        self._cache_of = cache_of
        self._requests = 0
        self._snapshot: list[Piece] | None = None
        self._announced_s: list[float] = []
        self._collected: dict[int, tuple[Request, float]] = {}
        self._saved_flops: dict[int, float] = {}
        """FLOPs saved, by hit pages."""

    def begin(self, victim: Node, announced_s: list[float]) -> None:
        """Called before a node is evicted. The first call takes a snapshot of its tree and of the announcement times."""
        if self._snapshot is None:
            self._announced_s = announced_s.copy()
            root = victim
            while root.parent is not None:
                root = root.parent
            self._snapshot = snapshot(root, self._tier)

    def observe(self, request: Request, now: float) -> float | None:
        """Called when a request is admitted. Returns the alpha to use from now on, or None until enough are collected."""
        if self._snapshot is None:
            self._requests = max(self._requests, request.index + 1)
            return None
        if request.index >= self._requests:
            self._collected.setdefault(request.index, (request, now))
        if len(self._collected) < COLLECTED * self._requests:
            return None
        return max(ALPHAS, key=self.saved_flops)

    def saved_flops(self, alpha: float) -> float:
        """Return the total FLOPs that the collected requests save if replayed from the snapshot with this alpha."""
        context, tokens = self._context, self._context.page_tokens
        policy = self._policy_of(alpha, self._announced_s)
        policy.bind(context)
        cache = self._cache_of(Tier("gpu", 0, Pool(context.capacity_pages), policy))
        restore(self._snapshot or [], cache)
        saved = 0.0
        for request, now in self._collected.values():
            pages = request.pages_for(request.prompt_tokens + request.output_tokens, tokens)
            hits = hit_pages(cache, request, pages, now)
            if hits not in self._saved_flops:
                self._saved_flops[hits] = context.saved_flops(0, hits * tokens)
            saved += self._saved_flops[hits]
        return saved


def hit_pages(cache: ServedCache, request: Request, pages: int, now: float) -> int:
    """Serve a request from a cache of one tier. Returns its hit pages, 0 if it does not fit."""
    lease = cache.match(request)
    if not cache.admit(lease, pages, now):
        return 0
    hits = 0 if cache.claim(lease, now).is_lost else lease.gpu_pages
    cache.insert(lease, now)
    cache.finish(lease)
    return hits


def snapshot(root: Node, tier: int) -> list[Piece]:
    """Return a tier's nodes below ``root``, parents first, without nodes whose prefix the tier lacks."""
    places = {root: -1}
    pieces: list[Piece] = []
    for node in root.descendants():
        parent = node.parent
        if node.state[tier] == READY and parent in places:
            places[node] = len(pieces)
            pieces.append(Piece(places[parent], node.runs, node.pages, node.created, node.last_used, node.hits, node.depth))
    for node, place in places.items():
        if node is not root and node.is_state and node.partner in places:
            pieces[place] = pieces[place]._replace(partner=places[node.partner])
    return pieces


def restore(pieces: list[Piece], cache: ServedCache) -> None:
    """Fill an empty cache of one tier with a snapshot."""
    tier, residency = cache.gpu, cache.residency
    nodes: list[Node] = []
    for piece in pieces:
        parent = residency.tree.root if piece.parent < 0 else nodes[piece.parent]
        node = residency.tree.add(parent, piece.extents, piece.pages, piece.created)
        node.depth, node.last_used, node.hits = piece.depth, piece.last_used, piece.hits
        node.is_state = piece.extents[0][0] < 0
        residency.add_copy(node, tier, INCOMING, tier.pool.take(piece.pages))
        nodes.append(node)
    for node, piece in zip(nodes, pieces, strict=True):
        if node.is_state:
            cache.adopt_state(node, nodes[piece.partner] if piece.partner >= 0 else None)
    for node in nodes:
        residency.set_ready(node, tier, node.last_used)
