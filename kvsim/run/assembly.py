"""Builds the parts of a run from its plan: tiers, edges, caches and engines, with their policies bound."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from kvsim.cluster.cluster import Cluster
from kvsim.cluster.hand_over import HandOver
from kvsim.cluster.held_pages import Holders
from kvsim.cluster.router import Changes, Router, known_engines
from kvsim.cluster.scaler import Scaler
from kvsim.core.answers import refused
from kvsim.core.cache import Cache
from kvsim.core.fan_out import TOGETHER
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.requests import fixed
from kvsim.core.rules import CacheSetup, HybridSettings, Rules, WindowSettings
from kvsim.core.serving import ServedCache
from kvsim.core.tier import Edge, Tier, chain
from kvsim.engine.engine import Engine
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.substrate import Substrate
from kvsim.engine.watch import EngineWatch
from kvsim.errors import UsageError
from kvsim.hardware.tier_kinds import ALWAYS, LEVELS, kind_of
from kvsim.plans.plan import Plan, TierPlan
from kvsim.policies.checkpoint.base import Prefill
from kvsim.policies.context import PolicyContext
from kvsim.policies.copies import copied
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.base import ReadOnly
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.run.admitting import build_gate
from kvsim.run.autoscaling_context import autoscaling_context
from kvsim.run.stop_iteration import refuse_stop_iteration
from kvsim.states.cache import HybridCache

Graph = tuple[list[Tier], list[Edge]]
"""Tiers that are joined by edges, and therefore have one cache: GPU tiers, then CPU tiers, then disks."""
P = TypeVar("P")
C = TypeVar("C", bound=Cluster)


# --- tiers ---------------------------------------------------------------------------------------------------------------


def build_graphs(plan: Plan, requests: Sequence[Request] = (), pool: type[Pool] = Pool) -> list[Graph]:
    """Build the tiers of all engines, empty. Engines that share no tier have a graph each.

    Raises UsageError if a policy cannot be bound, for example because an input is missing.
    """
    groups: dict[int, list[int]] = {}
    for engine in range(plan.layout.engines):
        groups.setdefault(plan.group(engine), []).append(engine)
    known = fixed(requests)
    return [_build_graph(plan, known, pool, engines) for engines in groups.values()]


def build_tiers(plan: Plan, requests: Sequence[Request] = (), pool: type[Pool] = Pool) -> Graph:
    """Build the tiers of the first engine alone, empty, for a replay. Raises UsageError."""
    return _build_graph(plan, requests, pool, [0])


def _build_graph(plan: Plan, requests: Sequence[Request], pool: type[Pool], engines: Sequence[int]) -> Graph:
    tiers: dict[tuple[str, int], Tier] = {}
    for one in plan.tiers:
        for owner in dict.fromkeys([plan.owner(one.name, engine) for engine in engines]):
            tiers[one.name, owner] = _build_tier(plan, requests, pool, one, owner, len(tiers))
    edges: list[Edge] = []
    for one in plan.tiers:
        if one.placement is None:
            continue
        for upper, lower in _pairs(plan, one.above, one.name, engines, tiers):
            placement = _policy_of_its_own(plan, one.placement)
            bind("placement", placement, context(plan, requests, lower, upper))
            edges.append(Edge(upper, lower, placement))
        if one.reads_into != one.above:
            edges += [Edge(*pair, ReadOnly(one.placement)) for pair in _pairs(plan, one.reads_into, one.name, engines, tiers)]
    return list(tiers.values()), edges


def _pairs(
    plan: Plan, above: str, name: str, engines: Sequence[int], tiers: Mapping[tuple[str, int], Tier]
) -> list[tuple[Tier, Tier]]:
    """Return the tiers of two names that some engine uses together, as (upper, lower)."""
    owners = dict.fromkeys([(plan.owner(above, engine), plan.owner(name, engine)) for engine in engines])
    return [(tiers[above, upper], tiers[name, lower]) for upper, lower in owners]


def _build_tier(plan: Plan, requests: Sequence[Request], pool: type[Pool], one: TierPlan, owner: int, index: int) -> Tier:
    given = _policy_of_its_own(plan, one.eviction)
    eviction: object = given.variant()
    if not isinstance(eviction, EvictionPolicy):
        raise refused(f"the eviction policy {type(given).__name__}", "variant()", eviction, "an eviction policy")
    tier = Tier(one.name, index, pool(one.capacity_pages), eviction, LEVELS.index(one.name))
    tier.owner, tier.unit_pages = owner, one.unit_pages
    bind("eviction", eviction, context(plan, requests, tier))
    return tier


def _policy_of_its_own(plan: Plan, policy: P) -> P:
    """Return a policy for one of several places of the same kind; the only one gets the plan's."""
    return copied(policy) if plan.layout.engines > 1 else policy


