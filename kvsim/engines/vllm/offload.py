"""vLLM's CPU offloading tier: single pages, offered by every request, in an order that the eviction policy defines.

Pages have no parents here: any page may be stored or evicted. A request's pages are handled as extents.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvsim.core.tier import Edge
from kvsim.pages.extents import Extent, count_pages, split_extents

if TYPE_CHECKING:
    from kvsim.policies.eviction.offload_order import OffloadOrder, Seen
    from kvsim.policies.placement.offer_table import OfferTable


@dataclass(slots=True)
class OffloadCounts:
    """Pages loaded, stored or refused since the start of the run."""

    loaded_pages: int = 0
    """Loaded to the GPU."""
    written_pages: int = 0
    """Stored in CPU memory."""
    below_threshold_pages: int = 0
    """Offered, but not stored since they had not been offered often enough."""
    no_room_pages: int = 0
    """Not stored, since too few other pages could be evicted for the whole store."""


class OffloadUse(NamedTuple):
    """One request's use of the tier."""

    loaded_pages: int
    seen: "Seen"
    is_stored: bool


class OffloadTier:
    """The CPU tier: loads pages after the GPU's hit and stores pages that are offered. A store is made whole or not at all.

    The tier's eviction policy provides the order (``offload_order``), its placement policy the table of offers
    (``offer_table``); both raise ValueError if they have none.
    """

    def __init__(self, edge: Edge, counts: OffloadCounts) -> None:
        tier = edge.lower
        self.tier = tier
        self.counts = counts
        self.order: OffloadOrder = tier.eviction.offload_order(tier.pool.capacity)
        self.offers: OfferTable = edge.placement.offer_table()
        self._slots = tier.store(0)
        """Slots of all stored pages together."""

    def use(self, extents: tuple[Extent, ...], hit_pages: int, usable_pages: int) -> OffloadUse:
        """Serve an admitted prompt whose first ``hit_pages`` pages are on the GPU; at most ``usable_pages`` may be reused.

        A load ends at the first page that is not stored here. After a load, the pages that follow it are offered; without one,
        all pages are.
        """
        head, offered = split_extents(extents, hit_pages)
        pieces = self.order.find(offered)
        loaded_pages = 0
        for (_, pages), here in pieces:
            if not here:
                break
            loaded_pages += pages
        loaded_pages = min(loaded_pages, usable_pages - hit_pages)
        if loaded_pages:
            offered = split_extents(offered, loaded_pages)[1]
        else:
            pieces, offered = self.order.find(head) + pieces, extents
        self.counts.loaded_pages += loaded_pages
        self.offers.count(offered)
        seen = self._admit(pieces)
        return OffloadUse(loaded_pages, seen, self._store(seen))

    def finish(self, use: OffloadUse) -> None:
        """Record that a request has finished: the pages that it used become the most recent."""
        self.order.finish(use.seen, use.is_stored)

    def _admit(self, pieces: "Seen") -> "Seen":
        """Return the pieces without missing pages that have not been offered often enough."""
        if self.offers.threshold < 2:
            return pieces
        seen: Seen = []
        for extent, here in pieces:
            if here:
                seen.append((extent, True))
                continue
            admitted = [part for part, is_admitted in self.offers.pieces((extent,)) if is_admitted]
            seen += [(part, False) for part in admitted]
            self.counts.below_threshold_pages += extent[1] - count_pages(admitted)
        return seen

    def _store(self, seen: "Seen") -> bool:
        """Make room for all missing pages and store them. Returns False, with nothing stored, if too few can be evicted."""
        order, tier, pool = self.order, self.tier, self.tier.pool
        order.offer(seen)
        keep = [extent for extent, was_here in seen if was_here]
        pages = sum([extent[1] for extent, was_here in seen if not was_here])
        missing = pages - pool.free
        if missing > order.pages - count_pages(keep):
            self.counts.no_room_pages += pages
            return False
        if missing > 0:
            order.evict(missing, keep)
            freed, self._slots = pool.split(self._slots, missing)
            tier.drop(freed)
        self._slots = pool.join(self._slots, tier.store(pages))
        order.store(seen)
        self.counts.written_pages += pages
        return True
