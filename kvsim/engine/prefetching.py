"""Reads from disk ahead of need: asks the prefetch policy, starts what it wants and counts what became of it."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvsim.core.cache import Lease
from kvsim.core.transfer import Transfer

if TYPE_CHECKING:
    from kvsim.policies.prefetch.base import Offer, PrefetchPolicy


@dataclass(slots=True)
class PrefetchCounts:
    """In pages. What was fetched was used by the request that it was fetched for, or wasted."""

    fetched_pages: int = 0
    used_pages: int = 0
    wasted_pages: int = 0
    refused_by_threshold_pages: int = 0
    refused_by_rate_limit_pages: int = 0
    refused_by_memory_pages: int = 0


class Prefetching:
    """The prefetches of one run."""

    def __init__(self, cache: Any, policy: "PrefetchPolicy", offer: "type[Offer]") -> None:
        self.cache = cache
        self.policy = policy
        self.counts = PrefetchCounts()
        self.in_flight_pages = 0
        self._offer = offer

    def start(self, lease: Lease, now: float) -> list[Transfer] | None:
        """Start the fetch that the policy wants for a request that begins to wait; the last transfer is the fetch itself.

        [] if there is no room for it, None if the policy wants none: then nothing has changed.
        """
        offer = self._offer(
            stored_pages=lease.disk_pages,
            in_flight_pages=self.in_flight_pages,
            available_pages=max(0, self.cache.tiers[1].available_pages),
        )
        pages = self.policy.fetch(offer)
        if not isinstance(pages, int):
            self._refuse(pages.value, lease.disk_pages)
            return None
        if not pages:
            return None
        transfers: list[Transfer] = self.cache.fetch(lease, pages, now)
        if transfers:
            self.in_flight_pages += transfers[-1].pages
        else:
            self.counts.refused_by_memory_pages += lease.disk_pages
        return transfers

    def _refuse(self, reason: str, pages: int) -> None:
        name = f"{reason}_pages"
        setattr(self.counts, name, getattr(self.counts, name) + pages)

    def pages_to_load(self, lease: Lease) -> int:
        """How many of the pages below the GPU the policy wants for a request that is about to be admitted."""
        return self.policy.load(lease.leading_cpu_pages, lease.lower_pages - lease.leading_cpu_pages)

    def end(self, started_pages: int, arrived_pages: int) -> None:
        """A fetch has ended, whole or in part."""
        self.in_flight_pages -= started_pages
        self.counts.fetched_pages += arrived_pages

    def settle(self, lease: Lease, fetched_pages: int) -> int:
        """Count what an admitted request uses of its own prefetch, and return it: these pages came from disk."""
        used = min(fetched_pages, lease.loaded_pages - lease.loaded_disk_pages)
        self.counts.used_pages += used
        self.counts.wasted_pages += fetched_pages - used
        return used

    def result(self) -> dict[str, int]:
        """All counts by name."""
        return asdict(self.counts)
