"""From a plan to its outcome: assembles cache, policies and engine, and runs requests through them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from kvsim.bounds.bypass import BypassTier
from kvsim.build import check_bypass
from kvsim.core.cache import Cache
from kvsim.core.edge import Edge, chain
from kvsim.core.hybrid import HybridCache
from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import HybridSettings
from kvsim.core.serving import RulesError, ServedCache, ServingCache
from kvsim.core.tier import LEVELS, PolicyError, Tier
from kvsim.engine.engine import Engine
from kvsim.engine.event_log import EventLog, LoggedCache, LoggedServer
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.recorder import Recorder
from kvsim.engine.replay import Replay
from kvsim.errors import UsageError, WrongResult
from kvsim.plan import Plan, TierPlan
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import BypassEviction, EvictionPolicy
from kvsim.policies.eviction.belady import Belady
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.substrates import SUBSTRATES

Advance = Callable[[int], None]
"""Called now and then with the number of finished requests."""


@contextmanager
def _policies_named() -> Iterator[None]:
    """Turn a policy's breach of contract, or a run that an engine's rules cannot play, into a UsageError of one line."""
    try:
        yield
    except (PolicyError, RulesError) as error:
        raise UsageError(str(error)) from error


@_policies_named()
def replay(
    plan: Plan, requests: list[Request], advance: Advance | None = None, inspect: Callable[[Any, str], None] | None = None
) -> Outcome:
    """Replay the requests one after another, without a clock.

    ``inspect`` is called with the cache: with ``plan.print_steps`` after each step, with what has happened, and otherwise once,
    while the last requests are still unfinished. Slots are then numbered. Raises UsageError.
    """
    check_answers(plan, requests)
    check_bypass(plan, "replay")
    tiers, edges = build_tiers(plan, requests, SlotPool if inspect else Pool)
    try:
        if plan.rules.has_own_cache:
            taken = plan.replay.pages_taken(requests, plan.page_tokens)
            plan.rules.check_requests(requests, taken, {tier.name: tier.capacity_pages for tier in plan.tiers}, plan.page_tokens)
        own = _bypass_tier(plan, tiers, requests) or _own_cache(plan, tiers, edges, requests)
    except ValueError as error:
        raise UsageError(f"rules: {error}") from error
    cache = own or build_cache(plan, tiers, edges, requests)
    log = EventLog(tiers) if plan.events else None
    if log:
        cache = LoggedCache(cache, log) if isinstance(cache, ServedCache) else LoggedServer(cache, log)
    player = Replay(cache, _prefetching(plan, requests, cache), plan.replay)
    outcome = player.run(requests, advance, inspect, each_step=plan.print_steps)
    outcome.events = log
    return outcome


@_policies_named()
def simulate(plan: Plan, requests: list[Request], advance: Advance | None = None) -> Outcome:
    """Serve the requests in simulated time or, with ``substrate=hardware``, on this machine. Raises UsageError."""
    check_bypass(plan, "simulate")
    check_answers(plan, requests)
    choice = SUBSTRATES[plan.substrate]
    tiers, edges = build_tiers(plan, requests, choice.pool)
    cache = plan.rules.served_cache(tiers, edges, plan.page_tokens) or build_cache(plan, tiers, edges, requests)
    substrate = choice.open(plan, requests, cache)
    try:
        recorder = Recorder(substrate, tiers) if plan.timeline else None
        log = EventLog(tiers, lambda: float(substrate.env.now)) if plan.events else None
        cache = LoggedCache(cache, log) if log else cache
        prefetching = _prefetching(plan, requests, cache)
        _bind_scheduling(plan, requests)
        outcome = Engine(recorder or substrate, cache, prefetching, plan.engine, plan.scheduling).run(requests, advance)
    finally:
        substrate.close()
    outcome.timeline, outcome.events = recorder, log
    return outcome


def check_verified(outcome: Outcome) -> None:
    """Raise WrongResult if a page reused on real hardware held anything other than what was computed."""
    found = outcome.hardware
    if found.get("wrong_words"):
        raise WrongResult(
            f"{found['wrong_words']:,} words in {found['wrong_pages']:,} of {found['verified_pages']:,} reused pages are wrong: "
            f"do not trust the run on {found['device']}"
        )


def _own_cache(plan: Plan, tiers: list[Tier], edges: list[Edge], requests: Sequence[Request]) -> ServingCache | None:
    """Build the cache of the engine whose rules apply; None for kvsim's own rules. Raises ValueError."""
    rules, page_tokens = plan.rules, plan.page_tokens
    if rules.serves_hybrid_models:
        return rules.hybrid_cache(tiers, edges, page_tokens, hybrid_settings(plan, tiers, requests))
    return rules.serving_cache(tiers, edges, page_tokens)


