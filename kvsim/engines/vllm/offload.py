"""vLLM's CPU offloading tier: pages one by one, offered by every request, in an order that the eviction policy chooses.

Pages here have no parents: any page may be stored or evicted. A request's pages are handled in runs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvsim.core.edge import Edge
from kvsim.core.runs import Run, count_pages, split_runs

if TYPE_CHECKING:
    from kvsim.policies.eviction.offload_order import OffloadOrder, Seen
    from kvsim.policies.placement.offer_table import OfferTable


@dataclass(slots=True)
class OffloadCounts:
    """What became of pages that were loaded or offered."""

    loaded_pages: int = 0
    """Brought to the GPU."""
    written_pages: int = 0
    """Stored in CPU memory."""
    below_threshold_pages: int = 0
    """Offered, and not stored since they had not been offered often enough."""
    no_room_pages: int = 0
    """To be stored, but others could not be evicted for all pages of the store."""


class OffloadUse(NamedTuple):
    """What one request has been to the tier."""

    loaded_pages: int
    seen: "Seen"
    is_stored: bool


class OffloadTier:
    """The CPU tier: loads what follows the GPU's hit and stores what is offered. A store that does not fit is dropped whole.

    The tier's eviction policy provides the order (``offload_order``), its placement policy the table of offers
    (``offer_table``); both raise ValueError if they have none.
    """

    def __init__(self, edge: Edge, counts: OffloadCounts) -> None:
        tier = edge.lower
        self.tier = tier
        self.counts = counts
        self.order: OffloadOrder = tier.eviction.offload_order(tier.pool.capacity)
        self.offers: OfferTable = edge.placement.offer_table()
        self._slots = tier.pool.take(0)
        """Of all pages together."""

    def use(self, runs: tuple[Run, ...], hit_pages: int, usable_pages: int) -> OffloadUse:
        """Serve an admitted prompt. Its first ``hit_pages`` pages are on the GPU, and ``usable_pages`` at most may be reused.

        Loads end at the first page that is not here. With a load, the pages after it are offered; without one, all are.
        """
        head, offered = split_runs(runs, hit_pages)
        pieces = self.order.find(offered)
        loaded_pages = 0
        for (_, pages), here in pieces:
            if not here:
                break
            loaded_pages += pages
        loaded_pages = min(loaded_pages, usable_pages - hit_pages)
        if loaded_pages:
            offered = split_runs(offered, loaded_pages)[1]
        else:
            pieces, offered = self.order.find(head) + pieces, runs
        self.counts.loaded_pages += loaded_pages
        self.offers.count(offered)
        seen = self._admit(pieces)
        return OffloadUse(loaded_pages, seen, self._store(seen))

    def finish(self, use: OffloadUse) -> None:
        """A request has finished: what it used becomes the most recent."""
        self.order.finish(use.seen, use.is_stored)

    def _admit(self, pieces: "Seen") -> "Seen":
        """The pieces without what is missing and has not been offered often enough."""
        if self.offers.threshold < 2:
            return pieces
        seen: Seen = []
        for run, here in pieces:
            if here:
                seen.append((run, True))
                continue
            admitted = [part for part, is_admitted in self.offers.pieces((run,)) if is_admitted]
            seen += [(part, False) for part in admitted]
            self.counts.below_threshold_pages += run[1] - count_pages(admitted)
        return seen

    def _store(self, seen: "Seen") -> bool:
        """Make room for all missing pages and store them. False, and nothing is stored, if there is not enough to evict."""
        order, tier, pool = self.order, self.tier, self.tier.pool
        order.offer(seen)
        keep = [run for run, was_here in seen if was_here]
        pages = sum([run[1] for run, was_here in seen if not was_here])
        missing = pages - pool.free
        if missing > order.pages - count_pages(keep):
            self.counts.no_room_pages += pages
            return False
        if missing > 0:
            order.evict(missing, keep)
            freed, self._slots = pool.split(self._slots, missing)
            pool.give(freed)
            tier.evicted_pages += missing
        self._slots = pool.join(self._slots, pool.take(pages))
        order.store(seen)
        tier.inserted_pages += pages
        self.counts.written_pages += pages
        return True
