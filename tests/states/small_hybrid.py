"""Caches of hybrid models, small enough to follow by hand: a letter is a page, a word is a prompt."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvsim.core.cache import CLAIMED, Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Edge, Tier
from kvsim.pages.extents import split_extents
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.states.cache import HybridCache
from tests.core.small import SmallCache, make_tiers


class SmallHybrid(SmallCache):
    """A small cache of a hybrid model."""

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int, **about: Any) -> None:
        self.serve_from(HybridCache(Cache(tiers, edges, rules, page_tokens), **about))
        self.requests = -1

    def states_on(self, tier: str) -> set[str]:
        """The words after which a tier has a usable state."""
        words = {page: word for word, page in self.words.ids.items()}
        index = ("gpu", "cpu").index(tier)
        return {words[self.states.page_of(node)] for node in self.states.index.values() if node.state[index] == 2}

    def request(self, word: str, **settings: Any) -> Request:
        """As of any small cache; requests are numbered unless they say their number."""
        self.requests += 1
        settings.setdefault("index", self.requests)
        return super().request(word, **settings)

    def answer(self, word: str, answer: str) -> int:
        """Hit pages of a request that keeps the pages of its answer; the answer has a token more, of which no KV is left."""
        self.core.kv.rules = replace(self.core.kv.rules, cache_output=True)
        whole = self.request(word + answer).runs
        lease = self.look(word, output_tokens=len(answer) + 1, output_runs=split_extents(whole, len(word))[1])
        assert self.admit(lease, len(word + answer), next(self.clock), lease.lower_pages)
        self.move(lease.waits)
        assert self.claim(lease, next(self.clock)) == CLAIMED
        self.move(self.load(lease, next(self.clock)).transfers)
        self.move(self.insert(lease, next(self.clock)))
        self.move(self.finish(lease))
        self.check()
        return lease.gpu_pages + lease.loaded_pages


def hybrid(
    policy: CheckpointPolicy,
    *,
    gpu: int | None = 20,
    cpu: int | None = 0,
    states: int | None = 10,
    cpu_states: int = 0,
    shared_pages: int = 0,
    grid: int = 1,
    placement: Callable[[], Any] = WriteThrough,
    recompute_last_token: bool = False,
    eviction: Any = None,
) -> SmallHybrid:
    """A cache with its states in tiers of their own, or, with ``shared_pages``, in the KV's, each the size of that many pages.

    ``eviction`` is the GPU's policy, bound; LRU if None.
    """
    policy.bind(PolicyContext(page_tokens=1))
    capacities = [capacity for capacity in (gpu, cpu) if capacity != 0]
    tiers, edges = make_tiers(capacities, [eviction or LRU(), LRU()], [placement()], slots=True, page_tokens=1)
    state_tiers, state_edges = None, None
    if not shared_pages:
        rooms = [room for room in (states, cpu_states) if room != 0]
        state_tiers, state_edges = make_tiers(rooms, [LRU(), LRU()], [WriteThrough()], slots=True, page_tokens=1)
    return SmallHybrid(
        tiers,
        edges,
        Rules(recompute_last_token=recompute_last_token),
        1,
        policy=policy,
        prefill=Prefill,
        grid_pages=grid,
        state_bytes=100,
        state_pages=shared_pages or 1,
        state_tiers=state_tiers,
        state_edges=state_edges,
    )


def use(cache: SmallHybrid, *words: str) -> list[int]:
    """Hit pages of one request after another."""
    return [sum(cache.use(word)) for word in words]
