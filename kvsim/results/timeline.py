"""Hits, link use and free pages over the course of a run, in at most 200 bins: the data of the pictures."""

from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.results.engine_timeline import engine_series

BINS = 200
DIGITS = 6
"""Decimals kept: microseconds, and millionths of a rate."""


def timeline(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, skipped: int) -> dict[str, Any]:
    """Return hit rate by tier over the requests, utilization by link over the run's time, with several engines load and hit rate
    of each and, if a timeline was recorded, free pages by tier; all include the warm-up.

    ``prompts`` and ``hits`` are the prompt and hit tokens of each request, ``skipped`` the number of warm-up requests.
    """
    free = {"free_pages": _free_pages(outcome)} if outcome.timeline is not None else {}
    series = engine_series(outcome, prompts, hits)
    engines = {} if series is None else {"engines": series}
    return {"hits": _hits(outcome, prompts, hits, skipped), "links": _links(outcome), **engines, **free}


def _hits(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, skipped: int) -> dict[str, Any]:
    """Return hit rates in bins of equally many served requests, in order of arrival, or in trace order for runs without a clock.

    Bin i reaches from ``edges[i]`` to ``edges[i + 1]``, positions on ``axis``; ``counted_from`` is where the warm-up ends.
    For hybrid models, ``known_rate`` is the hit rate if every page with KV in some tier also had a saved state.
    """
    axis, position = _positions(outcome)
    order = np.flatnonzero(outcome.status == FINISHED)
    order = order[np.argsort(position[order], kind="stable")]
    bins = min(BINS, order.size)
    if not bins:
        return {"axis": axis, "edges": [], "counted_from": None, "prompt_tokens": [], "hit_rate": {}}
    cuts = np.linspace(0, order.size, bins + 1).astype(int)
    tokens = np.add.reduceat(prompts[order], cuts[:-1])
    reused = np.add.reduceat(hits[order], cuts[:-1], axis=0)
    rate = reused / np.maximum(tokens, 1)[:, None]
    known = {}
    if outcome.known_pages is not None:
        there = np.minimum(outcome.known_pages * outcome.page_tokens, prompts)
        known = {"known_rate": (np.add.reduceat(there[order], cuts[:-1]) / np.maximum(tokens, 1)).round(DIGITS)}
    return {
        **known,
        "axis": axis,
        "edges": position[order][np.minimum(cuts, order.size - 1)].round(DIGITS),
        "counted_from": position[skipped] if skipped else None,
        "prompt_tokens": tokens,
        "hit_rate": {tier: rate[:, column].round(DIGITS) for column, tier in enumerate(outcome.tier_names)},
    }


def _positions(outcome: Outcome) -> tuple[str, np.ndarray]:
    """Return the axis of the picture and the position of each request on it."""
    if np.isnan(outcome.e2e_s).all():
        return "request", np.arange(len(outcome.requests))
    return "arrival_s", outcome.arrival_s


def _links(outcome: Outcome) -> dict[str, Any]:
    """Return, for each bin of the run's time, the share in which a link had a transfer under way; of links of the same name, the
    mean."""
    if outcome.simulated_s <= 0:
        return {"edges_s": [], "utilization": {}}
    edges = np.linspace(0.0, outcome.simulated_s, BINS + 1)
    width_s = outcome.simulated_s / BINS
    utilization = {}
    for name, link in outcome.links.items():
        lanes = [lane for lane in outcome.link_lanes if lane.name == name] or [link]
        busy_s = np.sum([np.diff(_busy_s(lane, edges)) for lane in lanes], axis=0)
        utilization[name] = (busy_s / (width_s * len(lanes))).round(DIGITS)
    return {"edges_s": edges.round(DIGITS), "utilization": utilization}


def free_pages(outcome: Outcome) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return, for each kind of tier of limited capacity, the times in seconds at which its free pages change, and their numbers
    from then on, all tiers of the kind together; the first time is 0."""
    assert outcome.timeline is not None
    series = {}
    for name, tier in outcome.tiers.items():
        if tier.capacity_pages is not None:
            times_s, used, of_tier = [0.0], [0], dict[str, int]()
            for time_s, label, pages in outcome.timeline.usage:
                if label.split()[0] == name:
                    times_s.append(time_s)
                    used.append(used[-1] + pages - of_tier.get(label, 0))
                    of_tier[label] = pages
            series[name] = np.array(times_s), tier.capacity_pages - np.array(used)
    return series


def _free_pages(outcome: Outcome) -> dict[str, Any]:
    """Return the mean number of free pages of each kind of tier in each bin of the run's time."""
    if outcome.simulated_s <= 0:
        return {"edges_s": [], "mean": {}}
    edges = np.linspace(0.0, outcome.simulated_s, BINS + 1)
    mean = {}
    for name, (times_s, pages) in free_pages(outcome).items():
        ends_s = np.append(times_s[1:], max(outcome.simulated_s, times_s[-1]))
        sums = np.append(0.0, np.cumsum(pages * (ends_s - times_s)))
        so_far = np.interp(edges, np.append(times_s, ends_s[-1]), sums)
        mean[name] = (np.diff(so_far) / (outcome.simulated_s / BINS)).round(2)
    return {"edges_s": edges.round(DIGITS), "mean": mean}


def _busy_s(link: LinkUse, at: np.ndarray) -> np.ndarray:
    """Return, for each time in ``at``, the seconds before it with at least one transfer under way."""
    if not len(link.intervals):
        return np.zeros(len(at))
    start, end = link.intervals[:, 0], np.maximum.accumulate(link.intervals[:, 1])
    start = np.minimum(np.maximum(start, np.concatenate(([start[0]], end[:-1]))), end)
    busy = np.cumsum(end - start)
    times = np.column_stack((start, end)).ravel()
    busy_s: np.ndarray = np.interp(at, times, np.column_stack((busy - (end - start), busy)).ravel())
    return busy_s


def middles(edges: list[float]) -> list[float]:
    """Return the middle of each bin."""
    return [(left + right) / 2 for left, right in pairwise(edges)]
