"""vLLM's caches for models with sliding windows, small enough to follow by hand."""

from typing import Any

from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup, WindowSettings
from kvsim.core.tier import Tier
from kvsim.engines.vllm.rules import VLLMWindowRules
from kvsim.engines.vllm.window_blocks import WindowLease
from kvsim.engines.vllm.window_cache import VLLMWindowCache
from kvsim.engines.vllm.window_stepped import WindowSteppedCache
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from tests.engines.small import replayed
from tests.workloads import Words, extents_of

PAGE_TOKENS = 4


def make_setup(
    capacity: int | None, *, groups: int = 1, window: int = 8, chunk: int = 0, page_tokens: int = PAGE_TOKENS,
    pool: type[Pool] = Pool, batch: int = 64,
) -> CacheSetup:  # fmt: skip
    """Tiers and windows of a model with a layer of full attention and ``groups`` layers with a window."""
    policy = LRU()
    policy.bind(PolicyContext(tier=0, capacity_pages=capacity, page_tokens=page_tokens))
    windows = WindowSettings(full_layers=1, window_layers=groups, window_tokens=window, chunk_tokens=chunk, batch_tokens=batch)
    return CacheSetup(tiers=[Tier("gpu", 0, pool(capacity), policy)], edges=[], page_tokens=page_tokens, windows=windows)


def make_cache(
    capacity: int | None, *, retention: int | None = 0, full_first: bool = False, cache_output: bool = False, **about: Any
) -> VLLMWindowCache:
    rules = VLLMWindowRules(retention_tokens=retention, full_first=full_first, cache_output=cache_output)
    return rules.server(make_setup(capacity, **about))


def make_stepped(
    capacity: int | None, *, retention: int | None = 0, full_first: bool = False, cache_output: bool = False, **about: Any
) -> WindowSteppedCache:
    rules = VLLMWindowRules(retention_tokens=retention, full_first=full_first, cache_output=cache_output)
    return rules.cache(make_setup(capacity, **about))


class Small:
    """A cache that takes words. A prompt has ``tokens`` tokens after its last whole page: with 0 of them, it is aligned."""

    def __init__(self, capacity: int, **about: Any) -> None:
        self.cache = make_cache(capacity, pool=SlotPool, **about)
        self.words = Words()
        self.running: list[WindowLease] = []

    @property
    def free(self) -> int:
        """Blocks without a key and without a user."""
        return self.cache.tiers[0].pool.free

    def start(self, word: str, *, tokens: int = 1, output: int = 0) -> WindowLease | None:
        """Admit a request, which then runs; None without room."""
        request = self.words.request(word, page_tokens=PAGE_TOKENS, tail=tokens, output=output)
        lease = self.cache.serve(request, -(-(request.prompt_tokens + output) // PAGE_TOKENS), 0.0)
        self.running += [lease] if lease else []
        self.cache.pool.check(self.running)
        return lease

    def finish(self, *running: WindowLease | None) -> None:
        for lease in running:
            assert lease is not None
            self.cache.finish_request(lease)
            self.running.remove(lease)
            self.cache.pool.check(self.running)

    def serve(self, *words: str, tokens: int = 1, output: int = 0) -> int:
        """Serve requests one after another. Returns the hit pages of the last one."""
        for word in words:
            lease = self.start(word, tokens=tokens, output=output)
            self.finish(lease)
        assert lease is not None
        return lease.hits[0]

    def windows(self, word: str) -> list[int]:
        """The numbers of the word's pages, from 1, that all groups with a window have."""
        pool, pages = self.cache.pool, self.words.pages(word)
        whole = [segment for segment in pool.index.segments() if segment.has_all((1 << pool.groups) - 1)]
        known = {page for segment in whole for page in range(segment.start, segment.start + segment.pages)}
        return [number for number, page in enumerate(pages, 1) if page in known]

    def known(self, word: str) -> int:
        """The pages of the word that full attention alone could reuse."""
        return sum(node.pages for node in self.cache.pool.match(extents_of(self.words.pages(word)))[0])


def play(cache: VLLMWindowCache, requests: list[Request], in_flight: int = 1) -> list[int]:
    """The hit pages of each request in a replay; -1 for one that can never fit."""
    rows = replayed(cache, requests, in_flight=in_flight)
    cache.pool.check([])
    return [gpu for gpu, _, _ in rows]
