"""vLLM's CPU offloading tier: single chunks, offered by every request, in an order that the eviction policy defines.

A chunk is a page or, with larger ones, several pages of the GPU. Chunks have no parents here: any may be stored or evicted. A
request's chunks are handled as runs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvsim.core.copies import Counts
from kvsim.core.tier import Edge
from kvsim.engines.vllm.versions import LATEST, VERSIONS, Version
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, count_pages, pages_named, split_extents, union

if TYPE_CHECKING:
    from kvsim.policies.eviction.offload_order import OffloadOrder, OffloadUse, Placed
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


@dataclass
class OffloadingCounts(Counts):
    """The same in time, with what happens on the GPU: pages moved between the tiers, and pages lost."""

    below_threshold_pages: int = 0
    """Offered, but not stored since they had not been offered often enough."""


class Found(NamedTuple):
    """Chunks that a look-up has found one after another."""

    chunks: list[Extent]
    is_written: bool
    """Whether some of them are still being written."""
    is_read: bool
    """Whether some of them are being loaded."""


NOTHING_FOUND: Final = Found([], is_written=False, is_read=False)


class OffloadTier:
    """The CPU tier: finds chunks to load, and stores chunks that are offered. A store is made whole or not at all.

    Chunks that are being written or loaded are not evicted. The tier's eviction policy provides the order (``offload_order``),
    its placement policy the table of offers (``offer_table``); both raise ValueError if they have none.
    """

    def __init__(
        self,
        edge: Edge,
        counts: "OffloadCounts | OffloadingCounts",
        chunk_pages: int = 1,
        *,
        version: Version = VERSIONS[LATEST],
    ) -> None:
        """``chunk_pages``: pages of the GPU in a chunk."""
        tier = edge.lower
        tier.told_unit = chunk_pages
        self.tier = tier
        self.counts = counts
        self.chunk_pages = chunk_pages
        self.capacity = tier.pool.capacity // chunk_pages
        self._version = version
        self.order: OffloadOrder = version.order(tier.eviction, self.capacity)
        self.offers: OfferTable = edge.placement.offer_table()
        self._writing, self._reading = ExtentOrder(), ExtentOrder()
        """Chunks that are being written; those that are being loaded, with the number of loads."""
        self._slots = tier.store(0)
        """Slots of all stored chunks together."""
        self._told = ExtentOrder()
        """Chunks that the tier's watches know of, if it has any."""

    # --- loads -----------------------------------------------------------------------------------------------------------

    def look_up(self, path: tuple[Extent, ...], first: int) -> Found:
        """Find the chunks of a path from the one at position ``first`` on, up to the first that is not here.

        Versions that hear look-ups count these in the table of offers, of what is found and of the chunk behind it.
        """
        behind = split_extents(path, first)[1]
        chunks = self.order.leading(behind)
        if self._version.hears_look_ups and self.offers.threshold > 1:
            for start, pages in split_extents(behind, count_pages(chunks) + 1)[0]:
                for chunk in range(start, start + pages):
                    self.offers.count(((chunk, 1),))
        if not chunks:
            return NOTHING_FOUND
        return Found(chunks, self._writing.count(chunks) > 0, self._reading.count(chunks) > 0)

    def is_busy(self, path: tuple[Extent, ...]) -> bool:
        """Whether chunks of a path are being written or loaded."""
        return self._writing.count(path) > 0 or self._reading.count(path) > 0

    def begin_load(self, use: "OffloadUse", chunks: list[Extent], first: int) -> None:
        """Load chunks for a request, from the one at position ``first`` of its path on; they stay until ``end_load``."""
        self.order.touch(use, _placed(chunks, first))
        pieces = self._reading.pieces(chunks)
        self.order.begin_read([run for run, loads in pieces if loads is None])
        for run, loads in pieces:
            self._reading.append((run,), value=(loads or 0) + 1)

    def end_load(self, chunks: list[Extent]) -> None:
        """End a load."""
        pieces = self._reading.pieces(chunks)
        self.order.end_read([run for run, loads in pieces if loads == 1])
        for run, loads in pieces:
            if loads > 1:
                self._reading.append((run,), value=loads - 1)
            else:
                self._reading.remove((run,))

    # --- stores ----------------------------------------------------------------------------------------------------------

    def offer(self, use: "OffloadUse", first: int, last: int, path: tuple[Extent, ...]) -> "Placed | None":
        """Offer the chunks of a request's path from position ``first`` to before ``last``; ``path`` is that of its known tokens.

        Returns those that are stored now, which stay until ``end_store``; None if there is no room for all of them.
        """
        offered = split_extents(split_extents(use.path, last)[0], first)[1]
        if not self._version.hears_look_ups:
            self.offers.count(offered)
        ready: Placed = []
        wanted: Placed = []
        known: list[Extent] = []
        place = first
        for run, here in self.order.find(offered):
            if here:
                known.append(run)
                free = [part for part, written in self._writing.pieces((run,)) if written is None]
                ready += [(part, place + part[0] - run[0]) for part in free]
            else:
                wanted += self._admitted(run, place)
            place += run[1]
        if ready:
            self.order.touch(use, ready)
        if wanted:
            self.order.want(use, wanted)
        if not self._store(use, wanted, known):
            return None
        if wanted:
            self.order.look_up(path)
        return wanted

    def _admitted(self, run: Extent, place: int) -> "Placed":
        """Return those of missing chunks that have been offered often enough."""
        if self.offers.threshold < 2:
            return [(run, place)]
        admitted = [part for part, is_admitted in self.offers.pieces((run,)) if is_admitted]
        self.counts.below_threshold_pages += (run[1] - count_pages(admitted)) * self.chunk_pages
        return [(part, place + part[0] - run[0]) for part in admitted]

    def _store(self, use: "OffloadUse", wanted: "Placed", offered: list[Extent]) -> bool:
        """Make room for chunks and store them. Returns False, with nothing stored, if too few others can be evicted.

        ``offered`` chunks, which are stored already, are not evicted.
        """
        order, tier, pool = self.order, self.tier, self.tier.pool
        runs = [run for run, _ in wanted]
        chunks = count_pages(runs)
        missing = chunks - (self.capacity - order.pages)
        if missing > 0:
            keep = self._kept(offered)
            if not order.may_evict(missing, keep):
                self.counts.no_room_pages += chunks * self.chunk_pages
                return False
            evicted = order.evict(missing, keep)
            if tier.watches:
                self._tell_dropped(evicted)
            freed, self._slots = pool.split(self._slots, missing * self.chunk_pages)
            tier.drop(freed)
        self._slots = pool.join(self._slots, tier.store(chunks * self.chunk_pages))
        order.store(use, wanted)
        self._writing.append(runs)
        self.counts.written_pages += chunks * self.chunk_pages
        return True

    def _kept(self, offered: list[Extent]) -> list[Extent]:
        """Return the chunks that are not evicted now: those offered, written and loaded."""
        busy = [run for order in (self._writing, self._reading) for run, _, _ in order.oldest_first()]
        return union([*offered, *busy])

    def end_store(self, chunks: list[Extent]) -> None:
        """End a store: its chunks are ready."""
        self._writing.remove(chunks)
        self.order.end_write(chunks)
        if self.tier.watches:
            self._told.append(chunks)
            for watch in self.tier.watches:
                watch.stored(self.tier, pages_named(chunks, self.chunk_pages))

    def _tell_dropped(self, chunks: list[Extent]) -> None:
        self._told.remove(chunks)
        for watch in self.tier.watches:
            watch.dropped(self.tier, pages_named(chunks, self.chunk_pages))

    # --- the end ---------------------------------------------------------------------------------------------------------

    def finish(self, use: "OffloadUse") -> None:
        """Record that a request has finished: the chunks that it used become the most recent."""
        self.order.finish(use)

    def reset(self) -> None:
        """Drop every chunk. Whoever writes or loads one must have given that up."""
        if self.tier.watches:
            self._tell_dropped([run for run, _, _ in self._told.oldest_first()])
        self._writing, self._reading = ExtentOrder(), ExtentOrder()
        self.tier.drop(self._slots)
        self._slots = self.tier.store(0)
        self.order = self._version.order(self.tier.eviction, self.capacity)


def _placed(chunks: list[Extent], first: int) -> "Placed":
    placed: Placed = []
    for run in chunks:
        placed.append((run, first))
        first += run[1]
    return placed


def use_at_once(tier: OffloadTier, use: "OffloadUse", hit_pages: int, usable_pages: int) -> int:
    """Serve an admitted prompt whose copies take no time. Returns the pages that it loads.

    Its first ``hit_pages`` pages are on the GPU; at most ``usable_pages`` may be reused. A load ends at the first page that is
    not stored here. After a load, the pages that follow it are offered; without one, all pages are.
    """
    loaded, _ = split_extents(tuple(tier.look_up(use.path, hit_pages).chunks), usable_pages - hit_pages)
    pages = count_pages(loaded)
    if pages:
        tier.begin_load(use, list(loaded), hit_pages)
        tier.counts.loaded_pages += pages
    stored = tier.offer(use, hit_pages + pages if pages else 0, count_pages(use.path), use.path)
    if pages:
        tier.end_load(list(loaded))
    if stored:
        tier.end_store([run for run, _ in stored])
    return pages
