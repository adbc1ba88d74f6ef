"""Serves requests from one tier whose policy may bypass it, keeping nothing of a request: an upper bound, not a real tier."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvsim.bounds.lru_curve import usable_pages
from kvsim.core.answers import refused, whole_number
from kvsim.core.copies import Counts
from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.core.rules import Rules
from kvsim.core.serving import Server
from kvsim.core.tier import Tier
from kvsim.core.victims import eviction_policy
from kvsim.pages.extents import count_pages, join_extents

if TYPE_CHECKING:
    from kvsim.policies.eviction.base import BypassEviction


def with_answer(request: Request) -> Request:
    """Return the request with the pages of its answer, if known, appended to its prompt."""
    if not request.output_runs:
        return request
    extents = join_extents(request.runs, request.output_runs)
    return replace(request, runs=extents, prompt_pages=count_pages(extents))


class BypassLease:
    """The hits of a request. Holds no pages."""

    __slots__ = ("hits",)

    def __init__(self, hits: tuple[int, int, int]) -> None:
        self.hits = hits


class BypassTier(Server):
    """A cache for replay: each request is inserted first, then the policy shrinks the tier to its capacity.

    All computed pages therefore count as inserted, and pages dropped immediately or later as evicted. With ``cache_output``,
    the pages of the answer are also computed; only later prompts hit them.
    """

    def __init__(
        self,
        tier: Tier,
        policy: "BypassEviction",
        rules: Rules,
        page_tokens: int,
        requests: Sequence[Request],
        taken: Sequence[int],
        largest_pages: int,
    ) -> None:
        """``taken`` is the total number of pages each request needs; one that needs more than ``largest_pages`` is rejected."""
        self.tiers = [tier]
        self.counts = Counts()
        self.page_tokens = page_tokens
        self._ask: Any = policy.use
        """Typed so that its answers may be anything."""
        self._policy_name = eviction_policy(tier)
        indices = values_of(requests, "index")
        self._too_large = {index for index, pages in zip(indices, taken, strict=True) if pages > largest_pages}
        served = [request for request in requests if request.index not in self._too_large]
        usable = usable_pages(served, page_tokens, rules.recompute_last_token)
        self._cache_output = rules.cache_output
        policy.prepare([with_answer(request) for request in served] if rules.cache_output else served, usable)

    def serve(self, request: Request, pages: int, now: float) -> BypassLease | None:
        """Serve a request, and let the policy decide what stays. None if it needs too many pages."""
        if request.index in self._too_large:
            return None
        tier = self.tiers[0]
        pool = tier.pool
        before = pool.capacity - pool.free
        hits, kept = self._use(request)
        hit_pages = whole_number(self._policy_name, "use() as hit pages", hits, request.prompt_pages)
        answer = request.output_runs if self._cache_output else None
        computed = request.prompt_pages - hit_pages + (count_pages(answer) if answer else 0)
        most = min(pool.capacity, before + computed)
        kept_pages = whole_number(self._policy_name, "use() as kept pages", kept, most)
        dropped = before + computed - kept_pages
        tier.inserted_pages += computed
        tier.evicted_pages += dropped
        self.counts.dropped_pages += dropped
        if kept_pages > before:
            pool.take(kept_pages - before)
        else:
            pool.give(before - kept_pages)
        return BypassLease((hit_pages, 0, 0))

    def _use(self, request: Request) -> tuple[object, object]:
        answer: object = self._ask(request)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise refused(self._policy_name, "use()", answer, "hit pages and kept pages")
        return answer

    def finish_request(self, lease: BypassLease) -> None:
        """Do nothing: the lease holds no pages."""

    def verify(self) -> None:
        """Nothing is left to recount: what the policy says is checked with each request."""
