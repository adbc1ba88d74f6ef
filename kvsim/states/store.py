"""Saved recurrent states of hybrid models: where they are stored, and the deepest one that a prompt can use.

A state cannot be cut, so a hybrid model can reuse a cached prefix only up to a page after which a state was saved. Like a page
id, a state stands for a whole prefix; it is named by the prefix's last page.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from sortedcontainers import SortedDict

from kvsim.core.loading import LowerTiers
from kvsim.core.prompt_index import PromptIndex
from kvsim.core.residency import Residency
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node
from kvsim.pages.extents import Extent

T = TypeVar("T")


class Place(NamedTuple):
    """Where on a path a state was saved. The path up to a page is always the same, so ``page`` determines the other two."""

    page: int
    """The last page before the state, which is its name."""
    depth: int
    """Pages up to and including ``page``."""
    extent_start: int
    """The first page of the extent that contains ``page``, in the normalised extents of any prompt through it."""


def places_after(extents: tuple[Extent, ...], depths: Iterable[int]) -> Iterator[Place]:
    """Yield the places of states at ``depths`` pages, which ascend from 1 up to the pages in ``extents``, normalised."""
    before, at = 0, iter(extents)
    start, pages = next(at, (0, 0))
    for depth in depths:
        while depth > before + pages:
            before += pages
            start, pages = next(at)
        yield Place(start + depth - before - 1, depth, start)


def first_of_extent(node: Node) -> int:
    """Return the first page of the extent that contains a node's last page."""
    start = node.runs[-1][0]
    while len(node.runs) == 1 and node.parent is not None and node.parent.runs and sum(node.parent.runs[-1]) == start:
        node = node.parent
        start = node.runs[-1][0]
    return start


class StateIndex(Generic[T]):
    """Maps page ids to the states after them, and finds the states along a prompt.

    An extent begins at the same page in all prompts that share it, so entries are grouped by the first page of theirs. A search
    visits a prompt's extents from the last to the first: one dictionary look-up per extent, and a bisection only where there are
    entries.
    """

    def __init__(self) -> None:
        self._states: Any = SortedDict()
        """(place, state) by page."""
        self._extents: dict[int, tuple[int, list[int]]] = {}
        """By first page of an extent: the number of pages before the extent, and its pages followed by a state, ascending."""

    def __len__(self) -> int:
        return len(self._states)

    def put(self, place: Place, state: T) -> None:
        """Add or replace the state at this place."""
        if place.page not in self._states:
            before = place.depth - (place.page - place.extent_start + 1)
            insort(self._extents.setdefault(place.extent_start, (before, []))[1], place.page)
        self._states[place.page] = place, state

    def get(self, page: int) -> T | None:
        """Return the state after this page; None if there is none."""
        found: tuple[Place, T] | None = self._states.get(page)
        return found[1] if found else None

    def pop(self, page: int) -> None:
        """Remove the state after this page, if there is one."""
        if found := self._states.pop(page, None):
            start = found[0].extent_start
            pages = self._extents[start][1]
            del pages[bisect_left(pages, page)]
            if not pages:
                del self._extents[start]

    def pages(self) -> list[int]:
        """Return the pages that a state follows, in order."""
        return list(self._states)

    def values(self) -> list[T]:
        """Return all states."""
        return [state for _, state in self._states.values()]

    def deepest_first(self, extents: tuple[Extent, ...], limit: int) -> Iterator[tuple[int, T]]:
        """Yield (depth in pages, state) of a prompt's states within its first ``limit`` pages, deepest first."""
        known = self._extents
        for start, pages in reversed(extents):
            if start in known:
                before, found = known[start]
                end = bisect_left(found, start + min(pages, limit - before))
                for page in reversed(found[:end]):
                    yield before + page - start + 1, self._states[page][1]

    def along(self, extents: tuple[Extent, ...]) -> list[tuple[Place, T]]:
        """Return the places and states after any page of these extents, which may begin anywhere on a path."""
        return [self._states[page] for start, pages in extents for page in self._states.irange(start, start + pages - 1)]


class StatefulPrompts(PromptIndex):
    """An index of prompts that is told of states, too."""

    def changed(self, extents: tuple[Extent, ...]) -> None:
        start = extents[0][0]
        super().changed(extents if start >= 0 else ((page_before(start), 1),))


