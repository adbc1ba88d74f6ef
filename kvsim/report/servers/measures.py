"""What is measured of a run that a client has seen, as servers and their clients count: hit rates, hit tokens by medium, times.

TTFT runs from sending a request to its first token, end-to-end latency to its last one. TPOT is (end - first token) / (output
tokens - 1). Cached tokens are the prompt tokens that the server did not compute.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvsim.results.observed import NOT_TOLD, ObservedRun

Mask = npt.NDArray[np.bool_]
TIMES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p95", "p99")
DEVICE, HOST, STORAGE = "device", "host", "storage"


class Counter(NamedTuple):
    """A counter of cached tokens, and the media that its label, or the counter itself, stands for."""

    name: str
    label: str
    media: Mapping[str, str]


COUNTERS: tuple[tuple[Counter, ...], ...] = (
    (
        Counter(
            "vllm:prompt_tokens_cached_by_source",
            "source",
            {"device": DEVICE, "host": HOST, "disk": STORAGE, "p2p": STORAGE, "external_unspecified": HOST},
        ),
    ),
    (Counter("sglang:cached_tokens", "cache_source", {"device": DEVICE, "host": HOST, "storage": STORAGE}),),
    (Counter("vllm:prompt_tokens_by_source", "source", {"local_cache_hit": DEVICE, "external_kv_transfer": HOST}),),
    (Counter("vllm:prefix_cache_hits", "", {"": DEVICE}), Counter("vllm:external_prefix_cache_hits", "", {"": HOST})),
)
"""Of each group, all counters are read, and the first group that a server has is used. vLLM's ``prefix_cache_hits`` come last:
they count a request that waits for room anew in each pass."""


PREEMPTIONS = ("vllm:num_preemptions", "sglang:num_retracted_requests")
"""Counters of how often requests had to give their memory back."""


def _counted(name: str) -> str:
    """Return the name of a counter without its labels, as its engine calls it."""
    return name.partition("{")[0].removesuffix("_total")


def preemptions(run: ObservedRun) -> int:
    """Return how often requests of a run were preempted, as the server says; a request can be more than once."""
    return int(sum(rise for name, rise in run.counters.items() if _counted(name) in PREEMPTIONS))


def succeeded(run: ObservedRun) -> Mask:
    """Return which requests succeeded."""
    return np.array([error is None for error in run.errors], dtype=bool)


def tells_hits(run: ObservedRun) -> bool:
    """Return whether it is known of requests what they found."""
    return bool((run.cached_tokens[succeeded(run)] != NOT_TOLD).any())


def hit_rate(run: ObservedRun, mask: Mask) -> float | None:
    """Return cached tokens per prompt token; None if the server does not say.

    Without cached tokens by request, the server's counters give the rate of the whole run.
    """
    if tells_hits(run):
        return _ratio(float(np.maximum(run.cached_tokens[mask], 0).sum()), float(run.prompt_tokens[mask].sum()))
    counted = tokens_by_medium(run, mask)
    return _ratio(sum(counted.values()), float(run.prompt_tokens[succeeded(run)].sum())) if counted else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def tokens_by_medium(run: ObservedRun, mask: Mask) -> dict[str, float]:
    """Return cached tokens by medium, of these requests or, if only the server's counters tell, of the whole run; empty if
    nothing does."""
    if run.tier_tokens:
        return {medium: float(np.maximum(tokens[mask], 0).sum()) for medium, tokens in run.tier_tokens.items()}
    for group in COUNTERS:
        found: dict[str, float] = {}
        for counter in group:
            for name, rise in run.counters.items():
                if medium := _medium(counter, name):
                    found[medium] = found.get(medium, 0.0) + rise
        if found:
            return found
    return {}


def _medium(counter: Counter, name: str) -> str:
    """Return the medium that a counter with its labels, such as ``vllm:prefix_cache_hits_total{engine="0"}``, is about."""
    if _counted(name) != counter.name:
        return ""
    found = re.search(rf'[{{,]{counter.label}="([^"]*)"', name) if counter.label else None
    return counter.media.get(found[1] if found else "", "")


def times_s(run: ObservedRun, name: str) -> npt.NDArray[np.float64]:
    """Return a time of each request, NaN where there is none: ``ttft``, ``tpot`` or ``e2e``."""
    if name == "ttft":
        return run.first_token_s - run.sent_s
    if name == "e2e":
        return run.end_s - run.sent_s
    tokens = np.where(run.output_tokens > 1, run.output_tokens - 1, 1)
    return np.where(run.output_tokens > 1, (run.end_s - run.first_token_s) / tokens, np.nan)


def statistic(values: npt.NDArray[np.float64], name: str) -> float | None:
    """Return the mean or a percentile of the values that are known; None if none is."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    return float(known.mean() if name == "mean" else np.percentile(known, float(name[1:])))


def throughput(run: ObservedRun, mask: Mask) -> dict[str, float | None]:
    """Return requests and output tokens per second, from the first request sent to the last end."""
    ended = mask & ~np.isnan(run.end_s)
    span_s = float(run.end_s[ended].max() - np.fmin.reduce(run.sent_s[ended])) if ended.any() else 0.0
    if not span_s > 0:
        return {"requests": None, "output_tokens": None}
    return {"requests": int(ended.sum()) / span_s, "output_tokens": float(run.output_tokens[ended].sum()) / span_s}
