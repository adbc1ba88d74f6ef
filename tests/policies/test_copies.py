"""What policies remember of a node survives cuts, merges and moves between tiers."""

from functools import partial
from typing import Any

import pytest

from kvsim.core.cache import Cache
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier, chain
from kvsim.core.tree import READY
from kvsim.engine.prefetching import Prefetching
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lfu_da import LFUDynamicAging
from kvsim.policies.eviction.lpc import LearnedPrefix
from kvsim.policies.eviction.lru_k import LRUK
from kvsim.policies.eviction.priority import Priority
from kvsim.policies.eviction.rlt import RandomLeaf
from kvsim.policies.eviction.session_aware import SessionAware
from kvsim.policies.eviction.tail_latency import TailLatency
from kvsim.policies.eviction.ttl import TimeToLive
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from tests.core.small import MACHINE, MODEL, NAMES
from tests.workloads import long_conversations

PAGE_TOKENS = 64
POLICIES: dict[str, Any] = {
    "lfu_da": LFUDynamicAging,
    "lru_k": LRUK,
    "priority": Priority,
    "ttl": partial(TimeToLive, ttl_s=40),
    "tail_latency": partial(TailLatency, threshold=4096),
    "session_aware": SessionAware,
    "lpc": LearnedPrefix,
    "rlt": RandomLeaf,
}
"""Those that note something with each node."""


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return long_conversations(requests=400, page_tokens=PAGE_TOKENS)


def play(requests: list[Request], policy: Any, placement: Any) -> tuple[list[list[int]], Cache]:
    tiers = []
    for index, capacity in enumerate((700, 1500, 3000)):
        eviction = policy()
        lower = NAMES[index + 1] if index < 2 else None
        eviction.bind(
            PolicyContext(
                tier=index, lower_tier_name=lower, capacity_pages=capacity, page_tokens=PAGE_TOKENS, model=MODEL,
                hardware=MACHINE, requests=requests,
            )
        )  # fmt: skip
        tiers.append(Tier(NAMES[index], index, Pool(capacity), eviction))
    cache = Cache(tiers, chain(tiers, [placement(), placement()]), Rules(), PAGE_TOKENS)
    outcome = Replay(CacheServer(cache, Prefetching(cache, NoPrefetch(), Offer)), ReplaySettings()).run(requests)
    cache.check()
    return outcome.hit_pages.tolist(), cache


@pytest.mark.parametrize("name", POLICIES)
def test_every_tier_is_hit_and_every_copy_keeps_its_note(requests: list[Request], name: str) -> None:
    """Each policy with one of the placements, which take turns."""
    hits, cache = play(requests, POLICIES[name], (WriteBack, WriteThrough, Exclusive)[list(POLICIES).index(name) % 3])
    assert all(sum(of_tier) > 100 for of_tier in zip(*hits, strict=True))
    notes = [node.notes[at] for node in cache.tree.root.descendants() for at in range(3) if node.state[at] == READY]
    assert len(notes) > 100 and None not in notes
