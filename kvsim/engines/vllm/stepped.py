"""vLLM's GPU block pool as the serving engine calls it: pages are taken step by step and can be found from then on."""

from collections.abc import Iterable
from math import inf
from typing import cast

from kvsim.core.lease import FINISHED, FIRST, LOOK, LOST, RETRACTED, Lease
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import CLAIMED, NO_ROOM, ROOM, Claim, Growth, ServedCache
from kvsim.core.tier import Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.engines.vllm.block_pool import BlockLease, BlockPool
from kvsim.pages.extents import Extent, join_extents, split_extents


class SteppedCache(ServedCache):
    """The cache of vLLM's scheduler V1 (0.33), of one GPU tier.

    admit           asks for room for the whole prompt, and pins what it found; it takes no pages
    begin_chunk     takes the pages of a prefill chunk, and names those that it completes: others can find them at once
    grow            takes the next pages of answers
    release         as at the finish, pages become the most recent, tail before head; ``match`` finds those of the answer too

    With ``cache_output``, full pages of answers have names. An answer that no other prompt can contain (``own_path``) gets them
    when its request leaves; until then, no request could find them. A page of any other answer gets its name when the next page
    is wanted, a step later than in vLLM; of several copies, the one that was named first is found.
    """

    def __init__(
        self,
        gpu: Tier,
        rules: Rules,
        page_tokens: int,
        tiers: int = 1,
        *,
        counts_last_admission: bool = False,
        pool: BlockPool | None = None,
    ) -> None:
        """``tiers`` is the number of tiers of the engine; ``pool``: one of another kind."""
        self.takes_pages_late, self.pauses_after_retraction = True, False
        self.counts_last_admission = counts_last_admission
        self.pool = pool or BlockPool(gpu, tiers)
        self.residency = self.pool.residency
        self.lower = None
        self.watches = []
        self.gpu = gpu
        self.tiers = [gpu]
        self.page_tokens = page_tokens
        self.leases = {}
        self._last_token = int(rules.recompute_last_token)
        self.names_answers = bool(rules.cache_output)

    # --- match and admit -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        lease = BlockLease(request, self.gpu, self.tree.root, why)
        lease.epoch = self.residency.epoch
        limit = ((tokens or request.prompt_tokens) - self._last_token) // self.page_tokens
        path, rest = self.pool.match(self._path(request), limit)
        lease.set_match(path, path[-1].depth + path[-1].pages if path else 0, rest)
        if why != LOOK:
            for watch in self.watches:
                watch.matched(lease)
        return lease

    def _path(self, request: Request) -> tuple[Extent, ...]:
        """Return the pages of a request that get names."""
        answer = request.output_runs if self.names_answers else None
        return join_extents(request.runs, answer or ())

    def share_answers(self, requests: Iterable[Request]) -> bool:
        """Whether others can find pages of the answer of one of these requests while it grows."""
        return self.names_answers and any(request.own_path is None for request in requests)

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        has_room = self.pool.has_room(lease.path, max(pages, in_all))
        if has_room:
            self.pool.hold(cast(BlockLease, lease), lease.path, now)
            self.leases[lease] = None
        if self.watches:
            self._tell_admission(lease, pages, load_pages, is_admitted=has_room)
        return has_room

    def claim(self, lease: Lease, now: float) -> Claim:
        """Do nothing: nothing was reserved."""
        return CLAIMED

    # --- pages, step by step -------------------------------------------------------------------------------------------------

    def begin_chunk(self, lease: Lease, tokens: int, now: float) -> bool:
        held = cast(BlockLease, lease)
        if not self.reserve(held, tokens):
            return False
        self.name(held, tokens)
        return True

    def reserve(self, lease: BlockLease, tokens: int) -> bool:
        """Take the pages for a request's first ``tokens`` tokens. Returns False, with nothing changed, if there is no room."""
        pages = -(-tokens // self.page_tokens) - lease.held_pages
        return pages <= 0 or self.pool.take(lease, pages)

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        if not self.pool.make_room(sum([pages for _, pages in needs])):
            self._name_before_retraction(needs)
            return NO_ROOM
        for lease, pages in needs:
            self.pool.take(cast(BlockLease, lease), pages)
        if self.names_answers:
            self._name_answers([(cast(BlockLease, lease), pages) for lease, pages in needs if lease.request.own_path is None])
        return ROOM

    def _name_before_retraction(self, needs: list[tuple[Lease, int]]) -> None:
        """Name the full pages of the only answer that asks for one, and gets none: others are retracted now, and name theirs."""
        if self.names_answers and len(needs) == 1 and needs[0][0].request.own_path is None:
            held = cast(BlockLease, needs[0][0])
            self.name(held, held.held_pages * self.page_tokens)

    def _name_answers(self, needs: list[tuple[BlockLease, int]]) -> None:
        """Name the pages of answers that were full when each of the last ``pages`` pages of a request was taken.

        The first of these pages were taken within as many steps as a page has tokens, in this order, and so on.
        """
        for number in range(max([pages for _, pages in needs], default=0)):
            for lease, pages in needs:
                if number < pages:
                    self.name(lease, (lease.held_pages - pages + number) * self.page_tokens)

    def name(self, lease: BlockLease, tokens: int) -> None:
        """Name the full pages among a request's first ``tokens`` tokens."""
        pages = tokens // self.page_tokens - lease.node.depth - lease.node.pages
        if pages > 0 and lease.rest and lease.epoch == self.residency.epoch:
            extents, lease.rest = split_extents(lease.rest, pages)
            self.pool.name(lease, extents)

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """Do nothing: the pages have been named chunk by chunk."""
        return NO_TRANSFERS

    # --- the end of a request ------------------------------------------------------------------------------------------------

    def finish(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        held, request = cast(BlockLease, lease), lease.request
        self.name(held, request.prompt_tokens + max(request.output_tokens, 1) - 1)
        del self.leases[lease]
        self.pool.finish(held, now)
        for watch in self.watches:
            watch.released(lease, FINISHED)
        return NO_TRANSFERS

    def release(self, lease: Lease, why: str = LOST, now: float = -inf, tokens: int = 0) -> list[Transfer]:
        held = cast(BlockLease, lease)
        if why == RETRACTED:
            self.name(held, tokens)
        del self.leases[lease]
        self.pool.free(held)
        for watch in self.watches:
            watch.released(lease, why)
        return NO_TRANSFERS

    def reset(self, gpu: Tier | None = None, now: float = -inf) -> None:
        self.pool.reset()
        for watch in self.watches:
            watch.emptied(gpu)

    def check(self) -> None:
        self.pool.check(cast(list[BlockLease], list(self.leases)))
