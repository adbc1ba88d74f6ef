"""Statistics of a trace: prompt lengths, the hits of an unlimited cache, and when and how often pages are reused."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvsim.bounds.lru_curve import LruCurve
from kvsim.bounds.reuse import FirstUses, Uses, previous_uses
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
"""Known values of the same statistics for two real traces, in pages of 512 tokens (with partial tails) and 64 tokens.

Sources: Qin et al., FAST 2025, and the traces released with it; C. Fox, kv-cache-tester.
"""


def trace_statistics(trace: Trace) -> dict[str, float]:
    """Return the statistics of a trace by name.

    ``hit_rate`` and ``page_hit_rate`` are those of an unlimited cache that serves the requests one after another: the share of
    prompt tokens, and of pages, in prefixes shared with an earlier prompt. A reused partial page counts only the tokens it has.
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


QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
LRU_SHARES = (0.5, 0.8, 0.9, 0.95)
USERS = ((1, 1), (2, 2), (3, 4), (5, 9), (10, 99), (100, None))
"""Classes of pages by the number of requests that use them, as inclusive ranges."""
WINDOWS_S = (60.0, 600.0, 3_600.0, 86_400.0)
TOP_PREFIXES = 5


class UserClass(NamedTuple):
    """Pages used by at least ``fewest`` and at most ``most`` requests (None: no upper limit)."""

    fewest: int
    most: int | None
    unique_pages: int
    pages: int
    """These pages, counted once per use."""


class Prefix(NamedTuple):
    """A prefix that ``requests`` prompts share, up to where they diverge."""

    pages: int
    requests: int
    reused_pages: int
    """Reuses of pages in its last part, which fewer requests share than the pages before it; no page counts for two prefixes."""


class WorkingSet(NamedTuple):
    """Unique pages used per time window, over consecutive windows from the first arrival on."""

    window_s: float
    mean_pages: float
    most_pages: int


class ReuseStatistics(NamedTuple):
    """When and how often pages are reused."""

    reused_pages: int
    reuse_distance: dict[float, int]
    """Number of pages that LRU must hold to hit a reused page, by quantile over all reused pages."""
    lru_pages: dict[float, int]
    """Capacity at which LRU reaches a share of the hit tokens of an unlimited cache, by that share."""
    requests_that_share: int
    """Requests whose prompt starts with a page of an earlier request."""
    shared_tokens: int
    """Prompt tokens in prefixes shared with an earlier request."""
    users: list[UserClass]
    prefixes: list[Prefix]
    """The prefixes with the most reused pages, in descending order."""
    working_sets: list[WorkingSet]
    """Working sets for windows shorter than the trace."""


def reuse_statistics(trace: Trace) -> ReuseStatistics:
    """Return how the pages of a trace are reused; each use after the first is a reuse. The cost grows with extents, not pages."""
    requests = trace.requests
    uses, first = previous_uses([request.runs for request in requests])
    curve = LruCurve(requests, trace.page_tokens, recompute_last_token=False)
    return ReuseStatistics(
        reused_pages=curve.prompt_pages - curve.unique_pages,
        reuse_distance={share: curve.reuse_distance(share) for share in QUANTILES},
        lru_pages={share: curve.capacity_for(share) for share in LRU_SHARES},
        requests_that_share=len(np.unique(uses.request)),
        shared_tokens=int(curve.hit_tokens(curve.unique_pages)),
        users=_user_classes(requests),
        prefixes=_top_prefixes(requests, first),
        working_sets=_working_sets(requests, uses, first),
    )


def uses_by_page(requests: Sequence[Request], cuts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how many requests use each page: starts and ends (exclusive) of stretches of page ids, and the count of each.

    A new stretch begins where an extent begins or ends, so the count is constant within it, and at each of ``cuts``.
    """
    extents = np.array([extent for request in requests for extent in request.runs], dtype=np.int64).reshape(-1, 2)
    ends = extents[:, 0] + extents[:, 1]
    edges, place = np.unique(np.concatenate((extents[:, 0], ends, np.asarray(cuts, dtype=np.int64))), return_inverse=True)
    change = np.bincount(place[: len(extents)], minlength=len(edges)) - np.bincount(
        place[len(extents) : 2 * len(extents)], minlength=len(edges)
    )
    uses = np.cumsum(change)[:-1]
    used = uses > 0
    return edges[:-1][used], edges[1:][used], uses[used]


def _user_classes(requests: Sequence[Request]) -> list[UserClass]:
    starts, stops, uses = uses_by_page(requests)
    classes = []
    for fewest, most in USERS:
        inside = (uses >= fewest) & ((uses <= most) if most else True)
        pages = (stops - starts)[inside]
        classes.append(UserClass(fewest, most, int(pages.sum()), int((pages * uses[inside]).sum())))
    return classes


def _top_prefixes(requests: Sequence[Request], first: FirstUses) -> list[Prefix]:
    """Return the prefixes with the most reuses. A stretch within one extent of first uses is on one path, at a known depth."""
    starts, stops, uses = uses_by_page(requests, first.start.tolist())
    order = np.argsort(first.start)
    extent = order[np.searchsorted(first.start[order], starts, side="right") - 1]
    ends = first.depth[extent] + stops - first.start[extent]
    reused = (uses - 1) * (stops - starts)
    best = np.lexsort((ends, -reused))[:TOP_PREFIXES]
    return [Prefix(int(ends[i]), int(uses[i]), int(reused[i])) for i in best if reused[i]]


def _working_sets(requests: Sequence[Request], uses: Uses, first: FirstUses) -> list[WorkingSet]:
    """Return the working sets. A use adds a page to its window's set unless the page's previous use is in the same window."""
    begin = requests[0].arrival_s
    arrival = np.array([request.arrival_s - begin for request in requests])
    sets = []
    for window_s in WINDOWS_S:
        if window_s >= arrival[-1]:
            break
        window = (arrival // window_s).astype(np.int64)
        again = window[uses.request] != window[uses.other]
        known, place = np.unique(window, return_inverse=True)  # windows without requests can be many more
        pages = np.bincount(place[first.request], weights=first.pages, minlength=len(known))
        pages += np.bincount(place[uses.request[again]], weights=(uses.end - uses.begin)[again], minlength=len(known))
        sets.append(WorkingSet(window_s, float(pages.sum() / (window[-1] + 1)), int(pages.max())))
    return sets


def unlimited_hit_pages(requests: Iterable[Request]) -> list[int]:
    """Return the number of pages of each prompt that an earlier request has, extent by extent."""
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
    """A set of page ids, stored as sorted, non-adjacent stretches of consecutive ids."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def copy(self) -> "Stretches":
        """Return a set of the same ids."""
        other = Stretches()
        other._starts, other._stops = self._starts.copy(), self._stops.copy()
        return other

    def known(self, start: int, pages: int) -> int:
        """Return how many of the ids ``start ... start + pages - 1``, counted from the start, are in the set without a gap."""
        i = bisect_right(self._starts, start) - 1
        return min(max(self._stops[i] - start, 0), pages) if i >= 0 else 0

    def add(self, start: int, pages: int) -> None:
        """Add ids, none of which may be in the set yet."""
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
