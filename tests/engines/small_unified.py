"""SGLang's unified cache, small enough to follow by hand: prompts are words, a page of one token for each letter."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup
from kvsim.core.tier import CPU, GPU, Tier, chain
from kvsim.core.tree import READY, Node
from kvsim.engine.outcome import REJECTED
from kvsim.engines.sglang.rules import SGLangRules
from kvsim.engines.sglang.unified_nodes import UnifiedLease, UnifiedNodeCache
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.settings import ReplaySettings
from tests.workloads import Words, extents_of

PLACEMENTS: dict[str, Callable[[], Any]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
}
STORED = 1_000
"""Slots of a storage that is large enough."""


def make_unified(
    gpu: int, cpu: int = 0, *, write: str = "write_through", storage: int = 0, chunk: int = 0, copy_steps: int = 0,
    page_tokens: int = 1, eviction: Callable[[], Any] = LRU, min_tokens: int = 1, context: dict[str, Any] | None = None,
    **rules: Any,
) -> UnifiedNodeCache:  # fmt: skip
    """A cache with numbered slots. ``rules`` are settings of ``rules=sglang``, ``context`` is what policies know besides."""
    tiers = []
    for index, capacity in enumerate([gpu, *[cpu] * (cpu > 0), *[storage] * (storage > 0)]):
        policy = LRU() if index == 2 else eviction()
        policy.bind(PolicyContext(tier=index, capacity_pages=capacity, page_tokens=page_tokens, **(context or {})))
        tiers.append(Tier(("gpu", "cpu", "disk")[index], index, SlotPool(capacity), policy))
    placements = [PLACEMENTS[write](), WriteThrough()][: len(tiers) - 1]
    for placement in placements:
        placement.bind(PolicyContext(tier=1, upper_tier=0, page_tokens=page_tokens, **(context or {})))
    prefetch = None
    if storage:
        prefetch = AdaptivePrefetch(min_tokens=min_tokens, load_min_tokens=0)
        prefetch.bind(PolicyContext(tier=1, capacity_pages=cpu, page_tokens=page_tokens))
    setup = CacheSetup(
        tiers=tiers,
        edges=chain(tiers, placements),
        page_tokens=page_tokens,
        prefill_chunk_tokens=chunk * page_tokens,
        copy_steps=copy_steps,
        prefetch=prefetch,
    )
    cache = SGLangRules(**{"load_min_tokens": 0, "cache_output": True, **rules}).server(setup)
    assert isinstance(cache, UnifiedNodeCache)
    return cache


def play(cache: UnifiedNodeCache, requests: list[Request], *, in_flight: int = 1) -> list[tuple[int, ...]]:
    """The hits of each request on GPU, host and storage; (-1, 0, 0) for a rejected one."""
    outcome = Replay(cache, ReplaySettings(in_flight=in_flight)).run(requests)
    recount(cache, [])
    rows = zip(outcome.status.tolist(), outcome.hit_pages.tolist(), strict=True)
    return [(-1, 0, 0) if status == REJECTED else tuple(hits) for status, hits in rows]


def recount(cache: UnifiedNodeCache, held: Iterable[UnifiedLease]) -> None:
    """Recount slots, children, pins and what can be evicted."""
    held = list(held)
    nodes = list(cache.tree.root.descendants())
    copies = [copy for batch in cache._copies for copy in batch.carriers] + cache._unsent
    loads = [load for batch in cache._loads for load in batch.carriers]
    pins: Counter[tuple[Node, int]] = Counter()
    for last in [lease.node for lease in held] + [carrier.nodes[-1] for carrier in (*copies, *loads)]:
        pins.update((node, GPU) for node in last.path())
    for carrier in (*loads, *cache._to_store):
        pins.update((node, CPU) for node in carrier.nodes)
    pins.update((node, CPU) for node in nodes if len(cache.tiers) > 1 and node.state[GPU] and node.state[CPU])
    for tier in cache.tiers[:2]:
        index = tier.index
        here = [node for node in nodes if node.state[index]]
        slots = [slot for node in here for slot in node.slots[index].tolist()]
        slots += [slot for lease in held for slot in lease.slots.tolist()] if index == GPU else []
        assert sorted(slots + tier.pool.free_slots().tolist()) == list(range(tier.pool.capacity))
        assert all(len(node.slots[index]) == node.pages for node in here)
        assert tier.evictable_pages == sum(node.pages for node in here if not node.pins[index] and node.state[index] == READY)
        for node in [cache.tree.root, *nodes]:
            assert node.children_in[index] == sum(bool(child.state[index]) for child in node.children.values())
        assert all(node.pins[index] == pins[node, index] for node in nodes)
    for node in nodes:
        parent: Any = node.parent
        assert any(node.state) and node.depth == parent.depth + parent.pages
        assert not node.state[GPU] or parent is cache.tree.root or parent.state[GPU]
    for carrier in (*copies, *loads, *cache._to_store):
        assert all(carrier in node.transfers for node in carrier.nodes)
    if cache.storage is not None:
        pool = cache.tiers[2].pool
        assert cache.storage._order.pages == pool.capacity - pool.free == pool.count(cache.storage._slots)


class Small:
    """Serves words, each followed by a token of its own (``tail``) that takes one page more but is not cached."""

    def __init__(self, gpu: int, cpu: int = 0, **settings: Any) -> None:
        self.cache = make_unified(gpu, cpu, **settings)
        self.words = Words()
        self.running: list[UnifiedLease] = []

    def start(self, word: str, answer: str = "", *, tail: int = 1) -> UnifiedLease | None:
        """A request that has computed its prompt. Its answer is known, but for one last token."""
        pages = self.words.pages(word + answer)
        request = self.words.request(word, tail=0 if answer else tail, output=len(answer) + bool(answer))
        request.index = len(self.words.ids)
        request.output_runs = extents_of(pages[len(word) :])
        lease = self.cache.serve(request, request.prompt_tokens + request.output_tokens, 0.0)
        self.running += [lease] if lease else []
        recount(self.cache, self.running)
        return lease

    def finish(self, lease: UnifiedLease | None) -> None:
        assert lease is not None
        self.running.remove(lease)
        self.cache.finish_request(lease)
        recount(self.cache, self.running)

    def use(self, *words: str, answer: str = "", tail: int = 1) -> tuple[int, ...] | None:
        """Requests from beginning to end; the hits of the last one on GPU, host and storage."""
        hits: tuple[int, ...] | None = None
        for word in words:
            lease = self.start(word, answer, tail=tail)
            hits = lease and lease.hits
            if lease is not None:
                self.finish(lease)
        return hits

    def step(self, times: int = 1) -> None:
        """Steps of the scheduler without a request."""
        for _ in range(times):
            self.cache._take_steps()

    def on(self, tier: int) -> list[str]:
        """The letters of each node in a tier, in order of their page ids."""
        nodes = sorted(self.cache.tree.root.descendants(), key=lambda node: node.runs)
        return [self.words.text(node.runs) for node in nodes if node.state[tier]]

    @property
    def gpu(self) -> list[str]:
        return self.on(GPU)

    @property
    def host(self) -> list[str]:
        return self.on(CPU)

    def stored(self, word: str) -> int:
        """How many pages of a word storage has, from the first on."""
        assert self.cache.storage is not None
        return self.cache.storage.leading_pages(extents_of(self.words.pages(word)))
