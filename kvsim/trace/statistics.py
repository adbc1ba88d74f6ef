"""What a trace is like: how long its prompts are, and how much of them an unlimited cache would reuse."""

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from kvsim.core.request import Request
from kvsim.trace.base import Trace

PUBLISHED: dict[str, dict[str, float]] = {
    "Mooncake conversation": {
        "requests": 12_031,
        "duration_s": 3_537,
        "prompt_tokens_mean": 12_035,
        "output_tokens_mean": 343,
        "pages": 288_500,
        "unique_pages": 182_790,
        "page_hit_rate": 0.366412,
        "hit_rate": 0.373624,
    },
    "WEKA Claude Code": {
        "requests": 49_334,
        "sessions": 710,
        "pages": 94_300_000,
        "unique_pages": 3_450_000,
        "page_hit_rate": 0.963409,
        "runs_per_request": 3.3,
    },
}
"""The same numbers, as far as they are known, of two real traces in pages of 512 (with partial tails) and 64 tokens.

Sources: Qin et al., FAST 2025, and the traces released with it; C. Fox, kv-cache-tester.
"""


def trace_statistics(trace: Trace) -> dict[str, float]:
    """The trace in numbers.

    ``hit_rate`` and ``page_hit_rate`` are those of an unlimited cache that sees the requests one after another: the share of
    prompt tokens, and of pages, that an earlier prompt began with. A reused partial page counts its own tokens.
    """
    requests = trace.requests
    hits = unlimited_hit_pages(requests)
    pages = sum(request.prompt_pages for request in requests)
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    hit_tokens = sum(min(hit * trace.page_tokens, request.prompt_tokens) for hit, request in zip(hits, requests, strict=True))
    return {
        "requests": len(requests),
        "sessions": len({request.session for request in requests} - {-1}),
        "duration_s": requests[-1].arrival_s - requests[0].arrival_s,
        **_spread("prompt_tokens", [request.prompt_tokens for request in requests]),
        **_spread("output_tokens", [request.output_tokens for request in requests]),
        "pages": pages,
        "unique_pages": pages - sum(hits),
        "page_hit_rate": sum(hits) / pages if pages else 0.0,
        "hit_rate": hit_tokens / prompt_tokens,
        "runs_per_request": sum(len(request.runs) for request in requests) / len(requests),
    }


def unlimited_hit_pages(requests: Iterable[Request]) -> list[int]:
    """Pages of each prompt that a request before it has, run by run."""
    seen = Stretches()
    hits = []
    for request in requests:
        hit = 0
        for start, pages in request.runs:
            known = seen.known(start, pages)
            hit += known
            if known < pages:
                seen.add(start + known, pages - known)
        hits.append(hit)
    return hits


class Stretches:
    """A set of page ids, kept as sorted stretches of consecutive ones that do not touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def known(self, start: int, pages: int) -> int:
        """How many of the ids ``start ... start + pages - 1`` are in the set before the first that is not."""
        i = bisect_right(self._starts, start) - 1
        return min(max(self._stops[i] - start, 0), pages) if i >= 0 else 0

    def add(self, start: int, pages: int) -> None:
        """Add ids none of which is in the set."""
        i = bisect_right(self._starts, start)
        if i and self._stops[i - 1] == start:
            i -= 1
            self._stops[i] = start + pages
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, start + pages)
        if i + 1 < len(self._starts) and self._starts[i + 1] == start + pages:
            self._stops[i] = self._stops.pop(i + 1)
            del self._starts[i + 1]


def _spread(name: str, values: list[int]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99))
    return {f"{name}_mean": float(np.mean(values)), f"{name}_p50": float(p50), f"{name}_p99": float(p99)}
