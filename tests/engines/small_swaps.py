"""FastDeploy's cache small enough to follow by hand. A prompt is a word, a page of one token for each letter; equal beginnings
of two words are the same pages. Slots are numbered, so that none can have two owners."""

from collections.abc import Callable
from typing import Any

from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup
from kvsim.core.serving import NEVER_FITS
from kvsim.core.tier import DISK, Edge, Tier
from kvsim.engines.fastdeploy.rules import FastDeployRules
from kvsim.engines.fastdeploy.swapping import SwappingCache
from kvsim.engines.fastdeploy.swaps import SwapLease, Swaps
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_through import WriteThrough
from tests.engines.slow_swaps import Row
from tests.engines.small import check, replayed
from tests.workloads import Words

NAMES = ("gpu", "cpu", "disk")


def make_cache(
    gpu: int,
    cpu: int = 0,
    storage: int = 0,
    *,
    page_tokens: int = 1,
    eviction: Callable[[], Any] = LRU,
    placement: Callable[[], Any] = Exclusive,
    storage_eviction: Callable[[], Any] = LRU,
    storage_placement: Callable[[], Any] = WriteThrough,
    **rules: Any,
) -> SwappingCache:
    """A cache of the tiers that have room. CPU memory and storage are both below the GPU."""
    tiers: list[Tier] = []
    for level, capacity in enumerate((gpu, cpu, storage)):
        if capacity:
            policy = storage_eviction() if level == DISK else eviction()
            policy.bind(PolicyContext(tier=len(tiers), level=level, capacity_pages=capacity, page_tokens=page_tokens))
            tiers.append(Tier(NAMES[level], len(tiers), SlotPool(capacity), policy, level))
    edges = [Edge(tiers[0], tier, storage_placement() if tier.level == DISK else placement()) for tier in tiers[1:]]
    cache = FastDeployRules(**rules).server(CacheSetup(tiers=tiers, edges=edges, page_tokens=page_tokens))
    assert isinstance(cache, SwappingCache)
    return cache


def play(cache: SwappingCache, requests: list[Request], *, in_flight: int = 1, hold_output: bool = True) -> list[Row]:
    """Hits of all requests, as the slow model's rows."""
    rows = replayed(cache, requests, in_flight=in_flight, hold_output=hold_output)
    check(cache, [])
    return [row[: 2 if cache.cache.swaps.storage is None else 3] for row in rows]


class Small:
    """A cache that takes words. ``tail`` tokens after a word take a partial page, ``output`` tokens the answer's pages."""

    def __init__(self, gpu: int, cpu: int = 0, storage: int = 0, *, page_tokens: int = 1, **rules: Any) -> None:
        self.cache = make_cache(gpu, cpu, storage, page_tokens=page_tokens, **rules)
        self.page_tokens = page_tokens
        self.words = Words()
        self.running: list[SwapLease] = []

    def request(self, word: str, *, tail: int = 0, output: int = 0) -> Request:
        return self.words.request(word, page_tokens=self.page_tokens, tail=tail, output=output)

    def attempt(self, request: Request) -> SwapLease | None:
        """One attempt to serve a request; None if there is no room now."""
        pages = -(-(request.prompt_tokens + request.output_tokens) // self.page_tokens)
        lease = self.cache.serve(request, pages, 0.0)
        assert lease is not NEVER_FITS
        self.running += [lease] if lease else []
        self.check()
        return lease

    def start(self, word: str, *, tail: int = 0, output: int = 0) -> SwapLease:
        """A request that finds room at once and goes on running."""
        lease = self.attempt(self.request(word, tail=tail, output=output))
        assert lease is not None
        return lease

    def finish(self, lease: SwapLease) -> None:
        self.running.remove(lease)
        self.cache.finish_request(lease)
        self.check()

    @property
    def swaps(self) -> Swaps:
        """The tiers of the cache, and the moves between them."""
        return self.cache.cache.swaps

    def check(self) -> None:
        self.cache.cache.check()
        unfinished = self.cache._unfinished
        check(self.cache, [*self.running, unfinished] if unfinished else self.running)

    def use(self, *words: str, tail: int = 0, output: int = 0) -> Row:
        """Requests from beginning to end, one after another; the hits of the last one."""
        for word in words:
            lease = self.start(word, tail=tail, output=output)
            self.finish(lease)
        return lease.hits[: 2 if self.swaps.storage is None else 3]

    def on(self, tier: int) -> str:
        """The letters of a tier's pages, in order of their ids."""
        nodes = [node for node in self.cache.tree.root.descendants() if node.state[tier]]
        return "".join(self.words.text(node.runs) for node in sorted(nodes, key=lambda node: node.runs))

    @property
    def where(self) -> tuple[str, str]:
        """The letters on the GPU and in CPU memory."""
        return self.on(0), self.on(1)

    @property
    def stored(self) -> str:
        """The letters in storage."""
        return self.on(len(self.cache.tiers) - 1)
