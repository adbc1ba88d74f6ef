"""vLLM's caches small enough to follow by hand. A prompt is a word, a page of four tokens for each letter; equal beginnings of
two words are the same pages."""

from collections.abc import Callable
from typing import Any

from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.tier import Tier, chain
from kvsim.engines.vllm.block_pool import BlockLease
from kvsim.engines.vllm.cache import VLLMCache
from kvsim.engines.vllm.rules import VLLMRules
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.store_threshold import StoreThreshold
from tests.engines.small import replayed
from tests.workloads import Words, extents_of

PAGE_TOKENS = 4
Row = tuple[int, int]
"""Pages hit on the GPU and in CPU memory; (-1, 0) for a request that can never fit."""


def make_cache(
    gpu: int | None,
    cpu: int = 0,
    *,
    eviction: Callable[[], EvictionPolicy] = LRU,
    cpu_eviction: Callable[[], EvictionPolicy] = LRU,
    k: int = 0,
    tracker_pages: int = 64_000,
    page_tokens: int = PAGE_TOKENS,
    pool: type[Pool] = Pool,
    **known: Any,
) -> VLLMCache:
    """A cache of one or two tiers; ``known`` is what else policies may know."""
    tiers = []
    for index, (capacity, make) in enumerate(((gpu, eviction), (cpu, cpu_eviction))):
        if capacity == 0:
            continue
        policy = make()
        policy.bind(PolicyContext(tier=index, capacity_pages=capacity, page_tokens=page_tokens, **known))
        tiers.append(Tier(("gpu", "cpu")[index], index, pool(capacity), policy))
    edges = chain(tiers, [StoreThreshold(k=k, tracker_pages=tracker_pages)][: len(tiers) - 1])
    return VLLMCache(tiers, edges, VLLMRules(), page_tokens)


class Small:
    """A cache that takes words. A prompt has ``tokens`` tokens after its last whole page: with 0 of them, it is aligned."""

    def __init__(self, gpu: int | None, cpu: int = 0, **settings: Any) -> None:
        self.cache = make_cache(gpu, cpu, **settings)
        self.words = Words()
        self.running: list[BlockLease] = []

    def start(self, word: str, *, tokens: int = 0, output: int = 0) -> BlockLease | None:
        """Admit a request, which then runs; None without room."""
        request = self.words.request(word, page_tokens=PAGE_TOKENS, tail=tokens, output=output)
        held = self.cache.serve(request, -(-(request.prompt_tokens + output) // PAGE_TOKENS), 0.0)
        self.running += [held] if held else []
        check(self.cache, self.running)
        return held

    def finish(self, *running: BlockLease | None) -> None:
        for held in running:
            assert held is not None
            self.cache.finish_request(held)
            self.running.remove(held)
            check(self.cache, self.running)

    def serve(self, *words: str, tokens: int = 0, output: int = 0) -> Row:
        """Serve requests one after another. Returns the hits of the last one."""
        for word in words:
            held = self.start(word, tokens=tokens, output=output)
            self.finish(held)
        assert held is not None
        return held.hits[:2]

    def on_gpu(self, word: str) -> int:
        """How many pages of the word are found on the GPU."""
        return sum(node.pages for node in self.cache.pool.match(extents_of(self.words.pages(word)))[0])

    def on_cpu(self, word: str) -> str:
        """The letters of the word whose pages are in CPU memory."""
        assert self.cache.offload is not None
        pieces = self.cache.offload.order.find([(page, 1) for page in self.words.pages(word)])
        return "".join(letter for letter, (_, here) in zip(word, pieces, strict=True) if here)


def check(cache: VLLMCache, running: list[BlockLease]) -> None:
    """Recount everything, while these requests run."""
    cache.pool.check(running)
    if cache.offload is not None:
        cpu = cache.offload.tier
        assert cpu.pool.capacity - cpu.pool.free == cache.offload.order.pages == cpu.inserted_pages - cpu.evicted_pages


def play(cache: VLLMCache, requests: list[Request], in_flight: int = 1) -> list[Row]:
    """The hits of each request in a replay."""
    rows = replayed(cache, requests, in_flight=in_flight)
    check(cache, [])
    return [(gpu, cpu) for gpu, cpu, _ in rows]
