"""From a plan to what happened: puts cache, policies and engine together and runs requests through them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsim.build import Plan
from kvsim.core.cache import TieredCache
from kvsim.core.instant import InstantCache
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.tier import Tier
from kvsim.engine.engine import Engine
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.replay import Replay
from kvsim.errors import UsageError
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.substrate.simulated.substrate import SimulatedSubstrate

Advance = Callable[[int], None]
"""Is told now and then how many requests are done."""


def replay(plan: Plan, requests: list[Request], advance: Advance | None = None) -> Outcome:
    """Play the requests one after another, without a clock."""
    tiers = build_tiers(plan, requests)
    cache = plan.rules.serving_cache(tiers, plan.page_tokens) or InstantCache(tiers, plan.rules, plan.page_tokens)
    return Replay(cache, _prefetching(plan, requests, cache), plan.replay).run(requests, advance)


def simulate(plan: Plan, requests: list[Request], advance: Advance | None = None) -> Outcome:
    """Serve the requests in simulated time."""
    cache = TieredCache(build_tiers(plan, requests), plan.rules, plan.page_tokens)
    substrate = SimulatedSubstrate(plan.model, plan.hardware, plan.page_tokens, links=plan.engine.links)
    return Engine(substrate, cache, _prefetching(plan, requests, cache), plan.engine).run(requests, advance)


def check_capacity(plan: Plan, requests: list[Request]) -> None:
    """Raise UsageError if the GPU tier cannot hold even the smallest request: every one would be rejected."""
    capacity = plan.tiers[0].capacity_pages
    smallest = min(requests, key=lambda request: request.prompt_tokens)
    if capacity is not None and capacity < smallest.prompt_tokens // plan.page_tokens:
        raise UsageError(
            f"tiers.gpu.capacity is {capacity} pages of {plan.page_tokens} tokens, but the smallest prompt has "
            f"{smallest.prompt_tokens} tokens: no request would fit; give it more"
        )


def build_tiers(plan: Plan, requests: Sequence[Request] = ()) -> list[Tier]:
    """The plan's tiers, empty, their policies bound. Raises UsageError for a policy that lacks its input."""
    tiers = []
    for index, tier in enumerate(plan.tiers):
        context = _context(plan, requests, index)
        _bind("eviction", tier.eviction, context)
        if tier.placement is not None:
            _bind("placement", tier.placement, context)
        tiers.append(Tier(tier.name, index, Pool(tier.capacity_pages), tier.eviction, tier.placement))
    return tiers


def _prefetching(plan: Plan, requests: Sequence[Request], cache: Any) -> Prefetching:
    _bind("prefetch", plan.prefetch, _context(plan, requests, min(1, len(plan.tiers) - 1)))
    return Prefetching(cache, plan.prefetch, Offer)


def _bind(family: str, policy: EvictionPolicy | PlacementPolicy | PrefetchPolicy, context: PolicyContext) -> None:
    try:
        policy.bind(context)
    except ValueError as error:
        raise UsageError(f"{family} of the {context.tier_name} tier: {type(policy).__name__} {error}") from error


def _context(plan: Plan, requests: Sequence[Request], index: int) -> PolicyContext:
    tier = plan.tiers[index]
    return PolicyContext(
        tier=index,
        tier_name=tier.name,
        capacity_pages=tier.capacity_pages,
        page_tokens=plan.page_tokens,
        model=plan.model,
        hardware=plan.hardware,
        requests=requests,
        rng=np.random.default_rng([plan.seed, index]),
    )
