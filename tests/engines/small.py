"""Traces and caches for the tests of engines: prompts are words, equal beginnings of two words are the same pages."""

from collections.abc import Callable, Iterable
from typing import Any

from kvsim.core.cache import Cache
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup, Rules
from kvsim.core.tier import CPU, Tier, chain
from kvsim.core.tree import READY
from kvsim.engine.outcome import REJECTED
from kvsim.engines.sglang.rules import SGLangRules
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.policies.context import PolicyContext
from kvsim.replaying.replay import Replay
from kvsim.replaying.settings import ReplaySettings

Row = tuple[int, int]


def make_cache(gpu: int, cpu: int = 0, *, eviction: Callable[[], Any], placement: Any = None, page_tokens: int = 1,
               load_min_tokens: int = 0, **context: Any) -> WholeNodeCache:  # fmt: skip
    """A cache by SGLang's rules, with a host by those of 0.5.15; slots are numbered, so that none can have two owners.

    ``context`` is for policies.
    """
    tiers = []
    for index, capacity in enumerate([gpu, cpu] if cpu else [gpu]):
        policy = eviction()
        policy.bind(PolicyContext(tier=index, capacity_pages=capacity, page_tokens=page_tokens, **context))
        tiers.append(Tier(("gpu", "cpu")[index], index, SlotPool(capacity), policy))
    edges = chain(tiers, [placement] if cpu else [])
    rules = SGLangRules(load_min_tokens=load_min_tokens, version="0.5.15" if cpu else "0.5.23")
    cache = rules.server(CacheSetup(tiers=tiers, edges=edges, page_tokens=page_tokens))
    assert isinstance(cache, WholeNodeCache)
    return cache


def empty_cache(tier: Tier) -> Cache:
    """An empty cache of pages of four tokens, for policies that try settings out."""
    return Cache([tier], [], Rules(), 4)


def play(cache: WholeNodeCache, requests: list[Request], *, in_flight: int = 1, hold_output: bool = True) -> list[Row]:
    """Hits of all requests on GPU and host; (-1, 0) for a rejected one."""
    rows = replayed(cache, requests, in_flight=in_flight, hold_output=hold_output)
    check(cache, [])
    return [(gpu, cpu) for gpu, cpu, _ in rows]


def replayed(cache: Any, requests: list[Request], *, in_flight: int = 1, hold_output: bool = True) -> list[tuple[int, int, int]]:
    """The hits of each request in a replay on GPU, host and disk; (-1, 0, 0) for a rejected one."""
    settings = ReplaySettings(in_flight=in_flight, hold_output=hold_output)
    outcome = Replay(cache, settings).run(requests)
    rows = zip(outcome.status.tolist(), outcome.hit_pages.tolist(), strict=True)
    return [(-1, 0, 0) if status == REJECTED else (gpu, cpu, disk) for status, (gpu, cpu, disk) in rows]


def check(cache: Any, held: Iterable[Any]) -> None:
    """Recount slots, pins, children and what can be evicted."""
    held = list(held)
    nodes = list(cache.tree.root.descendants())
    for tier in cache.tiers:
        here = [node for node in nodes if node.state[tier.index] == READY]
        slots = [slot for node in here for slot in node.slots[tier.index].tolist()]
        assert [len(node.slots[tier.index]) for node in here] == [node.pages for node in here]
        slots += [slot for one in held for slot in one.slots.tolist()] if tier.index == 0 else []
        slots += tier.pool.free_slots().tolist()
        assert sorted(slots) == list(range(tier.pool.capacity))
        assert tier.evictable_pages == sum(node.pages for node in here if not node.pins[tier.index])
        for node in [cache.tree.root, *nodes]:
            assert node.children_in[tier.index] == sum(child.state[tier.index] == READY for child in node.children.values())
    for node in nodes:
        assert any(node.state)
        assert node.depth == node.parent.depth + node.parent.pages  # type: ignore[union-attr]
        assert not node.state[0] or node.parent is cache.tree.root or node.parent.state[0]  # type: ignore[union-attr]
        assert node.pins[0] == sum(is_above(node, one) for one in held)
        for tier in cache.tiers[1:]:
            assert node.pins[tier.index] == (tier.level == CPU and node.state[0] == node.state[tier.index] == READY)


def is_above(node: Any, held: Any) -> bool:
    """Whether a request holds the node."""
    at: Any = held.node
    while at is not None and at is not node:
        at = at.parent
    return at is node
