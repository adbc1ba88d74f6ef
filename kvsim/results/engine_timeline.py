"""Load and hit rate of each engine of several over the course of a run: the data of the pictures."""

from typing import Any

import numpy as np

from kvsim.engine.outcome import FINISHED, Outcome

BINS = 200
MOST_VALUES = 12_800
"""Most values in one series of all engines: with more than 64 engines, bins are longer."""
REQUESTS_PER_BIN = 8
"""Requests of an engine in one bin of its hit rate, on average and at least."""


def engine_series(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray) -> dict[str, Any] | None:
    """Return, by engine, the mean number of requests there and the hit rate, in equal spans of time; None for a single engine.

    A request is with the engine that computes its prompt from its arrival to its first token, whether it waits or runs, and
    with the one that decodes its answer from then on. Hits belong to the time of arrival; a span without arrivals has None.
    The warm-up is included.
    """
    if not outcome.engines:
        return None
    served = np.flatnonzero((outcome.status == FINISHED) & ~np.isnan(outcome.e2e_s))
    return {"load": _load(outcome, served), "hits": _hits(outcome, prompts, hits, served)}


def _load(outcome: Outcome, served: np.ndarray) -> dict[str, Any]:
    if outcome.simulated_s <= 0:
        return {"edges_s": [], "requests": {}}
    bins = max(1, min(BINS, MOST_VALUES // len(outcome.engines)))
    edges = np.linspace(0.0, outcome.simulated_s, bins + 1)
    arrival_s, computer, decoder = outcome.arrival_s[served], outcome.engine[served], outcome.decoder[served]
    first_s, end_s = arrival_s + outcome.ttft_s[served], arrival_s + outcome.e2e_s[served]
    requests = {}
    for use in outcome.engines:
        computed, decoded = computer == use.engine, decoder == use.engine
        starts_s = np.concatenate((arrival_s[computed], first_s[decoded]))
        ends_s = np.concatenate((first_s[computed], end_s[decoded]))
        so_far = _seconds_since(starts_s, edges) - _seconds_since(ends_s, edges)
        requests[str(use.engine)] = (np.diff(so_far) * (bins / outcome.simulated_s)).round(2)
    return {"edges_s": edges.round(6), "requests": requests}


def _seconds_since(times_s: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return, for each time in ``at``, the seconds since each of ``times_s`` that lies before it, summed."""
    times_s = np.sort(times_s)
    sums = np.append(0.0, np.cumsum(times_s))
    before = np.searchsorted(times_s, at)
    seconds: np.ndarray = before * at - sums[before]
    return seconds


def _hits(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, served: np.ndarray) -> dict[str, Any]:
    computers = [use.engine for use in outcome.engines if use.role != "decode"]
    arrival_s = outcome.arrival_s[served]
    if not served.size or arrival_s.max() <= 0:
        return {"edges_s": [], "prompt_tokens": {}, "hit_rate": {}}
    bins = max(1, min(BINS, MOST_VALUES // len(computers), served.size // (REQUESTS_PER_BIN * len(computers))))
    edges = np.linspace(0.0, arrival_s.max(), bins + 1)
    bin_of = np.minimum(np.searchsorted(edges, arrival_s, side="right") - 1, bins - 1)
    tokens, rates = {}, {}
    for number in computers:
        own = outcome.engine[served] == number
        total = np.bincount(bin_of[own], prompts[served][own], bins)
        reused = np.bincount(bin_of[own], hits[served][own].sum(axis=1), bins)
        tokens[str(number)] = total.astype(np.int64)
        rates[str(number)] = np.where(total > 0, reused / np.maximum(total, 1), np.nan).round(4)
    return {"edges_s": edges.round(6), "prompt_tokens": tokens, "hit_rate": rates}
