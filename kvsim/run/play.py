"""From a plan to its outcome: assembles cache, policies and engine, and runs requests through them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvsim.bounds.limits import not_bounded
from kvsim.core.fan_out import TOGETHER
from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.requests import fixed, values_of
from kvsim.core.rules import CacheSetup
from kvsim.core.serving import Server
from kvsim.core.tier import PageWatch, Tier
from kvsim.engine.event_log import CacheLog, EventLog
from kvsim.engine.layout import ONE_ENGINE
from kvsim.engine.outcome import Outcome
from kvsim.engine.recorder import Recorder
from kvsim.errors import NoEffect, UsageError, WrongResult
from kvsim.plans.combinations import check_bypass
from kvsim.plans.plan import Plan, TierPlan
from kvsim.plans.policy_errors import policies_named
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.policies.eviction.base import BypassEviction
from kvsim.policies.eviction.belady import Belady
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.replaying.bypass import BypassTier
from kvsim.replaying.logged_server import LoggedServer
from kvsim.replaying.replay import Replay
from kvsim.replaying.samples import SampleServer
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from kvsim.run.apart import simulate_apart
from kvsim.run.assembly import (
    Graph,
    build_cache,
    build_cluster,
    build_graphs,
    build_prefetching,
    build_served,
    build_setup,
    build_tiers,
)
from kvsim.run.unchanged import recount, requests_unchanged

Advance = Callable[[int], None]
"""Called now and then with the number of finished requests."""
Clock = Callable[[], float]
"""Returns the time of a run, in seconds."""


@policies_named
@requests_unchanged
def replay(
    plan: Plan, requests: Sequence[Request], advance: Advance | None = None, inspect: Callable[[Any, str], None] | None = None
) -> Outcome:
    """Replay the requests one after another, without a clock.

    ``inspect`` is called with the server: with ``plan.print_steps`` after each step, with what has happened, and otherwise once,
    while the last requests are still unfinished. Slots are then numbered. Raises UsageError.
    """
    plan = with_known_answers(plan, requests)
    check_answers(plan, requests)
    check_bypass(plan, "replay")
    known = fixed(requests)
    graph = build_tiers(plan, known, SlotPool if inspect else Pool)
    log = EventLog(graph[0]) if plan.events else None
    played = open_replay(plan, graph, known, log)
    outcome = played.run(requests, advance, inspect, each_step=plan.print_steps)
    outcome.events = log
    recount(plan, [played.server], outcome)
    return outcome


def open_replay(plan: Plan, graph: Graph, requests: Sequence[Request], log: EventLog | None = None) -> Replay:
    """Return a replay over these tiers, which are empty, before its first request.

    ``requests`` are all that it will play, as far as they are known before; none for a stream. Raises UsageError.
    """
    server: Server | None = _bypass_tier(plan, graph[0], requests)
    if server is None:
        server = build_server(plan, build_setup(plan, graph, requests), requests, log)
    elif log:
        server = LoggedServer(server, log)
    return Replay(server, plan.replay)


@policies_named
@requests_unchanged
def simulate(
    plan: Plan, requests: Sequence[Request], advance: Advance | None = None, watching: Callable[[Clock], PageWatch] | None = None
) -> Outcome:
    """Serve the requests in simulated time or, with ``substrate=hardware``, on this machine. Raises UsageError.

    ``watching`` returns, given the run's clock, who is told of the pages that tiers store and drop.
    """
    check_bypass(plan, "simulate")
    plan = with_known_answers(plan, requests)
    check_answers(plan, requests)
    _check_requests(plan, requests, replace(plan.replay, hold_output=True))
    if plan.cluster.workers > 1:
        if watching:
            raise UsageError("cluster.workers: who is told of pages is told in one process: set cluster.workers=1")
        return simulate_apart(plan, fixed(requests), advance)
    choice = SUBSTRATES[plan.substrate]
    known = fixed(requests)
    graphs = build_graphs(plan, known, choice.pool)
    caches = [build_served(plan, graph, known) for graph in graphs]
    tiers = [tier for graph in graphs for tier in graph[0]]
    substrate = choice.open(plan, requests, caches)
    try:
        recorder = Recorder(substrate.env, tiers) if plan.timeline else None
        log = EventLog(tiers, lambda: float(substrate.env.now)) if plan.events else None
        for cache in caches:
            if log:
                cache.watch(CacheLog(log, cache.tiers))
            if recorder:
                cache.watch(recorder)
        if watching:
            watch = watching(lambda: float(substrate.env.now))
            for tier in tiers:
                tier.watches.append(watch)
        watches = [recorder] if recorder else []
        cluster = build_cluster(plan, known, caches, substrate, watches)
        if log and cluster.scaler is not None:
            cluster.scaler.log = log.add
        outcome = cluster.run(requests, advance)
        recount(plan, caches, outcome)
    finally:
        substrate.close()
    outcome.timeline, outcome.events = recorder, log
    return outcome


def check_verified(found: Mapping[str, Any]) -> None:
    """Raise WrongResult if a page or state reused on real hardware held anything other than what was computed.

    ``found`` are the findings of the run, empty for a simulation.
    """
    if found.get("wrong_words"):
        states = ""
        if found["verified_states"]:
            states = f" and {found['wrong_states']:,} of {found['verified_states']:,} reused states"
        raise WrongResult(
            f"{found['wrong_words']:,} words in {found['wrong_pages']:,} of {found['verified_pages']:,} reused pages{states} are "
            f"wrong: do not trust the run on {found['device']}"
        )


def has_samples(requests: Sequence[Request]) -> bool:
    """Whether a trace asks for several answers to a prompt."""
    return any(samples > 1 for samples in values_of(requests, "samples"))


def build_server(
    plan: Plan, setup: CacheSetup, requests: Sequence[Request], log: EventLog | None, *, is_observed: bool = False
) -> Server:
    """Build the cache of the engine whose rules apply or, by kvsim's own rules, serve from that of a simulation.

    ``is_observed``: for requests as a real engine admitted them.
    """
    if plan.rules.engine:
        _check_requests(plan, requests, plan.replay)
    try:
        server = plan.rules.observed(setup) if is_observed else plan.rules.server(setup)
    except ValueError as error:
        raise UsageError(f"rules: {error}") from error
    if server is not None:
        server = LoggedServer(server, log) if log else server
    else:
        cache = build_cache(plan, setup)
        if log:
            cache.watch(CacheLog(log, cache.tiers))
        server = CacheServer(cache, build_prefetching(plan, requests, cache))
    samples = plan.rules.samples
    if samples is None or samples.are_forked or not has_samples(requests):
        return server
    return SampleServer(server, samples)


def _check_requests(plan: Plan, requests: Sequence[Request], settings: ReplaySettings) -> None:
    """Raise UsageError if the rules cannot serve requests that take pages as these settings say."""
    try:
        pages = settings.pages_taken(requests, plan.page_tokens, plan.rules.samples or TOGETHER)
        capacities = {tier.name: tier.capacity_pages for tier in plan.tiers}
        plan.rules.check_requests(requests, pages, capacities, plan.page_tokens)
    except ValueError as error:
        raise UsageError(f"rules: {error}") from error


def upper_bound(plan: Plan, requests: Sequence[Request], belady: Belady | None = None) -> Outcome:
    """Replay Belady's MIN on one tier as large as all tiers of all engines together: no policies for them get more page hits.

    The bound holds for requests served in the order of the trace, because a hit page must have been in some tier since its last
    use, and this one tier holds as many pages as all of them. In it, moves are free, running requests occupy no pages, every
    engine has every page, and the future is known. Requests too large for the GPU tier of an engine are rejected. Passing a
    ``belady`` used before on the same requests saves looking ahead over them again.
    """
    gpu = plan.tiers[0]
    whole = TierPlan(name=gpu.name, capacity_pages=plan.total_pages, eviction=belady or Belady(), placement=None)
    settings = replace(plan.replay, in_flight=1)
    one = replace(plan, tiers=[whole], prefetch=NoPrefetch(), replay=settings, layout=ONE_ENGINE)
    server = _bypass_tier(one, build_tiers(one, requests)[0], requests, gpu.capacity_pages)
    assert server is not None
    return Replay(server, settings).run(requests)


def with_known_answers(plan: Plan, requests: Sequence[Request]) -> Plan:
    """Return the plan with answers that are cached or are not, by what the trace has if the rules leave that to it."""
    return plan if plan.rules.cache_output is not None else plan.with_answers(_has_answers(plan, requests))


def _has_answers(plan: Plan, requests: Sequence[Request]) -> bool:
    """Whether each answer, as far as it is known, can follow its prompt."""
    tokens = plan.page_tokens
    if any(answer is None for answer in values_of(requests, "output_runs")):
        return False
    lengths = zip(values_of(requests, "prompt_pages"), values_of(requests, "prompt_tokens"), strict=True)
    return all(pages * tokens <= prompt_tokens for pages, prompt_tokens in lengths)


def check_answers(plan: Plan, requests: Sequence[Request]) -> None:
    """Raise UsageError if the rules need output tokens that the trace lacks, or do not support what the trace contains."""
    rules = plan.rules
    if rules.engine:
        for what, is_there in (
            ("has persistent prompts", not rules.knows_persistent and any(values_of(requests, "persistent"))),
            ("resets the cache", not rules.knows_resets and any(values_of(requests, "resets"))),
            ("asks for several samples of an answer", rules.samples is None and has_samples(requests)),
            ("has images that no hit may end inside", not rules.knows_images and any(values_of(requests, "images"))),
        ):
            if is_there:
                raise UsageError(f"rules: the trace {what}, which an engine's own rules do not support: set rules=default")
        if not plan.rules.has_bigram_keys and any(values_of(requests, "bigram")):
            raise UsageError(
                "trace.bigram: only SGLang has keys of token pairs: set trace.bigram=false, rules=sglang or rules=default"
            )
    if plan.engine.lora.is_on and not any(values_of(requests, "adapter")):
        raise NoEffect(
            "engine.lora.max_loras", "on a trace without adapters", "set trace.adapters, or take a trace that names them"
        )
    if plan.layout.pairs and has_samples(requests):
        raise UsageError(
            "cluster.prefill: the trace asks for several samples of an answer, and only one can be handed to another engine: "
            "set cluster.engines instead"
        )
    if not plan.rules.cache_output:
        return
    if any(answer is None for answer in values_of(requests, "output_runs")):
        raise UsageError(
            "rules.cache_output: the trace does not contain output tokens: use one that does (tokens with output_token_ids, "
            "synthetic), set trace.answers=inferred (mooncake, weka, bailian) or unique (mooncake, bailian), or set "
            "rules.cache_output=false"
        )
    lengths = zip(values_of(requests, "prompt_pages"), values_of(requests, "prompt_tokens"), strict=True)
    if any(pages * plan.page_tokens > prompt_tokens for pages, prompt_tokens in lengths):
        raise UsageError("rules.cache_output: output cannot follow a prompt that ends with a partial page: set trace.tail=full")


def check_capacity(plan: Plan, requests: Sequence[Request]) -> None:
    """Raise UsageError if the GPU tier cannot hold even the smallest request, so every request would be rejected."""
    capacity = plan.tiers[0].capacity_pages
    if capacity is None:
        return
    smallest = min(values_of(requests, "prompt_tokens"))
    if capacity < smallest // plan.page_tokens:
        raise UsageError(
            f"tiers.gpu.capacity is {capacity} pages of {plan.page_tokens} tokens, but the smallest prompt has "
            f"{smallest} tokens: no request fits; increase the capacity"
        )


def _bypass_tier(
    plan: Plan, tiers: list[Tier], requests: Sequence[Request], largest_pages: int | None = None
) -> BypassTier | None:
    """Build the cache of a policy that may bypass the tier; None for other policies.

    Requests of more than ``largest_pages``, by default the tier's capacity, are rejected.
    """
    policy = tiers[0].eviction
    if not isinstance(policy, BypassEviction):
        return None
    if what := not_bounded(requests):
        raise UsageError(f"eviction: {type(policy).__name__} is not an exact bound for a trace that {what}")
    if plan.rules.cache_output and any(values_of(requests, "sample_output_runs")):
        raise UsageError(
            f"eviction: {type(policy).__name__} is not an exact bound where several answers to a prompt are cached: set "
            "rules.cache_output=false"
        )
    taken = plan.replay.pages_taken(requests, plan.page_tokens, plan.rules.samples or TOGETHER)
    largest = tiers[0].pool.capacity if largest_pages is None else largest_pages
    return BypassTier(tiers[0], policy, plan.rules, plan.page_tokens, requests, taken, largest)
