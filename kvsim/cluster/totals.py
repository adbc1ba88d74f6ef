"""The outcome of a run over a cluster: sums over its tiers and links, and the share of each engine."""

import numpy as np

from kvsim.core.pool import UNLIMITED
from kvsim.engine.book import Book
from kvsim.engine.engine import Engine
from kvsim.engine.layout import Layout
from kvsim.engine.link_use import joined
from kvsim.engine.outcome import REJECTED, Disagreement, EngineUse, Outcome, describe_caches, summed


def outcome_of(book: Book, engines: list[Engine], layout: Layout, ended_s: float, wall_s: float) -> Outcome:
    """Return the outcome of a run that ended at ``ended_s`` and took ``wall_s``."""
    caches = list(dict.fromkeys([engine.cache for engine in engines]))
    substrate, requests = engines[0].substrate, book.requests
    lanes = substrate.link_use()
    hit_pages = np.array(book.hits, dtype=np.int64).reshape(-1, 3)
    outcome = Outcome(
        requests=requests,
        page_tokens=engines[0].cache.page_tokens,
        status=np.array(book.status, dtype=np.int8),
        hit_pages=hit_pages,
        arrival_s=np.array(book.arrival_s),
        ttft_s=np.array(book.ttft_s),
        tpot_s=np.array(book.tpot_s),
        e2e_s=np.array(book.e2e_s),
        phases_s=phases_s(book),
        load_s=book.read_times.seconds(len(requests)),
        links=joined(lanes),
        link_lanes=lanes,
        engine=np.array(book.engines, dtype=np.int64),
        decoder=np.array(book.decoders, dtype=np.int64),
        engines=[engine_use(engine, layout) for engine in engines] if len(engines) > 1 else [],
        outages={engine.number: engine.outages for engine in engines if engine.outages},
        prefetch=summed([engine.prefetching.result() for engine in engines]),
        retractions=sum([engine.running.retractions for engine in engines]),
        request_retractions=np.array(book.retractions, dtype=np.int64),
        lost_to_disagreement=disagreement(engines),
        simulated_s=ended_s,
        wall_s=wall_s,
        hardware=substrate.findings(),
        **describe_caches(caches, requests, hit_pages),
    )
    forget_rejected(outcome)
    return outcome


def forget_rejected(outcome: Outcome) -> None:
    """Remove what is known of requests that had begun before they were rejected, since persistent prompts left them no room."""
    rejected = outcome.status == REJECTED
    for times in (outcome.ttft_s, outcome.tpot_s, outcome.e2e_s, outcome.phases_s):
        if times is not None:
            times[rejected] = np.nan
    for numbers, nothing in ((outcome.engine, -1), (outcome.decoder, -1), (outcome.load_s, 0), (outcome.known_pages, 0)):
        if numbers is not None:
            numbers[rejected] = nothing


def phases_s(book: Book) -> np.ndarray:
    """Return the parts of each request's time to first token, columns as in ``PHASES``; nan if it has no first token."""
    ttft_s = np.array(book.ttft_s)
    known = np.column_stack((book.queue_s, book.load_s)).reshape(-1, 2)
    known[np.isnan(ttft_s)] = np.nan
    return np.column_stack((known, np.maximum(0.0, ttft_s - known.sum(axis=1))))


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
        retractions=engine.running.retractions,
        failures=len(engine.outages),
    )
