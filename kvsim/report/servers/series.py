"""What the pictures of a validation against a server are drawn from, request by request and over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.report.servers.measures import Mask, tells_hits, times_s
from kvsim.report.servers.scores import Compared
from kvsim.results.observed import NOT_TOLD, ObservedRun

BINS = 60
"""Stretches of time of the picture of hit rates."""


def series(runs: Compared) -> dict[str, Any]:
    """Return cached tokens and times to first token by request, and hit rates over time: the rest of ``validate.json``."""
    mask = runs.counted(*runs.real, *runs.simulated)
    return {
        "requests_ttft_s": [_typical([times_s(run, "ttft") for run in some], mask) for some in (runs.simulated, runs.real)],
        "requests_cached": _cached(runs, mask),
        "hits_over_time": over_time(runs, mask),
    }


def _typical(times: Sequence[np.ndarray], mask: Mask) -> np.ndarray:
    """Return the median of each request's times over the runs."""
    typical: np.ndarray = np.median(np.stack(times)[:, mask], axis=0)
    return typical


def _cached(runs: Compared, mask: Mask) -> dict[str, Any] | None:
    """Return the cached tokens of each request: in the first real run, in its order, and in the first simulation."""
    if not runs.given:
        return None
    both = mask & (runs.real[0].cached_tokens != NOT_TOLD)
    of = {"real": runs.real[0], "given_order": runs.given[0], "simulated": runs.simulated[0]}
    return {"request": np.flatnonzero(both)} | {name: run.cached_tokens[both] for name, run in of.items()}


def over_time(runs: Compared, mask: Mask) -> dict[str, Any] | None:
    """Return hit rates of real runs and simulations, by the time at which requests were sent; None without hits by request."""
    if not all(map(tells_hits, runs.real)) or not mask.any():
        return None
    ends = [float(np.fmax.reduce(run.sent_s[mask], initial=0.0)) for run in (*runs.real, *runs.simulated)]
    edges_s = np.linspace(0.0, max(*ends, 1e-9), BINS + 1)
    rates = {name: _rates(some, mask, edges_s) for name, some in (("real", runs.real), ("simulated", runs.simulated))}
    return {"edges_s": edges_s} | rates


def _rates(some: Sequence[ObservedRun], mask: Mask, edges_s: np.ndarray) -> np.ndarray:
    """Return the hit rate of some runs together in each stretch of time; NaN where no request was sent."""
    cached, prompts = np.zeros(len(edges_s) - 1), np.zeros(len(edges_s) - 1)
    for run in some:
        sent = mask & ~np.isnan(run.sent_s)
        at_s = run.sent_s[sent]
        cached += np.histogram(at_s, edges_s, weights=np.maximum(run.cached_tokens[sent], 0))[0]
        prompts += np.histogram(at_s, edges_s, weights=run.prompt_tokens[sent])[0]
    return np.divide(cached, prompts, out=np.full_like(cached, np.nan), where=prompts > 0)
