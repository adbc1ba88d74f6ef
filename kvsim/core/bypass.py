"""Serves requests from one tier whose policy may keep nothing of a request: an upper bound, not a tier that could be built."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.core.cache import TieredCache
from kvsim.core.lru_curve import usable_pages
from kvsim.core.request import Request

if TYPE_CHECKING:
    from kvsim.policies.eviction.base import BypassEviction


class ServedPages:
    """What a request hit. It holds nothing."""

    __slots__ = ("hits",)

    def __init__(self, hit_pages: int) -> None:
        self.hits = hit_pages, 0, 0


class BypassTier:
    """A server for replay: each request is inserted first, and then the policy shrinks the tier to its capacity.

    So all computed pages count as inserted, and those that do not stay, at once or later, as evicted.
    """

    def __init__(
        self, cache: TieredCache, policy: "BypassEviction", requests: Sequence[tuple[Request, int]], largest_pages: int
    ) -> None:
        """``requests`` come with the pages that each takes in all; with more than ``largest_pages`` it is rejected."""
        self.policy = policy
        self.tier = cache.gpu
        self.largest_pages = largest_pages
        served = [request for request, pages in requests if pages <= largest_pages]
        recompute = cache.rules.recompute_last_token
        policy.prepare(served, [usable_pages(request, cache.page_tokens, recompute) for request in served])

    def serve(self, request: Request, pages: int, now: float) -> ServedPages | None:
        """Hit what is kept of the request, and let the policy say what stays. None if it takes too many pages."""
        if pages > self.largest_pages:
            return None
        tier, pool = self.tier, self.tier.pool
        before = pool.capacity - pool.free
        hit_pages, kept = self.policy.use(request)
        computed = request.prompt_pages - hit_pages
        tier.inserted_pages += computed
        tier.evicted_pages += before + computed - kept
        if kept > before:
            pool.take(kept - before)
        else:
            pool.give(before - kept)
        return ServedPages(hit_pages)

    def finish_request(self, held: ServedPages) -> None:
        """Nothing is held."""
