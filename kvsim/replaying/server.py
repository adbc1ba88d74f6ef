"""Serves requests from the cache core without a clock: transfers take no time."""

from typing import Any

from kvsim.core.lease import FIRST, KNOWN, Lease
from kvsim.core.request import Request
from kvsim.core.serving import Hits, Lower, ServedCache, Server
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.tree import RadixTree
from kvsim.engine.job import longest_leap
from kvsim.engine.prefetching import Prefetch, Prefetching
from kvsim.pages.extents import Extent


@mypyc_attr(allow_interpreted_subclasses=True)
class PassingServer(Server):
    """Another server under a second name, which passes every call on to it, for those that watch or repeat some calls."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.tiers, self.counts, self.page_tokens = server.tiers, server.counts, server.page_tokens
        self.counts_last_admission, self.loads_first = server.counts_last_admission, server.loads_first
        self.preempts_all, self.takes_by_step = server.preempts_all, server.takes_by_step
        self.decodes_past_end, self.tries_waiting = server.decodes_past_end, server.tries_waiting

    @property
    def tree(self) -> RadixTree:
        return self.server.tree

    def serve(self, request: Request, pages: int, now: float) -> Any:
        return self.server.serve(request, pages, now)

    def finish_request(self, lease: Any) -> None:
        self.server.finish_request(lease)

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> Any:
        return self.server.begin(request, tokens, in_all, now)

    def end_pass(self, *, is_step: bool) -> None:
        self.server.end_pass(is_step=is_step)

    def look_up_waiting(self, request: Request, tokens: int) -> bool:
        return self.server.look_up_waiting(request, tokens)

    def is_loading(self, lease: Any) -> bool:
        return self.server.is_loading(lease)

    def begin_chunk(self, lease: Any, tokens: int) -> bool:
        return self.server.begin_chunk(lease, tokens)

    def end_chunk(self, lease: Any, tokens: int) -> None:
        self.server.end_chunk(lease, tokens)

    def grow(self, lease: Any, pages: int, full_pages: int) -> bool:
        return self.server.grow(lease, pages, full_pages)

    def decode(self, lease: Any, tokens: int) -> bool:
        return self.server.decode(lease, tokens)

    def step_tokens(self, tokens: int, *, is_answer: bool) -> int:
        return self.server.step_tokens(tokens, is_answer=is_answer)

    def preempt(self, lease: Any) -> bool:
        return self.server.preempt(lease)

    def reset(self) -> None:
        self.server.reset()

    def prefetched(self) -> dict[str, int]:
        return self.server.prefetched()

    def describe_checkpoints(self) -> dict[str, int]:
        return self.server.describe_checkpoints()

    def pages_known(self) -> dict[int, int] | None:
        return self.server.pages_known()

    def held_pages(self, name: str) -> tuple[int, int] | None:
        return self.server.held_pages(name)

    def held_extents(self) -> list[Extent]:
        return self.server.held_extents()

    def verify(self) -> None:
        self.server.verify()


class CacheServer(Server):
    """Serves requests from a cache with the same calls as the engine."""

    def __init__(self, cache: ServedCache, prefetching: Prefetching) -> None:
        self.cache = cache
        self.tiers, self.counts, self.page_tokens = cache.tiers, cache.counts, cache.page_tokens
        self.lower: Lower | None = cache.lower
        """What lies below the GPU; there are no loads and no transfers if nothing does."""
        self.prefetching = prefetching
        self._waiting: Request | None = None
        """A request without room. It will be tried again, with what was fetched for it."""
        self._prefetched: Prefetch | None = None
        """The prefetch of that request."""
        self._landing: list[Transfer] = NO_TRANSFERS
        """Transfers that follow from a request without decode steps; they end when it has finished or before the next request, at
        the time of the cache's last use."""

    def serve(self, request: Request, pages: int, now: float) -> Lease | None:
        """Serve a request that takes ``pages`` pages in all. Returns None, with nothing admitted, if there is no room.

        As in the engine, room is made for the prompt first and, once that is computed, for the answer.
        """
        cache = self.cache
        page_tokens = cache.page_tokens
        if pages > cache.gpu.pool.capacity:
            return None
        if self._landing:
            self._land(NO_TRANSFERS)
        own_pages = min(pages, request.pages_for(request.prompt_tokens, page_tokens))
        why = KNOWN if request.sample else FIRST
        lease = cache.match(request, why=why)
        prefetch: Prefetch | None = None
        load_pages = 0
        if self._waiting is request:
            prefetch, self._waiting, self._prefetched = self._prefetched, None, None
        elif lease.below and lease.far_pages:
            prefetch = self._prefetch(lease, now)
            lease = cache.match(request, why=why)
        if lease.below and lease.lower_pages:
            load_pages = self.prefetching.pages_to_load(lease)
        if not cache.admit(lease, own_pages, now, load_pages, in_all=pages):
            self._wait(request, prefetch)
            return None
        lease.hits = self._run(lease, prefetch, now)
        transfers = cache.insert(lease, now)
        if request.output_tokens < 2:
            self._landing = self._begin(transfers, now)
        elif own_pages < pages:
            self._answer(lease, own_pages, transfers, now)
        elif transfers:
            self._move(transfers, now)
        return lease

    @property
    def tree(self) -> RadixTree:
        return self.cache.tree

    def reset(self) -> None:
        self.cache.reset()

    def prefetched(self) -> dict[str, int]:
        return self.prefetching.result()

    def describe_checkpoints(self) -> dict[str, int]:
        return self.cache.describe_checkpoints()

    def pages_known(self) -> dict[int, int] | None:
        return self.cache.pages_known()

    def held_pages(self, name: str) -> tuple[int, int] | None:
        return self.cache.held_pages(name)

    def held_extents(self) -> list[Extent]:
        return self.cache.held_extents()

    def verify(self) -> None:
        self.cache.verify()

    def finish_request(self, lease: Lease) -> None:
        """End a request whose answer is complete, and give back what it holds."""
        transfers = self.cache.finish(lease)
        if transfers or self._landing:
            self._land(transfers)

    def _land(self, transfers: list[Transfer]) -> None:
        """End the transfers left to land, then these."""
        landing, self._landing = self._landing, NO_TRANSFERS
        self._move(landing + transfers, self.cache.residency.now)

    def _prefetch(self, lease: Lease, now: float) -> Prefetch | None:
        """Fetch what the policy wants; None if that is nothing."""
        prefetch = self.prefetching.start(lease, now)
        if prefetch is not None:
            self._move(prefetch.transfers, now)
            self.prefetching.end(prefetch)
        return prefetch

    def _wait(self, request: Request, prefetch: Prefetch | None) -> None:
        """Let a request without room wait for the end of another one; if none is running, it is rejected."""
        if self.cache.leases:
            self._waiting, self._prefetched = request, prefetch
        elif prefetch is not None:
            self.prefetching.give_up(prefetch)

    def _run(self, lease: Lease, prefetch: Prefetch | None, now: float) -> Hits:
        """Bring everything that an admitted request reuses to the GPU. Returns its hit pages by tier."""
        transfers = lease.waits
        if lease.reserved_pages:
            transfers = self._claim(lease, transfers, now)
        if lease.has_load:
            assert self.lower is not None
            transfers = transfers + self.lower.load(lease, now).transfers
        hits = self.prefetching.hits(lease, prefetch)
        if transfers:
            self._move(transfers, now)
        return hits

    def _answer(self, lease: Lease, held_pages: int, transfers: list[Transfer], now: float) -> None:
        """Take the pages of the answer leap by leap, as the engine does. The last token's KV is never computed.

        ``transfers``, which follow from the prompt, end during the first leap, which is shorter if they leave it too little
        room. Later leaps that need no page are passed over. With one tier nothing happens between leaps, so a single leap covers
        the answer, as it does for a request that runs alone.
        """
        cache, request, computed = self.cache, lease.request, lease.request.prompt_tokens
        end = computed + request.output_tokens - 1
        leap = end if cache.lower is None else min(end, longest_leap(cache))
        transfers = self._begin(transfers, now)
        while computed < end:
            steps = min(leap, end - computed)
            while (pages := request.pages_for(computed + steps, cache.page_tokens) - held_pages) > 0:
                growth = cache.grow([(lease, pages)], now)
                if growth.has_room:
                    held_pages += pages
                    if growth.transfers:
                        transfers = transfers + growth.transfers
                    if lease.reserved_pages:
                        transfers = self._claim(lease, transfers, now)
                    break
                steps //= 2
                if not steps:
                    break
            if not (steps or transfers):
                break
            if transfers:
                self._move(transfers, now)
                transfers = NO_TRANSFERS
            computed += steps
            computed += (held_pages * cache.page_tokens - computed) // leap * leap
        if transfers:
            self._move(transfers, now)

    def _claim(self, lease: Lease, waits: list[Transfer], now: float) -> list[Transfer]:
        """Take the reserved slots once the transfers that free them have ended. Returns the transfers that follow."""
        follow_ups = NO_TRANSFERS
        while True:
            follow_ups = follow_ups + self._end(waits, now)
            waits = self.cache.claim(lease, now).waits
            if not waits:
                return self._begin(follow_ups, now)

    def _move(self, transfers: list[Transfer], now: float) -> None:
        """Begin and end transfers, and then all transfers that follow."""
        while transfers:
            transfers = self._end(transfers, now)

    def _begin(self, transfers: list[Transfer], now: float) -> list[Transfer]:
        """Begin the transfers that can run. Returns all of them, with those that the others wait for."""
        for transfer in transfers:
            assert self.lower is not None
            begun = self.lower.begin(transfer, now)
            if not begun.can_run:
                transfers = transfers + begun.waits
        return transfers

    def _end(self, transfers: list[Transfer], now: float) -> list[Transfer]:
        """Begin and finish transfers in order, each after those that it waits for. Returns the transfers that follow."""
        lower = self.lower
        follow_ups: list[Transfer] = []
        for transfer in transfers:
            if transfer.done:
                continue
            assert lower is not None
            while not (begun := lower.begin(transfer, now)).can_run:
                follow_ups += self._end(begun.waits, now)
            follow_ups += lower.finish(transfer, now)
        return follow_ups