def build_cache(plan: Plan, tiers: list[Tier], edges: list[Edge], requests: Sequence[Request]) -> ServedCache:
    """Build the plan's cache, empty. For a model with recurrent layers, it also saves their states."""
    cache = Cache(tiers, edges, plan.rules, plan.page_tokens)
    return _with_states(plan, cache, requests) if plan.model.is_hybrid else cache


def _with_states(plan: Plan, cache: Cache, requests: Sequence[Request]) -> HybridCache:
    """Build a cache that saves recurrent states. States with their own capacity are evicted by LRU and written through."""
    hybrid = hybrid_settings(plan, cache.tiers, requests)
    state_tiers = hybrid.state_tiers
    return HybridCache(
        cache,
        policy=hybrid.checkpoint,
        prefill=Prefill,
        grid_pages=hybrid.grid_pages,
        state_bytes=hybrid.state_bytes,
        state_pages=hybrid.state_pages,
        state_tiers=state_tiers,
        state_edges=chain(state_tiers, [WriteThrough() for _ in state_tiers[1:]]) if state_tiers else None,
    )


def hybrid_settings(plan: Plan, tiers: list[Tier], requests: Sequence[Request] = ()) -> HybridSettings:
    """Bind the checkpoint policy and build the tiers of states, if they have their own, with LRU. Raises UsageError."""
    model = plan.model
    _bind("checkpoint", plan.checkpoint, _context(plan, requests, 0))
    state_tiers = None
    if plan.states is not None:
        state_tiers = [Tier(tier.name, tier.index, Pool(room), LRU()) for tier, room in zip(tiers, plan.states, strict=False)]
        for tier in state_tiers:
            tier.slot_bytes = model.state_bytes
            tier.eviction.bind(_context(plan, requests, tier.index))
    return HybridSettings(
        checkpoint=plan.checkpoint,
        state_tiers=state_tiers,
        state_pages=1 if state_tiers else -(-model.state_bytes // model.page_bytes(plan.page_tokens)),
        state_bytes=model.state_bytes,
        grid_pages=model.checkpoint_grid_tokens(plan.page_tokens) // plan.page_tokens,
        prefill_chunk_tokens=plan.replay.chunk_tokens,
    )


def upper_bound(plan: Plan, requests: list[Request], belady: Belady | None = None) -> Outcome:
    """Replay Belady's MIN on one tier as large as all tiers together: no policies for the plan's tiers get more page hits.

    The bound holds because a hit page must have been in some tier since its last use, and this one tier holds as many pages as
    all of them. In it, moves are free, running requests occupy no pages, and the future is known. Requests too large for the
    GPU tier are rejected. Passing a ``belady`` used before on the same requests saves looking ahead over them again.
    """
    gpu = plan.tiers[0]
    capacities = [tier.capacity_pages for tier in plan.tiers]
    total = None if None in capacities else sum(filter(None, capacities))
    whole = TierPlan(name=gpu.name, capacity_pages=total, eviction=belady or Belady(), placement=None)
    settings = replace(plan.replay, in_flight=1)
    one = replace(plan, tiers=[whole], prefetch=NoPrefetch(), replay=settings)
    cache = _bypass_tier(one, build_tiers(one, requests)[0], requests, gpu.capacity_pages)
    assert cache is not None
    return Replay(cache, _prefetching(one, requests, cache), settings).run(requests)


def check_answers(plan: Plan, requests: Sequence[Request]) -> None:
    """Raise UsageError if the rules need output tokens that the trace lacks, or do not support what the trace contains."""
    if plan.rules.has_own_cache:
        for what, is_there in (
            ("has persistent prompts", any(request.persistent for request in requests)),
            ("resets the cache", any(request.resets for request in requests)),
            ("asks for several samples of an answer", any(request.samples > 1 for request in requests)),
            ("has images that no hit may end inside", any(request.images for request in requests)),
        ):
            if is_there:
                raise UsageError(f"rules: the trace {what}, which an engine's own rules do not support: set rules=default")
        if not plan.rules.has_bigram_keys and any(request.bigram for request in requests):
            raise UsageError(
                "trace.bigram: only SGLang has keys of token pairs: set trace.bigram=false, rules=sglang or rules=default"
            )
    if not plan.rules.cache_output:
        return
    if any(request.output_runs is None for request in requests):
        raise UsageError(
            "rules.cache_output: the trace does not contain output tokens: use one that does (tokens with output_token_ids, "
            "synthetic), set trace.answers=inferred (mooncake, weka, bailian) or unique (mooncake, bailian), or set "
            "rules.cache_output=false"
        )
    if any(request.prompt_pages * plan.page_tokens > request.prompt_tokens for request in requests):
        raise UsageError("rules.cache_output: output cannot follow a prompt that ends with a partial page: set trace.tail=full")


def check_capacity(plan: Plan, requests: list[Request]) -> None:
    """Raise UsageError if the GPU tier cannot hold even the smallest request, so every request would be rejected."""
    capacity = plan.tiers[0].capacity_pages
    if capacity is None:
        return
    smallest = min([request.prompt_tokens for request in requests])
    if capacity < smallest // plan.page_tokens:
        raise UsageError(
            f"tiers.gpu.capacity is {capacity} pages of {plan.page_tokens} tokens, but the smallest prompt has "
            f"{smallest} tokens: no request fits; increase the capacity"
        )


def build_tiers(plan: Plan, requests: Sequence[Request] = (), pool: type[Pool] = Pool) -> tuple[list[Tier], list[Edge]]:
    """Build the plan's tiers, empty, and the edges between them, and bind their policies.

    Raises UsageError if a policy cannot be bound, for example because an input is missing.
    """
    tiers: dict[str, Tier] = {}
    edges: list[Edge] = []
    for index, tier in enumerate(plan.tiers):
        context = _context(plan, requests, index)
        eviction = tier.eviction.variant()
        _bind("eviction", eviction, context)
        tiers[tier.name] = Tier(tier.name, index, pool(tier.capacity_pages), eviction, LEVELS.index(tier.name))
        tiers[tier.name].unit_pages = tier.unit_pages
        if tier.placement is not None:
            _bind("placement", tier.placement, context)
            edges.append(Edge(tiers[tier.above], tiers[tier.name], tier.placement))
    return list(tiers.values()), edges


def _bypass_tier(plan: Plan, tiers: list[Tier], requests: list[Request], largest_pages: int | None = None) -> BypassTier | None:
    """Build the cache of a policy that may bypass the tier; None for other policies.

    Requests of more than ``largest_pages``, by default the tier's capacity, are rejected.
    """
    policy = tiers[0].eviction
    if not isinstance(policy, BypassEviction):
        return None
    for what, is_there in (
        ("resets the cache", any(request.resets for request in requests)),
        ("has images that no hit may end inside", any(request.images for request in requests)),
    ):
        if is_there:
            raise UsageError(f"eviction: {type(policy).__name__} is not an exact bound for a trace that {what}")
    if plan.rules.cache_output and any(request.sample_output_runs for request in requests):
        raise UsageError(
            f"eviction: {type(policy).__name__} is not an exact bound where several answers to a prompt are cached: set "
            "rules.cache_output=false"
        )
    taken = plan.replay.pages_taken(requests, plan.page_tokens)
    largest = tiers[0].pool.capacity if largest_pages is None else largest_pages
    return BypassTier(tiers[0], policy, plan.rules, plan.page_tokens, requests, taken, largest)


def _prefetching(plan: Plan, requests: Sequence[Request], cache: Any) -> Prefetching:
    _bind("prefetch", plan.prefetch, _context(plan, requests, min(1, len(plan.tiers) - 1)))
    return Prefetching(cache, plan.prefetch, Offer)


def _bind_scheduling(plan: Plan, requests: Sequence[Request]) -> None:
    try:
        plan.scheduling.bind(_context(plan, requests, 0))
    except ValueError as error:
        raise UsageError(f"scheduling: {type(plan.scheduling).__name__} {error}") from error


def _bind(
    family: str, policy: EvictionPolicy | PlacementPolicy | PrefetchPolicy | CheckpointPolicy, context: PolicyContext
) -> None:
    try:
        policy.bind(context)
    except ValueError as error:
        raise UsageError(f"{family} of the {context.tier_name} tier: {type(policy).__name__} {error}") from error


def _context(plan: Plan, requests: Sequence[Request], index: int) -> PolicyContext:
    tier = plan.tiers[index]
    return PolicyContext(
        tier=index,
        tier_name=tier.name,
        level=LEVELS.index(tier.name),
        upper_level=LEVELS.index(tier.above) if tier.above else -1,
        lower_tier_name=next((lower.name for lower in plan.tiers if lower.placement and lower.above == tier.name), None),
        capacity_pages=tier.capacity_pages,
        capacities=[tier.capacity_pages for tier in plan.tiers],
        page_tokens=plan.page_tokens,
        states_apart=plan.states is not None,
        model=plan.model,
        hardware=plan.hardware,
        requests=requests,
        rng=np.random.default_rng([plan.seed, index]),
    )
