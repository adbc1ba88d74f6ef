"""Reads from disk ahead of need: asks the prefetch policy, starts its fetches and counts their results."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvsim.core.answers import number, whole_number
from kvsim.core.lease import Lease
from kvsim.core.serving import Hits, ServedCache
from kvsim.core.tier import Edge
from kvsim.core.transfer import FetchPin, Transfer
from kvsim.engine.kept_pages import KeptPages
from kvsim.hardware.tier_kinds import levels_listed

if TYPE_CHECKING:
    from kvsim.policies.prefetch.base import Offer, PrefetchPolicy


@dataclass
class PrefetchCounts:
    """Counts of pages. A fetched page is *used* if the request that it was fetched for uses it, and *wasted* if not.

    If a policy fetches fewer pages than are stored, for lack of memory, the others count as refused by memory.
    """

    fetched_pages: int = 0
    used_pages: int = 0
    wasted_pages: int = 0
    refused_by_threshold_pages: int = 0
    refused_by_rate_limit_pages: int = 0
    refused_by_memory_pages: int = 0

    def refuse(self, reason: str, pages: int) -> None:
        """Count pages that are stored and not fetched; ``reason`` is the value of a ``Refusal``."""
        name = f"{reason}_pages"
        setattr(self, name, getattr(self, name) + pages)


class Prefetch:
    """The pages fetched for one request, from the start of the fetch until the request is admitted or rejected.

    Until then these pages, and the cached prefix that they continue, stay in the CPU tier.
    """

    __slots__ = ("arrived_pages", "fetch", "first_page", "is_given_up", "is_under_way", "pages", "pin", "transfers")

    def __init__(self, transfers: list[Transfer], fetch: Transfer, pin: FetchPin, first_page: int) -> None:
        self.transfers = transfers
        """The transfers to carry out, in order; the fetch is one of them."""
        self.fetch = fetch
        self.pin = pin
        self.first_page = first_page
        """The position in the prompt of the first page fetched."""
        self.pages = fetch.pages
        self.arrived_pages = 0
        """Pages that had arrived at the end of the fetch."""
        self.is_under_way = True
        self.is_given_up = False
        """Whether no request waits for it any more."""


class Prefetching:
    """The prefetches of one run."""

    def __init__(self, cache: ServedCache, policy: "PrefetchPolicy", offer: "type[Offer]") -> None:
        self.lower = cache.lower
        self.policy = policy
        self.counts = PrefetchCounts()
        self.in_flight_pages = 0
        """Pages whose fetch has started for requests whose turn has not come yet."""
        self.kept: KeptPages | None = None
        """What has been brought to the GPU for requests that have not arrived; set by the engine."""
        self.queued_s: Callable[[Edge], float] = lambda edge: 0.0
        """Returns the seconds that a link is busy with earlier reads; set by the engine."""
        self._levels = levels_listed([tier.level for tier in cache.tiers])
        self._row_on_gpu = [0] * self._levels
        """The row of a request all of whose hits are on the GPU; only their number changes."""
        self._offer = offer
        self._policy: Any = policy
        """The same object, typed so that its answers may be anything."""
        self._policy_name = f"the prefetch policy {type(policy).__name__}"

    def start(self, lease: Lease, now: float) -> Prefetch | None:
        """Start the fetch that the policy wants for a request that starts to wait; None if nothing is fetched."""
        view = None if self.lower is None else self.lower.views[lease.gpu.index]
        if self.lower is None or view is None or view.fetches_to is None:
            return None
        stored = lease.far_pages
        read = view.first_read(lease) or view.fetches_to.below[0]
        offer = self._offer(
            request=lease.request,
            first_page=lease.gpu_pages + lease.leading_pages,
            stored_pages=stored,
            in_flight_pages=self.in_flight_pages,
            available_pages=view.room_to_fetch(lease),
            queued_s=self.queued_s(read),
            tier=read.lower.name,
        )
        answer = self._policy.fetch(offer)
        if isinstance(answer, Enum):
            self.counts.refuse(answer.value, stored)
            return None
        pages = whole_number(self._policy_name, "fetch()", answer, stored)
        if not pages:
            return None
        transfers, fetch, pin = self.lower.fetch(lease, pages, now)
        if fetch is None or pin is None:
            self.counts.refused_by_memory_pages += stored
            return None
        prefetch = Prefetch(transfers, fetch, pin, offer.first_page)
        self.in_flight_pages += prefetch.pages
        self.counts.refused_by_memory_pages += stored - prefetch.pages
        return prefetch

    def pages_to_load(self, lease: Lease) -> int:
        """Return how many pages below the GPU the policy wants to load for a request that is about to be admitted."""
        cpu_pages = lease.leading_pages
        answer = self._policy.load(lease.request, lease.gpu_pages, cpu_pages, lease.lower_pages - cpu_pages)
        return whole_number(self._policy_name, "load()", answer, lease.lower_pages)

    def wait_s(self, fetch_tokens: int) -> float:
        """Return how long, in seconds from its arrival, a request may wait for its prefetch of ``fetch_tokens`` tokens."""
        return number(self._policy_name, "wait_s()", self._policy.wait_s(fetch_tokens))

    def end(self, prefetch: Prefetch) -> None:
        """Record the end of a fetch, complete or not."""
        prefetch.is_under_way = False
        prefetch.arrived_pages = prefetch.fetch.arrived_pages
        self.counts.fetched_pages += prefetch.arrived_pages
        if prefetch.is_given_up:
            self.counts.wasted_pages += prefetch.arrived_pages

    def hits(self, lease: Lease, prefetch: Prefetch | None) -> Hits:
        """Return the hit pages, by level, of a request that has been admitted and has started its loads, and end its prefetch.

        Pages that it loads of its prefetch come from the tier that they were fetched from.
        """
        if prefetch is None and not lease.loaded_pages:
            self._row_on_gpu[0] = lease.gpu_pages
            return tuple(self._row_on_gpu)
        pages = lease.reused_pages(self._levels)
        if prefetch is not None:
            used = self._settle(prefetch, lease)
            pages[prefetch.fetch.target.level] -= used
            pages[prefetch.fetch.source.level] += used
        return tuple(pages)

    def _settle(self, prefetch: Prefetch, lease: Lease) -> int:
        """End a prefetch. Counts the pages that are loaded of it, and returns their number."""
        begin, loaded = lease.gpu_pages, lease.loaded_pages - lease.loaded_far_pages
        end = min(prefetch.first_page + prefetch.arrived_pages, begin + loaded)
        used = max(0, end - max(prefetch.first_page, begin))
        self.counts.used_pages += used
        self._let_go(prefetch, used)
        return used

    def give_up(self, prefetch: Prefetch) -> None:
        """End the prefetch of a request that has been rejected or lost with its engine, though the fetch may be under way."""
        prefetch.is_given_up = True
        self._let_go(prefetch, 0)

    def _let_go(self, prefetch: Prefetch, used: int) -> None:
        self.counts.wasted_pages += prefetch.arrived_pages - used
        self.in_flight_pages -= prefetch.pages
        prefetch.pin.let_go()

    def result(self) -> dict[str, int]:
        """Return all counts by name."""
        return {name: getattr(self.counts, name) for name in self.counts.__dataclass_fields__}
