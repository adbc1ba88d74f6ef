"""Reads from disk ahead of need: asks the prefetch policy, starts its fetches and counts their results."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvsim.core.answers import number, whole_number
from kvsim.core.lease import Lease
from kvsim.core.serving import Fetch, ServedCache, ServingCache

if TYPE_CHECKING:
    from kvsim.policies.prefetch.base import Offer, PrefetchPolicy


@dataclass
class PrefetchCounts:
    """Counts in pages. Fetched pages are used by the request that they were fetched for, or else wasted.

    If a policy fetches fewer pages than are stored, for lack of memory, the rest count as refused by memory.
    """

    fetched_pages: int = 0
    used_pages: int = 0
    wasted_pages: int = 0
    refused_by_threshold_pages: int = 0
    refused_by_rate_limit_pages: int = 0
    refused_by_memory_pages: int = 0


class Prefetching:
    """The prefetches of one run."""

    def __init__(self, cache: "ServedCache | ServingCache", policy: "PrefetchPolicy", offer: "type[Offer]") -> None:
        self.cache: Any = cache
        """A ``ServedCache`` in any run that fetches."""
        self.policy = policy
        self.counts = PrefetchCounts()
        self.in_flight_pages = 0
        self.queued_s: Callable[[], float] = lambda: 0.0
        """Returns the seconds that the disk is busy with earlier reads; set by the engine."""
        self._offer = offer
        self._policy: Any = policy
        """The same object, typed so that its answers may be anything."""
        self._policy_name = f"the prefetch policy {type(policy).__name__}"

    def start(self, lease: Lease, now: float) -> Fetch | None:
        """Start the fetch that the policy wants for a request that starts to wait; None if it wants none."""
        target = self.cache.views[lease.gpu.index].fetches_to
        if target is None:
            return None
        stored = lease.disk_pages
        offer = self._offer(
            request=lease.request,
            first_page=lease.gpu_pages + lease.leading_cpu_pages,
            stored_pages=stored,
            in_flight_pages=self.in_flight_pages,
            available_pages=max(0, target.available_pages),
            queued_s=self.queued_s(),
        )
        answer = self._policy.fetch(offer)
        if isinstance(answer, Enum):
            self._refuse(answer.value, stored)
            return None
        pages = whole_number(self._policy_name, "fetch()", answer, stored)
        if not pages:
            return None
        result: Fetch = self.cache.fetch(lease, pages, now)
        started = result.fetch.pages if result.fetch is not None else 0
        self.in_flight_pages += started
        self.counts.refused_by_memory_pages += stored - started
        return result

    def _refuse(self, reason: str, pages: int) -> None:
        name = f"{reason}_pages"
        setattr(self.counts, name, getattr(self.counts, name) + pages)

    def pages_to_load(self, lease: Lease) -> int:
        """Return how many pages below the GPU the policy wants to load for a request that is about to be admitted."""
        cpu_pages = lease.leading_cpu_pages
        answer = self._policy.load(lease.request, lease.gpu_pages, cpu_pages, lease.lower_pages - cpu_pages)
        return whole_number(self._policy_name, "load()", answer, lease.lower_pages)

    def wait_s(self, fetch_tokens: int) -> float:
        """Return how long, in seconds from its arrival, a request may wait for its prefetch of ``fetch_tokens`` tokens."""
        return number(self._policy_name, "wait_s()", self._policy.wait_s(fetch_tokens))

    def end(self, started_pages: int, arrived_pages: int) -> None:
        """Record the end of a fetch, complete or not."""
        self.in_flight_pages -= started_pages
        self.counts.fetched_pages += arrived_pages

    def settle(self, lease: Lease, first_page: int, fetched_pages: int) -> int:
        """Count the pages that an admitted request loads of its own prefetch, and return their number: they came from disk.

        ``first_page`` is the position in the prompt of the first page fetched.
        """
        begin, loaded = lease.gpu_pages, lease.loaded_pages - lease.loaded_disk_pages
        used = max(0, min(first_page + fetched_pages, begin + loaded) - max(first_page, begin))
        self.counts.used_pages += used
        self.counts.wasted_pages += fetched_pages - used
        return used

    def waste(self, fetched_pages: int) -> None:
        """Count pages that were fetched for a request that never ran."""
        self.counts.wasted_pages += fetched_pages

    def result(self) -> dict[str, int]:
        """Return all counts by name."""
        return asdict(self.counts)
