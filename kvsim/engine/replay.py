"""Replay: requests one after another, without a clock. For hit rates, at full speed."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from kvsim.core.cache import Lease, TieredCache
from kvsim.core.request import Request
from kvsim.core.single import SingleTier
from kvsim.core.transfer import Transfer
from kvsim.engine.collector import without_garbage_collector
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome, describe_cache
from kvsim.engine.prefetching import Prefetching

ADVANCE_EVERY = 512
Hits = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How requests overlap where nothing has a duration."""

    in_flight: int = 1
    """Requests that are unfinished at a time: the oldest finishes when one more arrives, or earlier if room is needed."""
    hold_output: bool = True
    """The answer's pages take room until the request finishes."""

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, not {self.in_flight}")


class Replay:
    """Plays requests against a cache; transfers take no time."""

    def __init__(self, cache: TieredCache, prefetching: Prefetching, settings: ReplaySettings) -> None:
        self.cache = cache
        self.prefetching = prefetching
        self.in_flight = settings.in_flight
        self.hold_output = settings.hold_output
        self.live: deque[Any] = deque()
        self._single = SingleTier(cache) if len(cache.tiers) == 1 else None
        self._finish = self._single.finish_request if self._single else cache.finish_request

    def run(self, requests: list[Request], advance: Callable[[int], None] | None = None) -> Outcome:
        """Play all requests in order; ``advance`` is told every so often how many have been played."""
        began = perf_counter()
        rows: list[Hits | None] = []
        serve = self.serve if self._single is None else self._serve_single
        with without_garbage_collector():
            for start in range(0, len(requests), ADVANCE_EVERY):
                rows += map(serve, requests[start : start + ADVANCE_EVERY])
                if advance:
                    advance(len(rows))
            while self.live:
                self._finish(self.live.popleft())
        return self._outcome(requests, rows, perf_counter() - began)

    def serve(self, request: Request) -> Hits | None:
        """Play one request. Returns its hit pages by tier; None if it can never fit."""
        cache, live = self.cache, self.live
        while len(live) >= self.in_flight:
            cache.finish_request(live.popleft())
        now, fetched_pages, load_pages = request.arrival_s, 0, 0
        lease = cache.match(request)
        if lease.disk_pages:
            fetched_pages = self._prefetch(lease, now)
            lease = cache.match(request)
        if lease.cpu_pages or lease.disk_pages:
            load_pages = self.prefetching.pages_to_load(lease)
        pages = request.prompt_pages
        if self.hold_output:
            pages = max(pages, -(-(request.prompt_tokens + request.output_tokens) // cache.page_tokens))
        while not cache.admit(lease, pages, now, load_pages):
            if not live:
                return None
            cache.finish_request(live.popleft())
        live.append(lease)
        return self._run(lease, fetched_pages, now)

    def _serve_single(self, request: Request) -> Hits | None:
        """As ``serve``, with one tier."""
        live, tier = self.live, self._single
        assert tier is not None
        while len(live) >= self.in_flight:
            tier.finish_request(live.popleft())
        pages = request.prompt_pages
        if self.hold_output:
            pages = max(pages, -(-(request.prompt_tokens + request.output_tokens) // self.cache.page_tokens))
        held = tier.serve(request, pages, request.arrival_s)
        while held is None:
            if not live:
                return None
            tier.finish_request(live.popleft())
            held = tier.serve(request, pages, request.arrival_s)
        live.append(held)
        return held.hit_pages, 0, 0

    def _prefetch(self, lease: Lease, now: float) -> int:
        transfers = self.prefetching.start(lease, now)
        if not transfers:
            return 0
        self._move(transfers, now)
        arrived = transfers[-1].arrived_pages
        self.prefetching.end(arrived, arrived)
        return arrived

    def _run(self, lease: Lease, fetched_pages: int, now: float) -> Hits:
        """From admission to the last computed page; the request keeps its lease until it is retired."""
        cache = self.cache
        if lease.waits or lease.owed_pages:
            self._move(lease.waits, now)
            while waits := cache.claim(lease, now):
                self._move(waits, now)
        if lease.loading is not None:
            self._move(cache.load(lease, now), now)
        disk_pages = lease.loaded_disk_pages
        if fetched_pages:
            disk_pages += self.prefetching.settle(lease, fetched_pages)
        if transfers := cache.insert(lease, now):
            self._move(transfers, now)
        return lease.gpu_pages, lease.loaded_pages - disk_pages, disk_pages

    def _move(self, transfers: list[Transfer], now: float) -> None:
        """Begin and finish transfers in order, and all that they wait for or bring about."""
        cache = self.cache
        for transfer in transfers:
            if transfer.done:
                continue
            while waits := cache.begin(transfer, now):
                self._move(waits, now)
            if follow_ups := cache.finish(transfer, now):
                self._move(follow_ups, now)

    def _outcome(self, requests: list[Request], rows: list[Hits | None], wall_s: float) -> Outcome:
        nothing = np.full(len(requests), np.nan)
        return Outcome(
            requests=requests,
            page_tokens=self.cache.page_tokens,
            status=np.array([REJECTED if row is None else FINISHED for row in rows], dtype=np.int8),
            hit_pages=np.array([row or (0, 0, 0) for row in rows], dtype=np.int64).reshape(-1, 3),
            arrival_s=np.array([request.arrival_s for request in requests]),
            ttft_s=nothing,
            tpot_s=nothing,
            e2e_s=nothing,
            links={},
            prefetch=self.prefetching.result(),
            wall_s=wall_s,
            **describe_cache(self.cache),
        )