# --- what policies may know ----------------------------------------------------------------------------------------------


def bind(family: str, policy: Any, known: PolicyContext) -> None:
    """Bind a policy. Raises UsageError if an input is missing."""
    refuse_stop_iteration(policy)
    try:
        policy.bind(known)
    except ValueError as error:
        whose = "" if family == "scheduling" else f" of the {known.tier_name} tier"
        raise UsageError(f"{family}{whose}: {type(policy).__name__} {error}") from error


def context(plan: Plan, requests: Sequence[Request], tier: Tier, upper: Tier | None = None) -> PolicyContext:
    """Return what the policies of a tier may know. ``upper`` is the tier above, for a placement policy."""
    position = [one.name for one in plan.tiers].index(tier.name)
    one = plan.tiers[position]
    seed = [plan.seed, position] if plan.layout.engines == 1 else [plan.seed, position, tier.owner]
    return PolicyContext(
        tier=tier.index,
        tier_name=tier.name,
        level=tier.level,
        upper_tier=-1 if upper is None else upper.index,
        upper_level=LEVELS.index(one.above) if one.above else -1,
        lower_tier_name=next((lower.name for lower in plan.tiers if lower.placement and lower.reads_into == tier.name), None),
        capacity_pages=one.capacity_pages,
        capacities=[each.capacity_pages for each in plan.tiers],
        position=position,
        page_tokens=plan.page_tokens,
        states_apart=plan.states is not None,
        model=plan.model,
        hardware=plan.hardware,
        requests=fixed(requests),
        empty_cache=lambda tier: Cache([tier], [], Rules(), plan.page_tokens),
        rng=np.random.default_rng(seed),
    )


# --- caches --------------------------------------------------------------------------------------------------------------


def build_setup(plan: Plan, graph: Graph, requests: Sequence[Request]) -> CacheSetup:
    """Return what a cache of these tiers is made of. Raises UsageError if the checkpoint policy lacks an input."""
    tiers, edges = graph
    hybrid = _hybrid_settings(plan, tiers, requests) if plan.model.is_hybrid else None
    reads_ahead = any(kind_of(tier.name).is_far for tier in plan.tiers)
    return CacheSetup(
        tiers=tiers,
        edges=edges,
        page_tokens=plan.page_tokens,
        hybrid=hybrid,
        windows=_window_settings(plan) if plan.rules.serves_windows else None,
        prefill_chunk_tokens=plan.replay.prefill_chunk_tokens or 0,
        copy_steps=plan.replay.copy_steps,
        prefetch=_bound_prefetch(plan, requests, tiers) if plan.rules.asks_prefetch and reads_ahead else None,
    )


def _window_settings(plan: Plan) -> WindowSettings:
    model = plan.model
    return WindowSettings(
        full_layers=model.attention_layers - model.sliding_window_layers,
        window_layers=model.sliding_window_layers,
        window_tokens=model.sliding_window_tokens,
        chunk_tokens=plan.replay.chunk_tokens,
        batch_tokens=plan.engine.max_batch_tokens,
    )


