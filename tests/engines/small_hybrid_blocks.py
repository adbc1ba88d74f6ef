"""vLLM's cache for hybrid models, small enough to follow by hand, and a recount of it."""

from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup, HybridSettings
from kvsim.core.tier import Tier
from kvsim.core.tree import READY
from kvsim.engines.vllm.hybrid_cache import HybridLease, VLLMHybridCache
from kvsim.engines.vllm.rules import VLLMHybridRules
from kvsim.policies.checkpoint.retention import Retention
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from tests.engines.small import replayed
from tests.workloads import Words, extents_of

PAGE_TOKENS = 4


def make_cache(
    capacity: int | None,
    *,
    groups: int = 1,
    interval: int = 0,
    chunk: int = 0,
    page_tokens: int = PAGE_TOKENS,
    pool: type[Pool] = Pool,
) -> VLLMHybridCache:
    policy = LRU()
    policy.bind(PolicyContext(tier=0, capacity_pages=capacity, page_tokens=page_tokens))
    hybrid = HybridSettings(
        checkpoint=Retention(interval_tokens=interval),
        state_tiers=None,
        state_pages=groups,
        state_bytes=10,
        grid_pages=1,
        prefill_chunk_tokens=chunk,
    )
    tiers = [Tier("gpu", 0, pool(capacity), policy)]
    return VLLMHybridRules().server(CacheSetup(tiers=tiers, edges=[], page_tokens=page_tokens, hybrid=hybrid))


class Small:
    """A cache that takes words. A prompt has ``tokens`` tokens after its last whole page: with 0 of them, it is aligned."""

    def __init__(self, capacity: int, *, groups: int = 1, interval: int = 0, chunk: int = 0) -> None:
        self.cache = make_cache(capacity, groups=groups, interval=interval, chunk=chunk)
        self.words = Words()
        self.running: list[HybridLease] = []

    def start(self, word: str, *, tokens: int = 1, output: int = 0) -> HybridLease | None:
        """Admit a request, which then runs; None without room."""
        request = self.words.request(word, page_tokens=PAGE_TOKENS, tail=tokens, output=output)
        lease = self.cache.serve(request, -(-(request.prompt_tokens + output) // PAGE_TOKENS), 0.0)
        self.running += [lease] if lease else []
        check(self.cache, self.running)
        return lease

    def finish(self, *running: HybridLease | None) -> None:
        for lease in running:
            assert lease is not None
            self.cache.finish_request(lease)
            self.running.remove(lease)
            check(self.cache, self.running)

    def serve(self, *words: str, tokens: int = 1, output: int = 0) -> int:
        """Serve requests one after another. Returns the hit pages of the last one."""
        for word in words:
            lease = self.start(word, tokens=tokens, output=output)
            self.finish(lease)
        assert lease is not None
        return lease.hits[0]

    def states(self, word: str) -> list[int]:
        """The pages of the word after which a state can be used."""
        pages = self.words.pages(word)
        found = self.cache.pool.states.deepest_first(extents_of(pages), len(pages))
        return sorted(depth for depth, blocks in found if all(blocks))

    def known(self, word: str) -> int:
        """The pages of the word that attention alone could reuse."""
        return sum(node.pages for node in self.cache.pool.match(extents_of(self.words.pages(word)))[0])


def check(cache: VLLMHybridCache, running: list[HybridLease]) -> None:
    """Recount everything, while these requests run."""
    gpu, pool = cache.tiers[0], cache.tiers[0].pool
    states = [node for entry in cache.pool.states.values() for group in entry for node in group]
    for node in states:
        assert node.state[0] == READY and not node.children_in[0]
        assert node.pages == pool.count(node.slots[0]) == 1
        assert node.pins[0] == sum(node in state for lease in running for state, _ in lease.held_states)
    nodes = cache.pool.check_nodes(running) + states
    assert gpu.evictable_pages == sum(node.pages for node in nodes if not node.pins[0])
    slots = [node.slots[0] for node in nodes] + [lease.slots for lease in running]
    slots += [own for lease in running for state, own in lease.held_states if not state]
    assert pool.free + sum(map(pool.count, slots)) == pool.capacity
    assert gpu.held_pages == sum(node.pages for node in nodes)
    if isinstance(pool, SlotPool):
        assert len({slot for some in (*slots, pool.free_slots()) for slot in some.tolist()}) == pool.capacity


def play(cache: VLLMHybridCache, requests: list[Request], in_flight: int = 1) -> list[int]:
    """The hit pages of each request in a replay; -1 for one that can never fit."""
    rows = replayed(cache, requests, in_flight=in_flight)
    check(cache, [])
    return [gpu for gpu, _, _ in rows]
