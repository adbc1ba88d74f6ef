"""The outcome of a run over a cluster: sums over its tiers and links, and the share of each engine."""

from kvsim.core.pool import UNLIMITED
from kvsim.engine.book import Book
from kvsim.engine.engine import Engine
from kvsim.engine.layout import Layout
from kvsim.engine.link_use import joined
from kvsim.engine.outcome import FINISHED, Disagreement, EngineUse, Outcome, describe_caches, summed
from kvsim.engine.scaling import Scaling


def outcome_of(
    book: Book, engines: list[Engine], layout: Layout, ended_s: float, wall_s: float, scaling: Scaling | None = None
) -> Outcome:
    """Return the outcome of a run that ended at ``ended_s`` and took ``wall_s``; ``scaling`` has the engines over time."""
    caches = list(dict.fromkeys([engine.cache for engine in engines]))
    substrate, requests = engines[0].substrate, book.requests
    lanes = substrate.link_use()
    columns = book.close([tier for cache in caches for tier in cache.tiers])
    outcome = Outcome(
        requests=requests,
        page_tokens=engines[0].cache.page_tokens,
        columns=columns,
        links=joined(lanes),
        link_lanes=lanes,
        engines=[engine_use(engine, layout) for engine in engines] if len(engines) > 1 else [],
        outages={engine.number: engine.outages for engine in engines if engine.outages},
        prefetch=summed([engine.prefetching.result() for engine in engines]),
        engines_busy_s=[engine.busy_s for engine in engines],
        engines_exchange_s=[engine.exchange_s for engine in engines],
        engines_stages_s=[engine.stages_s for engine in engines],
        engines_claiming_s=[engine.schedule.claiming_s for engine in engines],
        retractions=sum([engine.schedule.retractions for engine in engines]),
        drafts=summed([engine.schedule.drafts for engine in engines]),
        adapter_use=summed([engine.schedule.adapter_use for engine in engines]),
        tool_calls=summed([engine.calls.result() if engine.calls is not None else {} for engine in engines]),
        lost_to_disagreement=disagreement(engines),
        scaling=scaling,
        simulated_s=ended_s,
        wall_s=wall_s,
        hardware=substrate.findings(),
        **describe_caches(caches, requests, columns["hit_pages"]),
    )
    if outcome.known_pages is not None:
        outcome.known_pages[outcome.status != FINISHED] = 0
    return outcome


def disagreement(engines: list[Engine]) -> Disagreement:
    """Return what ranks have lost to disagreement, all engines together."""
    total = Disagreement()
    for mover in dict.fromkeys([engine.mover for engine in engines]):
        total.pages += mover.lost_to_disagreement.pages
        total.transfers += mover.lost_to_disagreement.transfers
    return total


def engine_use(engine: Engine, layout: Layout) -> EngineUse:
    """Return what one engine has done."""
    number, gpu, pool = engine.number, engine.gpu, engine.gpu.pool
    return EngineUse(
        engine=number,
        host=layout.hosts[number],
        role=layout.role(number),
        capacity_pages=None if pool.capacity >= UNLIMITED else pool.capacity,
        peak_pages=pool.peak_pages,
        evicted_pages=gpu.evicted_pages,
        inserted_pages=gpu.inserted_pages,
        busy_s=engine.busy_s,
        waited_s=engine.waiting.waited_s,
        most_queued=engine.waiting.most_queued,
        retractions=engine.schedule.retractions,
        failures=len(engine.outages),
    )