def build_served(plan: Plan, graph: Graph, requests: Sequence[Request]) -> ServedCache:
    """Build the cache that an engine is simulated with: that of the plan's rules, if they have one. Raises UsageError."""
    setup = build_setup(plan, graph, requests)
    try:
        return plan.rules.cache(setup) or build_cache(plan, setup)
    except ValueError as error:
        raise UsageError(f"rules: {error}") from error


def build_cache(plan: Plan, setup: CacheSetup) -> ServedCache:
    """Build kvsim's own cache, empty. For a model with recurrent layers, it also saves their states."""
    cache = Cache(setup.tiers, setup.edges, plan.rules, plan.page_tokens)
    return cache if setup.hybrid is None else _with_states(cache, setup.hybrid)


def _with_states(cache: Cache, hybrid: HybridSettings) -> HybridCache:
    """Build a cache that saves recurrent states. States with their own capacity are evicted by LRU and written through."""
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


def _hybrid_settings(plan: Plan, tiers: list[Tier], requests: Sequence[Request]) -> HybridSettings:
    """Bind the checkpoint policy and build the tiers of states, if they have their own, with LRU. Raises UsageError."""
    model, checkpoint = plan.model, _policy_of_its_own(plan, plan.checkpoint)
    bind("checkpoint", checkpoint, context(plan, requests, tiers[0]))
    state_tiers = None
    if plan.states is not None:
        state_tiers = []
        for pages, room in zip(tiers, plan.states, strict=False):
            eviction = LRU()
            eviction.bind(context(plan, requests, pages))
            tier = Tier(pages.name, pages.index, (Pool if room is None else type(pages.pool))(room), eviction)
            tier.slot_bytes, tier.owner = model.state_bytes, pages.owner
            state_tiers.append(tier)
    return HybridSettings(
        checkpoint=checkpoint,
        state_tiers=state_tiers,
        state_pages=1 if state_tiers else _state_pages(plan),
        state_bytes=model.state_bytes,
        grid_pages=model.checkpoint_grid_tokens(plan.page_tokens) // plan.page_tokens,
        prefill_chunk_tokens=plan.replay.chunk_tokens,
    )