class DetachedStates:
    """An LRU cache of states that stay when the KV of their prefix leaves the GPU.

    ``capacity`` is in states, 1 or more; None keeps all.
    """

    def __init__(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity
        self.prompts: PromptIndex | None = None
        """Is told of the pages whose states come and go, if anyone wants to know whose prompts they concern."""
        self.clear()

    def __len__(self) -> int:
        return len(self._recency)

    def __contains__(self, page: int) -> bool:
        return page in self._recency

    def __iter__(self) -> Iterator[int]:
        """Iterate over the pages followed by a state, least recently used first."""
        return iter(self._recency)

    def insert(self, place: Place) -> None:
        """Add the state at a place as the most recent one; evict the oldest if the cache is full."""
        self._index.put(place, place.page)
        self.touch(place.page)
        if self.prompts is not None:
            self.prompts.changed(((place.page, 1),))
        if self.capacity is not None and len(self._recency) > self.capacity:
            self.pop_oldest()

    def pop_oldest(self) -> None:
        """Drop the least recently used state; there must be one."""
        oldest, _ = self._recency.popitem(last=False)
        self._index.pop(oldest)
        if self.prompts is not None:
            self.prompts.changed(((oldest, 1),))

    def touch(self, page: int) -> None:
        """Make a state the most recent one."""
        self._recency[page] = None
        self._recency.move_to_end(page)

    def longest(self, extents: tuple[Extent, ...], limit: int) -> tuple[int, int] | None:
        """Return (depth in pages, page) of the prompt's deepest state within its first ``limit`` pages, or None."""
        return next(self._index.deepest_first(extents, limit), None)

    def clear(self) -> None:
        """Drop all states."""
        self._index: StateIndex[int] = StateIndex()
        self._recency: OrderedDict[int, None] = OrderedDict()


@dataclass
class CheckpointCounts:
    """Recurrent states saved, used and lost since the start of the run."""

    saved: int = 0
    used: int = 0
    """Requests that began from a state."""
    evicted: int = 0
    """Dropped: no longer in any tier, nor detached."""
    detached: int = 0
    """Kept when the KV of their prefix left the GPU."""
    no_room: int = 0
    """Not saved because everything in the tier was in use."""
    bytes: int = 0
    """Bytes of all states saved."""
    tokens_lost_to_missing_state: int = 0
    """Prompt tokens with cached KV that could not be reused, since they come after the deepest usable state."""


class StateStore:
    """The states in a residency's tiers: the tiers of the KV cache or, if states have their own memory, tiers of states only.

    A state is a leaf of the tree's root (``Node.is_state``) that takes ``units`` slots of a tier, all or none. Its single extent
    has a negative start, so no prompt matches it. Its copies, pins and transfers work like those of any node.
    """

    def __init__(self, transfers: LowerTiers, units: int, detached: DetachedStates | None = None) -> None:
        self.transfers = transfers
        self.residency: Residency = transfers.residency
        self.tiers = self.residency.tiers
        self.gpu = self.tiers[GPU]
        self._view = transfers.views[self.gpu.index]
        self._eviction = transfers.eviction
        self._under_way = transfers.under_way
        self._write_down = transfers.write_down
        self.units = units
        self.detached = detached
        self.counts = CheckpointCounts()
        self.index: StateIndex[Node] = StateIndex()
        self._arrived = 0
        """Number of states saved at places that had no state, neither in a tier nor detached."""

    @staticmethod
    def page_of(node: Node) -> int:
        """Return the page after which a state was saved."""
        return page_before(node.runs[0][0])

    def count(self, state_bytes: int) -> CheckpointCounts:
        """Return the counts, with ``evicted`` and ``bytes`` brought up to date."""
        alive = {self.page_of(node) for node in self.index.values() if node.copies}
        alive.update(self.detached or ())
        self.counts.evicted = self._arrived - len(alive)
        self.counts.bytes = self.counts.saved * state_bytes
        return self.counts

    def find(self, page: int) -> Node | None:
        """Return the state after a page if a tier has it or is receiving it."""
        node = self.index.get(page)
        if node is None or node.copies:
            return node
        self.index.pop(page)
        return None

    def gpu_slots(self, page: int) -> Any:
        """Return the slots of the state after a page on the GPU, which has or is receiving it."""
        node = self.index.get(page)
        assert node is not None
        return node.slots[self.gpu.index]

    def deepest(self, extents: tuple[Extent, ...], limit: int, *, on_gpu: bool = False) -> tuple[int, Node] | None:
        """Return (depth in pages, state) of the prompt's deepest usable state within its first ``limit`` pages, or None.

        With ``on_gpu``, states that would have to be loaded are not usable.
        """
        gone, found = [], None
        for depth, node in self.index.deepest_first(extents, limit):
            if node.state[GPU] == READY or not on_gpu and self.is_usable(node):
                found = depth, node
                break
            if not node.copies:
                gone.append(self.page_of(node))
        for page in gone:
            self.index.pop(page)
        return found

    @staticmethod
    def is_usable(node: Node) -> bool:
        """Whether a request can begin from this state now."""
        return node.state[GPU] in (READY, LEAVING) or READY in node.state

    def save(self, place: Place, now: float, slots: Any = None, end: Node | None = None) -> Any:
        """Save the state at a place on the GPU, in the last of ``slots`` or, without them, in free slots, evicting as needed.

        ``end`` is the node that ends with the state's page, if it is in the same tree. Returns the slots that are left.
        """
        residency, gpu = self.residency, self.gpu
        node = self.find(place.page)
        if node is not None and end is not None:
            self.join_to(node, end)
        if node is not None and node.state[GPU] != ABSENT:
            if node.state[GPU] == LEAVING:
                self._eviction.revive(node, gpu, now)
            self._use(node, now)
            return slots
        if slots is None:
            if not self._eviction.make_room(gpu, self.units, now) or gpu.pool.free - gpu.reserved_pages < self.units:
                self.counts.no_room += 1
                return None
            slots = residency.take(gpu, self.units)
        if node is None:
            tree = residency.tree
            node = tree.add(tree.root, ((STRIDE * (-1 - place.page), self.units),), self.units, now)
            node.depth, node.is_state = place.depth - self.units, True
            if end is not None:
                self.join_to(node, end)
            self.index.put(place, node)
            self._arrived += self.detached is None or place.page not in self.detached
        else:
            self._use(node, now)
        left, mine = gpu.pool.split(slots, gpu.pool.count(slots) - self.units)
        residency.add_copy(node, gpu, INCOMING, mine)
        residency.set_ready(node, gpu, now)
        self.counts.saved += 1
        for edge in gpu.below:
            self._write_down.offer_path(node, edge, now)
        return left

    def adopt(self, state: Node, end: Node | None) -> None:
        """Index a state that was added to the tree, and link it with the node that ends where it was saved."""
        page = self.page_of(state)
        self.index.put(Place(page, state.depth + state.pages, page if end is None else first_of_extent(end)), state)
        self._arrived += 1
        if end is not None:
            self.join_to(state, end)

    @staticmethod
    def join_to(state: Node, end: Node) -> None:
        """Make a state and the node of pages that ends where it was saved each other's ``partner``."""
        state.partner, end.partner = end, state

    def follow(self, page: int, edge: Edge, now: float) -> None:
        """Copy the state after a page down over an edge of the GPU; the lower tier has the KV of its prefix already."""
        node, lower = self.find(page), edge.lower
        if node is not None and node.state[GPU] == READY and not node.state[lower.index]:
            if self._eviction.make_room(lower, self.units, now):
                self._write_down.write_down(node, edge)
            else:
                self.residency.counts.no_room_pages += self.units

    def _use(self, node: Node, now: float) -> None:
        self.residency.use([node], now, is_first=True)

    def pin(self, node: Node, now: float) -> Tier:
        """Pin a usable state in the tier that it will be read from. Returns that tier. A state that is leaving stays."""
        if node.state[GPU] == LEAVING:
            self._eviction.revive(node, self.gpu, now)
            self.residency.counts.revived_pages += node.pages
        tier = next(tier for tier in self.tiers if node.state[tier.index] == READY)
        self.residency.pin(node, tier)
        return tier

    def begin_from(self, node: Node, now: float, *, is_first: bool) -> None:
        """Record that a request begins from this state; only its first admission (``is_first``) counts as a use."""
        self.residency.use([node], now, is_first=is_first)

    def load(self, node: Node, slots: Any, now: float) -> list[Transfer]:
        """Load a state into these slots of the GPU: directly from the tier below or, like pages of KV, through a tier between.

        Returns the transfers to carry out, the load last; none if the tier between has no room.
        """
        residency = self.residency
        source = self._view.source_of(node)
        if source is None:
            return []
        between = source.between
        read: list[Transfer] = []
        before: list[Transfer] = []
        if between is not None and source.read is not None:
            if not self._eviction.make_room(between, self.units, now):
                return []
            residency.reserve_copy(node, between)
            before = self._under_way.flush()
            read = [self._under_way.start(Transfer(source.read, [node], goes_down=False))]
        residency.add_copy(node, self.gpu, INCOMING, slots)
        load = Transfer(source.load, [node], goes_down=False, after=read)
        load.begun = not read
        return [*before, *read, self._under_way.start(load)]

    def keep_recent(self, extents: tuple[Extent, ...], depth: int, limit: int) -> None:
        """Keep only the ``limit`` most recently used of the path's states within its first ``depth`` pages."""
        states = [node for _, node in self.index.deepest_first(extents, depth) if node.copies]
        states.sort(key=lambda node: node.last_used)
        for node in states[: max(0, len(states) - limit)]:
            for tier in self.tiers:
                if node.state[tier.index] == READY and not node.pins[tier.index]:
                    self.residency.free(node, tier)

    def clear(self) -> None:
        """Empty the index."""
        self.index = StateIndex()


STRIDE = 1 << 32
"""Distance between the starts of two states' extents; more slots than any state takes."""


def page_before(start: int) -> int:
    """Return the page after which the state was saved whose extent begins at ``start``, which is negative."""
    return -1 - start // STRIDE
