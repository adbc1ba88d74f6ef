"""Plays what the study compares: the paper's algorithms at its capacities, and kvsim's policies."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from conversation_cache import Rule, Turn, uncached_tokens
from drawn_conversations import Conversations, as_trace
from published_tails import CAPACITIES, PERCENTILES, SHAREGPT, SLO_MS, THRESHOLDS_MS, WILDCHAT

import kvsim
from kvsim.report.study import with_conversations
from kvsim.trace.base import Trace

MS_PER_TOKEN = 0.1
"""TTFT per computed token. The authors' documentation for vLLM speaks of about 20 tokens per ms; with that, LRU's printed
percentiles would need texts twice as long."""
KINDS = {
    WILDCHAT: Conversations(
        turns=2.5, prompt_tokens=200, prompt_spread=1.3, answer_tokens=400, answer_spread=0.7, pause=10.0, pause_spread=2.0,
        next_prompt=200,
    ),
    SHAREGPT: Conversations(
        turns=3.5, turns_spread=0.9, prompt_tokens=100, prompt_spread=1.0, answer_tokens=1_500, answer_spread=0.7, pause=1 / 3,
        next_prompt=100,
    ),
}  # fmt: skip
LEAST_HISTORY = 1_024
"""Tokens from which threshold LRU caches a conversation."""
TENFOLD, CHATS = "ten times WildChat", "Mooncake"
TENFOLD_CAPACITIES = (40_000, 60_000, 80_000, 100_000)
TENFOLD_MS = (100, 150, 200)
PAGE_TOKENS = 16
CHAT_PAGE_TOKENS = 512
CHAT_PAGES = (1_000, 2_000, 4_000, 10_000, 20_000)
CHAT_MS = (500, 1_000, 2_000, 4_000)
CHAT_SLO_MS = 2_000
CHAT_NEXT_PROMPT = 1_800
"""What a later prompt of a conversation adds to the one before, on average."""
LRU, THRESHOLD_LRU = "lru", "threshold lru"


@dataclass(frozen=True)
class Tail:
    """Times to first token in ms, the share of requests above the SLO, and the mean of what exceeds the policy's threshold."""

    p50: float
    p90: float
    p95: float
    p99: float
    violations: float
    excess: float


Row = dict[tuple[int, str], Tail]
"""By capacity and policy."""


def t_lru(threshold_ms: int) -> str:
    return f"t-lru {threshold_ms} ms"


def optimum(threshold_ms: int) -> str:
    return f"tail-optimized belady {threshold_ms} ms"


def by_kvsim(name: str) -> str:
    return f"kvsim {name}"


def of_paper(turns: Sequence[Turn], part: str) -> Row:
    """The paper's algorithms at its capacities and thresholds."""
    found: Row = {}
    for capacity in CAPACITIES:
        uncached = uncached_tokens(turns, capacity, Rule())
        found[capacity, LRU] = tail(uncached, SLO_MS, 0)
        found[capacity, THRESHOLD_LRU] = tail(uncached_tokens(turns, capacity, Rule(least_history=LEAST_HISTORY)), SLO_MS, 0)
        for ms in THRESHOLDS_MS[part]:
            rule = Rule(threshold=ms / MS_PER_TOKEN, next_prompt=KINDS[part].next_prompt)
            future = Rule(threshold=ms / MS_PER_TOKEN, knows_future=True)
            found[capacity, t_lru(ms)] = tail(uncached_tokens(turns, capacity, rule), SLO_MS, ms)
            found[capacity, optimum(ms)] = tail(uncached_tokens(turns, capacity, future), SLO_MS, ms)
            found[capacity, f"{LRU} {ms} ms"] = tail(uncached, SLO_MS, ms)
    return found


def of_ten_times(turns: Sequence[Turn]) -> Row:
    """kvsim's policies and the paper's algorithms on the same turns."""
    trace, found = as_trace(turns, PAGE_TOKENS), {}
    for capacity in TENFOLD_CAPACITIES:
        for ms in (None, *TENFOLD_MS):
            threshold, name = (None, LRU) if ms is None else (ms / MS_PER_TOKEN, t_lru(ms))
            rule = Rule(threshold=threshold, next_prompt=KINDS[WILDCHAT].next_prompt)
            found[capacity, name] = tail(uncached_tokens(turns, capacity, rule), SLO_MS, ms or 0)
            settings = (*eviction(ms, KINDS[WILDCHAT].next_prompt), "rules.cache_output=true")
            found[capacity, by_kvsim(name)] = tail(replayed(trace, capacity // PAGE_TOKENS, settings), SLO_MS, ms or 0)
    return found


def of_mooncake(trace: Trace) -> Row:
    found = {}
    for pages in CHAT_PAGES:
        for ms in (None, *CHAT_MS):
            uncached = replayed(trace, pages, eviction(ms, CHAT_NEXT_PROMPT))
            found[pages * CHAT_PAGE_TOKENS, LRU if ms is None else t_lru(ms)] = tail(uncached, CHAT_SLO_MS, ms or 0)
    return found


@cache
def load(path: str, limit: int | None) -> Trace:
    return with_conversations(kvsim.load_trace("mooncake", path=path, page_tokens=CHAT_PAGE_TOKENS, limit=limit))


def eviction(threshold_ms: int | None, next_prompt: int) -> tuple[str, ...]:
    if threshold_ms is None:
        return ("eviction=lru",)
    threshold = round(threshold_ms / MS_PER_TOKEN)
    return "eviction=tail_latency", f"eviction.threshold={threshold}", f"eviction.next_prompt_estimate={next_prompt}"


def replayed(trace: Trace, pages: int, settings: Sequence[str]) -> list[int]:
    """The tokens that each request computed in a replay; all of its prompt if it does not fit."""
    outcome = kvsim.replay(trace, *settings, f"tiers.gpu.capacity={pages}pages", seed=1).outcome
    hits = (np.asarray(outcome.hit_pages)[:, 0] * trace.page_tokens).tolist()
    return [max(request.prompt_tokens - hit, 0) for request, hit in zip(trace.requests, hits, strict=True)]


def tail(uncached: Sequence[int], slo_ms: float, threshold_ms: float) -> Tail:
    times = MS_PER_TOKEN * np.array(uncached, dtype=float)
    percentiles = (float(value) for value in np.percentile(times, PERCENTILES))
    return Tail(*percentiles, float((times > slo_ms).mean()), float(np.maximum(times - threshold_ms, 0).mean()))
