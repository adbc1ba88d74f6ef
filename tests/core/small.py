"""Caches small enough to follow by hand: pages are letters, a prompt is a word, slots are numbered so that owners are checked."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from kvsim.core.cache import Cache
from kvsim.core.lease import LOOK, Lease
from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import NO_LOAD, Fetch, Load
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import Begin, Transfer
from kvsim.core.tree import LEAVING, READY, Node
from kvsim.core.watch import Watch
from kvsim.hardware.spec import HardwareSpec, RemoteStore
from kvsim.model.spec import ModelSpec
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.states.cache import HybridCache
from tests.workloads import Words, make_request, pages_of

NAMES = ("gpu", "cpu", "disk", "remote")
MODEL = ModelSpec(layers=1, hidden_size=8, vocabulary=16, heads=2, kv_heads=1, head_dim=4, mlp_width=16)
"""16 bytes of KV and 1,152 linear FLOPs a token, 32 FLOPs for each pair of a query and a key."""
MACHINE = HardwareSpec(
    flops_per_s=1e6,
    memory_bytes=10**6,
    memory_bytes_per_s=1e6,
    host_to_device_bytes_per_s=1e3,
    device_to_host_bytes_per_s=1e3,
    both_directions_bytes_per_s=1e3,
    disk_read_bytes_per_s=1e2,
    disk_write_bytes_per_s=1e2,
    remote=RemoteStore(bytes_per_s=1e2, latency_s=0.0),
)
Hits = tuple[int, int, int]


def offered(policy: EvictionPolicy, now: float) -> list[Node]:
    """All that a policy offers, the first to leave first. Nothing leaves."""
    nodes = []
    for node in policy.victims(now):
        nodes.append(node)
        node.own_pins()[policy.tier] += 1
    for node in nodes:
        node.own_pins()[policy.tier] -= 1
        policy.on_evictable(node)
    return nodes


class Watched(Watch):
    """The pages that a tier holds ready, by what it reports of them."""

    def __init__(self) -> None:
        self.pages: set[int] = set()

    def check(self, tier: Tier, nodes: Iterable[Node]) -> None:
        """Compare with the pages of these nodes, recurrent states left out."""
        ready = [node.runs for node in nodes if node.state[tier.index] == READY and not node.is_state]
        assert self.pages == {page for extents in ready for page in pages_of(extents)}

    def stored(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        assert self.pages.isdisjoint(pages_of(extents))
        self.pages.update(pages_of(extents))

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        assert self.pages.issuperset(pages_of(extents))
        self.pages.difference_update(pages_of(extents))


def make_tiers(
    capacities: Sequence[int | None],
    evictions: Sequence[Any],
    placements: Sequence[Any],
    *,
    slots: bool,
    page_tokens: int,
    shape: Sequence[tuple[str, Sequence[int]]] = (("gpu", ()), ("cpu", (0,)), ("disk", (1,))),
) -> tuple[list[Tier], list[Edge]]:
    """Tiers from the top down and the edges between them, their policies bound.

    ``shape`` has for each tier what it is and the positions of the tiers directly above it: by default, a chain. ``placements``
    has one entry for each edge, beginning with those into the second tier.
    """
    tiers: list[Tier] = []
    edges: list[Edge] = []
    left = list(placements)
    for index, (capacity, eviction, (name, above)) in enumerate(zip(capacities, evictions, shape, strict=False)):
        level = NAMES.index(name)
        context = PolicyContext(
            tier=index,
            level=level,
            upper_level=tiers[above[0]].level if above else -1,
            tier_name=name,
            capacity_pages=capacity,
            capacities=capacities,
            page_tokens=page_tokens,
            model=MODEL,
            hardware=MACHINE,
            empty_cache=lambda tier: Cache([tier], [], Rules(), page_tokens),
        )
        policy = eviction.variant()
        policy.bind(context)
        pool = SlotPool(capacity) if slots and capacity is not None else Pool(capacity)
        tiers.append(Tier(name if level else name + str(index or ""), index, pool, policy, level))
        for upper in above:
            placement = left.pop(0)
            placement.bind(context)
            edges.append(Edge(tiers[upper], tiers[index], placement))
    return tiers, edges


class SmallCache:
    """A cache whose pages are named by letters: equal beginnings of two words are the same pages.

    What it does not define itself is that of the cache, ``core``.
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int) -> None:
        self.serve_from(Cache(tiers, edges, rules, page_tokens))

    def serve_from(self, core: Cache | HybridCache) -> None:
        """Use this cache."""
        self.core = core
        self.clock = count(1)
        self.words = Words()

    def __getattr__(self, name: str) -> Any:
        if name == "core":  # not set yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.core, name)

    def found(self, request: Request, gpu: Tier | None = None) -> tuple[int, int]:
        """The pages of a prompt on a GPU, and those after them in the CPU tier."""
        lease = self.match(request, gpu, LOOK)
        return lease.gpu_pages, lease.leading_pages

    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        """The loads of a request; none if nothing lies below."""
        return NO_LOAD if self.lower is None else self.lower.load(lease, now, short)

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        """A fetch into the CPU tier."""
        fetch: Fetch = self.lower.fetch(lease, pages, now)
        return fetch

    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Begin a transfer."""
        begun: Begin = self.lower.begin(transfer, now)
        return begun

    def land(self, transfer: Transfer, now: float) -> list[Transfer]:
        """Finish a transfer."""
        follow_ups: list[Transfer] = self.lower.finish(transfer, now)
        return follow_ups

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """End a transfer early."""
        follow_ups: list[Transfer] = self.lower.abort(transfer, pages_arrived, now)
        return follow_ups

    def request(self, word: str, **settings: Any) -> Request:
        """A request for the pages of ``word``."""
        settings.setdefault("prompt_tokens", len(word) * self.page_tokens)
        return make_request(self.words.pages(word), **settings)

    def look(self, word: str, *, gpu: int = 0, **about: Any) -> Lease:
        """What could be reused of ``word`` now, by a request with these settings that one of the GPUs serves."""
        return self.match(self.request(word, **about), self.tiers[gpu])

    def admitted(self, word: str, *, pages: int | None = None, load: int | None = None, **about: Any) -> Lease:
        """A request with all its slots, before its loads; it loads everything unless ``load`` says how many pages."""
        lease = self.look(word, **about)
        load_pages = lease.lower_pages if load is None else load
        assert self.admit(lease, len(word) if pages is None else pages, next(self.clock), load_pages)
        self.move(lease.waits)
        while (claim := self.claim(lease, next(self.clock))).waits:
            self.move(claim.waits)
        assert not claim.is_lost and not lease.reserved_pages
        return lease

    def run(self, word: str, *, pages: int | None = None, load: int | None = None, **about: Any) -> Lease:
        """A request whose prompt has been computed, everything moved."""
        lease = self.admitted(word, pages=pages, load=load, **about)
        self.move(self.load(lease, next(self.clock)).transfers)
        self.move(self.insert(lease, next(self.clock)))
        self.check()
        return lease

    def use(self, word: str, *, pages: int | None = None, load: int | None = None, **about: Any) -> Hits:
        """A request from its beginning to its end; returns its hits by tier."""
        lease = self.run(word, pages=pages, load=load, **about)
        self.move(self.finish(lease))
        self.check()
        return lease.gpu_pages, lease.loaded_pages - lease.loaded_far_pages, lease.loaded_far_pages

    def move(self, transfers: Iterable[Transfer]) -> None:
        """Begin and finish transfers and all that they wait for or bring about."""
        for transfer in transfers:
            while not transfer.done and not (begun := self.begin(transfer, next(self.clock))).can_run:
                self.move(begun.waits)
            if not transfer.done:
                self.check()
                self.move(self.land(transfer, next(self.clock)))
                self.check()

    def fails(self, word: str, pages: int | None = None) -> bool:
        """Whether a request cannot be admitted; asserts that nothing changes then."""
        lease = self.look(word)
        before = self.snapshot()
        admitted = self.admit(lease, len(word) if pages is None else pages, next(self.clock), lease.lower_pages)
        assert admitted or self.snapshot() == before
        return not admitted

    def node(self, word: str) -> Node:
        """The node that holds the last page of ``word``."""
        node, last = self.tree.root, self.words.ids[word]
        while not any(start <= last < start + pages for start, pages in node.runs):
            (node,) = [child for child in node.children.values() if self._leads_to(child, last)]
        return node

    @staticmethod
    def _leads_to(node: Node, page: int) -> bool:
        return any(start <= page < start + pages for below in [node, *node.descendants()] for start, pages in below.runs)

    def on(self, tier: str) -> str:
        """The letters of all pages that are usable in a tier, in the order in which they were first seen."""
        (index,) = [some.index for some in self.tiers if some.name == tier]
        nodes = (node for node in self.tree.root.descendants() if not node.is_state)
        return self._text(node for node in nodes if node.state[index] in (READY, LEAVING))

    def _text(self, nodes: Iterable[Node]) -> str:
        pages = sorted(page for node in nodes for page in pages_of(node.runs))
        return self.words.text((page, 1) for page in pages)

    def carried(self, transfer: Transfer) -> str:
        """The pages of a transfer, without recurrent states."""
        return self._text(node for node in transfer.nodes if not node.is_state)

    def leaving_order(self) -> str:
        """Evicts everything evictable from the GPU, page by page; the pages in the order in which they left."""
        order = ""
        while True:
            before = self.on("gpu")
            lease = self.match(make_request([-1]))
            if not self.admit(lease, self.gpu.pool.free + 1, next(self.clock)):
                return order
            self.move(lease.waits)
            self.release(lease)
            order += "".join(sorted(set(before) - set(self.on("gpu"))))

    def snapshot(self) -> list[Any]:
        """All that must stay as it is when a request is refused."""
        tiers = [
            (
                tier.pool.free,
                tier.evictable_pages,
                tier.leaving_pages,
                tier.reserved_pages,
                tier.evicted_pages,
                self.on(tier.name),
            )
            for tier in self.tiers
        ]
        return [tiers, len(self.in_flight), len(self.leases)]


def small_cache(
    *,
    gpu: int | None,
    cpu: int | None = 0,
    disk: int | None = 0,
    eviction: Callable[[], Any] | Sequence[Callable[[], Any]] = LRU,
    placement: Callable[[], Any] | Sequence[Callable[[], Any]] = WriteThrough,
    slots: bool = True,
    page_tokens: int = 1,
    recompute_last_token: bool = False,
) -> SmallCache:
    """A cache of one to three tiers; one policy class for all tiers (all edges), or one for each, from the top."""
    capacities = [capacity for capacity in (gpu, cpu, disk) if capacity != 0]
    evictions = [make() for make in (eviction if isinstance(eviction, Sequence) else [eviction] * 3)]
    placements = [make() for make in (placement if isinstance(placement, Sequence) else [placement] * 2)]
    tiers, edges = make_tiers(capacities, evictions, placements, slots=slots, page_tokens=page_tokens)
    return SmallCache(tiers, edges, Rules(recompute_last_token=recompute_last_token), page_tokens)


def now(cache: SmallCache) -> float:
    """The next moment of its clock."""
    return next(cache.clock)


def only(transfers: list[Transfer]) -> Transfer:
    """Return the only transfer."""
    (transfer,) = transfers
    return transfer