def _state_pages(plan: Plan) -> int:
    """Return the slots of pages that a state takes. GPUs have a part of it each, also where they have copies of KV."""
    copies = plan.model.kv_copies(plan.hardware.attention_gpus)
    return -(-plan.model.state_bytes // (copies * plan.model.page_bytes(plan.page_tokens)))


# --- engines -------------------------------------------------------------------------------------------------------------


def build_prefetching(plan: Plan, requests: Sequence[Request], cache: Any) -> Prefetching:
    """Build the prefetches of one engine."""
    return Prefetching(cache, _bound_prefetch(plan, requests, cache.tiers), Offer)


def _bound_prefetch(plan: Plan, requests: Sequence[Request], tiers: Sequence[Tier]) -> PrefetchPolicy:
    """Return the prefetch policy of one engine or cache."""
    policy = _policy_of_its_own(plan, plan.prefetch)
    bind("prefetch", policy, context(plan, requests, tiers[0] if len(plan.tiers) == 1 else _second(plan, tiers)))
    return policy


def _second(plan: Plan, tiers: Sequence[Tier]) -> Tier:
    """Return a tier of the second kind; all of them have the same capacity."""
    return next(tier for tier in tiers if tier.name == plan.tiers[1].name)


def build_cluster(
    plan: Plan,
    requests: Sequence[Request],
    caches: Sequence[ServedCache],
    substrate: Substrate,
    watches: Sequence[EngineWatch] = (),
) -> Cluster:
    """Build all engines over their caches and, if there are several, the routers before them. Raises UsageError.

    ``watches`` are told of their steps.
    """
    return build_cluster_of(Cluster, plan, requests, caches, substrate, watches)


def build_cluster_of(
    kind: type[C],
    plan: Plan,
    requests: Sequence[Request],
    caches: Sequence[ServedCache],
    substrate: Substrate,
    watches: Sequence[EngineWatch] = (),
) -> C:
    """Build a cluster of this class, as ``build_cluster`` does."""
    engines: dict[int, Engine] = {}
    known = fixed(requests)
    for cache in caches:
        mover = Mover(substrate, cache)
        for gpu in [tier for tier in cache.tiers if not tier.above]:
            scheduling = _policy_of_its_own(plan, plan.scheduling)
            bind("scheduling", scheduling, context(plan, known, gpu))
            prefetching = build_prefetching(plan, known, cache)
            engines[gpu.owner] = Engine(
                substrate,
                cache,
                prefetching,
                plan.engine,
                scheduling,
                number=gpu.owner,
                gpu=gpu,
                mover=mover,
                watches=watches,
                schedule=plan.rules.scheduler(),
                steps_in_flight=plan.hardware.pipeline_parallel,
            )
    ordered, layout, samples = [engines[number] for number in sorted(engines)], plan.layout, plan.rules.samples or TOGETHER
    if layout.engines == 1:
        gate = build_gate(plan, requests, ordered, None, None)
        return kind(ordered, failures=plan.cluster.plan_failures(), samples=samples, gate=gate)
    gpus = {number: engine.gpu for number, engine in engines.items()}
    first = layout.prefill_engines or layout.engines
    hand_over = None
    if layout.prefill_engines:
        decoders = {number: gpu for number, gpu in gpus.items() if number >= first}
        router = _router(plan, plan.decode_routing, decoders, substrate, 1)
        hand_over = HandOver(router, ordered, is_layerwise=plan.engine.overlap == "layerwise")
    router = _router(plan, plan.routing, {number: gpu for number, gpu in gpus.items() if number < first}, substrate, 0)
    failures = plan.cluster.plan_failures()
    scaler = _scaler(plan, ordered, router) if plan.is_scaled else None
    gate = build_gate(plan, requests, ordered, router, hand_over)
    return kind(ordered, router, hand_over=hand_over, failures=failures, layout=layout, samples=samples, scaler=scaler, gate=gate)


def _scaler(plan: Plan, engines: Sequence[Engine], router: Router) -> Scaler:
    """Build what starts and stops the engines. Raises UsageError if the policy lacks an input."""
    policy = plan.autoscaling
    refuse_stop_iteration(policy)
    try:
        policy.bind(autoscaling_context(plan, len(engines)))
    except ValueError as error:
        raise UsageError(f"autoscaling: {type(policy).__name__} {error}") from error
    return Scaler(
        policy,
        engines,
        router,
        least=plan.cluster.min_engines,
        first=plan.cluster.first,
        start_s=plan.start_s,
        loses_all=any(tier.scope == "engine" for tier in plan.tiers[1:]),
    )


def _router(plan: Plan, policy: RoutingPolicy, gpus: Mapping[int, Tier], substrate: Substrate, place: int) -> Router:
    """Build the router before the engines that compute prompts (``place`` 0), or before those that only decode (1)."""
    env = substrate.env
    holders, changes = Holders(sorted(gpus), lambda: float(env.now)), Changes()
    known = known_engines(policy, gpus, lambda: float(env.now), holders, changes)
    numbers = [engine.engine for engine in known]
    capacities = [engine.capacity_pages for engine in known]
    rng = np.random.default_rng([plan.seed, len(ALWAYS) + place])
    refuse_stop_iteration(policy)
    policy.bind(
        RoutingContext(
            engines=numbers,
            capacities=capacities,
            page_tokens=plan.page_tokens,
            prefills=plan.layout.role(numbers[0]) != "decode",
            decodes=plan.layout.role(numbers[0]) != "prefill",
            holders=holders.of,
            leading=holders.leading,
            changes=changes.collect,
            prefill_s=context(plan, (), gpus[numbers[0]]).recompute_s,
            decode_step_s=plan.model.weight_bytes(1) / plan.hardware.effective_memory_bytes_per_s,
            rng=rng,
        )
    )
    return Router(policy, known)
