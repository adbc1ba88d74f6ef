"""Replay: plays requests one after another, without a clock, for hit rates at full speed."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from kvsim.core.request import Request, Reset
from kvsim.core.requests import values_of
from kvsim.core.serving import NEVER_FITS, Hits, Server
from kvsim.engine.collector import without_garbage_collector
from kvsim.engine.columns import recorded
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome, describe_caches, tier_names
from kvsim.engine.prefetching import PrefetchCounts
from kvsim.replaying.settings import ReplaySettings
from kvsim.replaying.steps import SteppedServer

ADVANCE_EVERY = 512


class Rows:
    """What has become of the requests played so far: a few bytes of each."""

    def __init__(self, tiers: int) -> None:
        self.tiers = tiers
        self.status = array("b")
        """FINISHED or REJECTED."""
        self.hit_pages = array("q")
        """Hit pages by tier, ``tiers`` numbers of each request; 0 if it was rejected."""

    def __len__(self) -> int:
        return len(self.status)

    def add(self, rows: Iterable[Hits | None]) -> None:
        """Take in the hits of the next requests by tier, from the top down; lower tiers may be left out. None: rejected."""
        width = self.tiers
        status: list[int] = []
        hit_pages: list[int] = []
        for row in rows:
            status.append(REJECTED if row is None else FINISHED)
            hits = row or ()
            hit_pages.extend(hits)
            if len(hits) < width:
                hit_pages.extend((0,) * (width - len(hits)))
        self.status.frombytes(bytes(status))
        self.hit_pages.frombytes(np.array(hit_pages, dtype=np.int64).tobytes())


class Replay:
    """Plays requests against kvsim's own cache or an engine's; transfers take no time."""

    def __init__(self, server: Server, settings: ReplaySettings) -> None:
        self.server = server
        self.settings = settings
        self.live: list[Any] = []
        """Leases of running requests, oldest first."""

    def run(
        self,
        requests: Sequence[Request],
        advance: Callable[[int], None] | None = None,
        inspect: Callable[[Any, str], None] | None = None,
        *,
        each_step: bool = False,
    ) -> Outcome:
        """Play all requests in order; ``advance`` is called at intervals with the number played so far.

        ``inspect`` is called with the server: after each step, with what has happened, or only once, at the end, while the last
        requests are still unfinished.
        """
        if inspect and each_step:
            self.server = SteppedServer(self.server, partial(inspect, self.server))
        began = perf_counter()
        rows = Rows(len(tier_names(self.server.tiers)))
        with without_garbage_collector():
            for start in range(0, len(requests), ADVANCE_EVERY):
                rows.add(self.play(requests[start : start + ADVANCE_EVERY]))
                if advance:
                    advance(len(rows))
            if inspect and not each_step:
                inspect(self.server, "")
            while self.live:
                self.server.finish_request(self.live.pop(0))
            wall_s = perf_counter() - began
        return self._outcome(requests, rows, wall_s)

    def play(self, requests: Sequence[Request]) -> list[Hits | None]:
        """Play the next requests. Returns the hit pages of each by tier; None for a request that can never fit."""
        server, live = self.server, self.live
        page_tokens = server.page_tokens
        in_flight, hold_output = self.settings.in_flight, self.settings.hold_output
        rows: list[Hits | None] = []
        for request in requests:
            if len(live) >= in_flight:
                server.finish_request(live.pop(0))
            if request.resets:
                self.reset(request.resets)
            pages, now = request.pages_of_sample(page_tokens, hold_output=hold_output), request.arrival_s
            lease = server.serve(request, pages, now)
            while lease is None and live:
                server.finish_request(live.pop(0))
                lease = server.serve(request, pages, now)
            if lease is None or lease is NEVER_FITS:
                rows.append(None)
                continue
            live.append(lease)
            rows.append(lease.hits)
        return rows

    def reset(self, resets: tuple[Reset, ...]) -> None:
        """Reset the cache; a reset that drains first ends all running requests."""
        for mode, _ in resets:
            while mode == "drain" and self.live:
                self.server.finish_request(self.live.pop(0))
            self.server.reset()

    def _outcome(self, requests: Sequence[Request], rows: Rows, wall_s: float) -> Outcome:
        known: dict[str, Any] = {
            "status": rows.status,
            "hit_pages": np.array(rows.hit_pages, dtype=np.int64),
            "arrival_s": np.fromiter(values_of(requests, "arrival_s"), np.float64, len(requests)),
        }
        columns = recorded(requests, rows.tiers, known)
        return Outcome(
            requests=requests,
            page_tokens=self.server.page_tokens,
            columns=columns,
            links={},
            prefetch={**asdict(PrefetchCounts()), **self.server.prefetched()},
            wall_s=wall_s,
            **describe_caches([self.server], requests, columns["hit_pages"]),
        )
