"""Recurrent states of hybrid models, saved after a page of a prompt: where they are, and the longest one that a prompt can use.

A cached prefix of a hybrid model is worth nothing unless a state was saved at its end, since a state cannot be cut. A state is
named by the last page before it: a page id names everything up to its page, and so does a state.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from sortedcontainers import SortedDict

from kvsim.core.cache import View
from kvsim.core.edge import Edge
from kvsim.core.residency import Residency
from kvsim.core.runs import Run
from kvsim.core.tier import CPU, GPU, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import Transfers
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node

T = TypeVar("T")


class Place(NamedTuple):
    """Where a state lies. The path up to a page is always the same, so all three follow from the page."""

    page: int
    """The last page before the state, which names it."""
    depth: int
    """Pages up to there."""
    run: int
    """The first page of its run, in the normalised runs of any prompt that goes through it."""


def places_after(runs: tuple[Run, ...], depths: Iterable[int]) -> Iterator[Place]:
    """Where the states after so many pages lie. ``runs`` are normalised; ``depths`` ascend from 1 to the pages there are."""
    before, at = 0, iter(runs)
    start, pages = next(at, (0, 0))
    for depth in depths:
        while depth > before + pages:
            before += pages
            start, pages = next(at)
        yield Place(start + depth - before - 1, depth, start)


def first_of_run(node: Node) -> int:
    """The first page of the run that the last page of a node lies in."""
    start = node.runs[-1][0]
    while len(node.runs) == 1 and node.parent is not None and node.parent.runs and sum(node.parent.runs[-1]) == start:
        node = node.parent
        start = node.runs[-1][0]
    return start


class StateIndex(Generic[T]):
    """What is known of the state after a page, by page id.

    A run of a prompt begins at the same page in all prompts that share it, so what is known is filed by the first page of its
    run. A look-up goes through the runs of a prompt from the last one on, at one question to a dictionary for each, and searches
    only where something is filed.
    """

    def __init__(self) -> None:
        self._states: Any = SortedDict()
        """(place, state) by page."""
        self._runs: dict[int, tuple[int, list[int]]] = {}
        """By the first page of a run: the pages before the run, and its pages after which there is a state, ascending."""

    def __len__(self) -> int:
        return len(self._states)

    def put(self, place: Place, state: T) -> None:
        """Know the state at this place."""
        if place.page not in self._states:
            before = place.depth - (place.page - place.run + 1)
            insort(self._runs.setdefault(place.run, (before, []))[1], place.page)
        self._states[place.page] = place, state

    def get(self, page: int) -> T | None:
        """The state after this page."""
        found: tuple[Place, T] | None = self._states.get(page)
        return found[1] if found else None

    def pop(self, page: int) -> None:
        """Forget the state after this page, if there is one."""
        if found := self._states.pop(page, None):
            run = found[0].run
            pages = self._runs[run][1]
            del pages[bisect_left(pages, page)]
            if not pages:
                del self._runs[run]

    def values(self) -> list[T]:
        """All that is known."""
        return [state for _, state in self._states.values()]

    def deepest_first(self, runs: tuple[Run, ...], limit: int) -> Iterator[tuple[int, T]]:
        """(depth in pages, state) of a prompt's states within its first ``limit`` pages, the deepest first."""
        known = self._runs
        for start, pages in reversed(runs):
            if start in known:
                before, found = known[start]
                end = bisect_left(found, start + min(pages, limit - before))
                for page in reversed(found[:end]):
                    yield before + page - start + 1, self._states[page][1]

    def along(self, runs: tuple[Run, ...]) -> list[tuple[Place, T]]:
        """All states after pages of these runs, which may begin anywhere."""
        return [self._states[page] for start, pages in runs for page in self._states.irange(start, start + pages - 1)]


class DetachedStates:
    """States that outlive the KV of their prefix on the GPU: a cache of its own, least recently used first to go.

    ``capacity`` is in states, 1 or more; None keeps all.
    """

    def __init__(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be 1 or more, not {capacity}")
        self.capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return len(self._recency)

    def __contains__(self, page: int) -> bool:
        return page in self._recency

    def __iter__(self) -> Iterator[int]:
        """The pages after which there is a state, least recently used first."""
        return iter(self._recency)

    def insert(self, place: Place) -> None:
        """Keep the state at a place, as the most recent one."""
        self._index.put(place, place.page)
        self.touch(place.page)
        if self.capacity is not None and len(self._recency) > self.capacity:
            oldest, _ = self._recency.popitem(last=False)
            self._index.pop(oldest)

    def touch(self, page: int) -> None:
        """The state is the most recent one now."""
        self._recency[page] = None
        self._recency.move_to_end(page)

    def longest(self, runs: tuple[Run, ...], limit: int) -> tuple[int, int] | None:
        """(depth in pages, page) of the prompt's deepest state within its first ``limit`` pages."""
        return next(self._index.deepest_first(runs, limit), None)

    def clear(self) -> None:
        """Give all states up."""
        self._index: StateIndex[int] = StateIndex()
        self._recency: OrderedDict[int, None] = OrderedDict()


@dataclass
class CheckpointCounts:
    """What became of recurrent states."""

    saved: int = 0
    used: int = 0
    """Requests that began from one."""
    evicted: int = 0
    """Given up: in no tier any more, and not among the detached."""
    detached: int = 0
    """Kept when the KV of their prefix left the GPU."""
    no_room: int = 0
    """Not saved, as everything in the tier was in use."""
    bytes: int = 0
    """Of all states saved."""
    tokens_lost_to_missing_state: int = 0
    """Prompt tokens whose KV was there, but after the last state that was."""


class StateStore:
    """The states in the tiers of a residency: those of the KV cache or, if states have room of their own, tiers of states only.

    A state is a leaf of the tree's root that takes ``units`` slots of its tier, all or none; its one run begins at a number
    below zero, so that no prompt finds it (``Node.is_state``). Copies, pins and transfers of such a leaf are like any other
    node's.
    """

    def __init__(self, transfers: Transfers, units: int, detached: DetachedStates | None = None) -> None:
        self.transfers = transfers
        self.residency: Residency = transfers.residency
        self.tiers = self.residency.tiers
        self.gpu = self.tiers[GPU]
        self._sources = View(self.gpu).sources
        self.units = units
        self.detached = detached
        self.counts = CheckpointCounts()
        self.index: StateIndex[Node] = StateIndex()
        self._came = 0
        """States that were saved when there was none of that place, in a tier or detached."""

    @staticmethod
    def page_of(node: Node) -> int:
        """The page after which the state was saved."""
        return -1 - node.runs[0][0] // STRIDE

    def count(self, state_bytes: int) -> CheckpointCounts:
        """What became of all states, each of so many bytes."""
        alive = {self.page_of(node) for node in self.index.values() if any(node.state)}
        alive.update(self.detached or ())
        self.counts.evicted = self._came - len(alive)
        self.counts.bytes = self.counts.saved * state_bytes
        return self.counts

    def find(self, page: int) -> Node | None:
        """The state after a page, if a tier has it or is getting it."""
        node = self.index.get(page)
        if node is None or any(node.state):
            return node
        self.index.pop(page)
        return None

    def deepest(self, runs: tuple[Run, ...], limit: int) -> tuple[int, Node] | None:
        """(depth in pages, state) of the prompt's deepest usable state within its first ``limit`` pages."""
        gone, found = [], None
        for depth, node in self.index.deepest_first(runs, limit):
            if self.is_usable(node):
                found = depth, node
                break
            if not any(node.state):
                gone.append(self.page_of(node))
        for page in gone:
            self.index.pop(page)
        return found

    @staticmethod
    def is_usable(node: Node) -> bool:
        """Whether a request can begin from this state now."""
        return node.state[GPU] in (READY, LEAVING) or any(state == READY for state in node.state[CPU:])

    def save(self, place: Place, now: float, slots: Any = None, end: Node | None = None) -> Any:
        """Keep the state at a place on the GPU: in some of these slots, or in slots that are free or freed. Returns the slots
        that are left. ``end`` is the node that ends with its page, if it is in the same tree.
        """
        residency, gpu = self.residency, self.gpu
        node = self.find(place.page)
        if node is not None and end is not None:
            self.join_to(node, end)
        if node is not None and node.state[GPU] != ABSENT:
            if node.state[GPU] == LEAVING:
                self.transfers.stay(node, gpu, now)
            self._use(node, now)
            return slots
        if slots is None:
            if not self.transfers.make_room(gpu, self.units, now) or gpu.pool.free - gpu.promised_pages < self.units:
                self.counts.no_room += 1
                return None
            slots = gpu.pool.take(self.units)
        if node is None:
            tree = residency.tree
            node = tree.add(tree.root, ((STRIDE * (-1 - place.page), self.units),), self.units, now)
            node.depth, node.is_state = place.depth - self.units, True
            if end is not None:
                self.join_to(node, end)
            self.index.put(place, node)
            self._came += self.detached is None or place.page not in self.detached
        else:
            self._use(node, now)
        mine, left = gpu.pool.split(slots, self.units)
        residency.add_copy(node, gpu, INCOMING, mine)
        residency.set_ready(node, gpu, now)
        self.counts.saved += 1
        for edge in gpu.below:
            self.transfers.offer_path(node, edge, now)
        return left

    def adopt(self, state: Node, end: Node | None) -> None:
        """Know a state that has been put into the tree, and the node that ends with it."""
        page = self.page_of(state)
        self.index.put(Place(page, state.depth + state.pages, page if end is None else first_of_run(end)), state)
        self._came += 1
        if end is not None:
            self.join_to(state, end)

    @staticmethod
    def join_to(state: Node, end: Node) -> None:
        """Let a state and the node of pages that ends with it know each other."""
        state.partner, end.partner = end, state

    def follow(self, page: int, edge: Edge, now: float) -> None:
        """Copy the state after a page down over an edge of the GPU, where the KV before it is already."""
        node, lower = self.find(page), edge.lower
        if node is not None and node.state[GPU] == READY and not node.state[lower.index]:
            if self.transfers.make_room(lower, self.units, now):
                self.transfers.write_down(node, edge)
            else:
                self.residency.counts.no_room_pages += self.units

    def _use(self, node: Node, now: float) -> None:
        self.residency.use([node], now, is_first=True)

    def pin(self, node: Node, now: float) -> Tier:
        """Keep a usable state in the tier that it is read from, which is returned. A state that is leaving stays."""
        if node.state[GPU] == LEAVING:
            self.transfers.stay(node, self.gpu, now)
            self.residency.counts.revived_pages += node.pages
        tier = next(tier for tier in self.tiers if node.state[tier.index] == READY)
        self.residency.pin(node, tier)
        return tier

    def begin_from(self, node: Node, now: float, *, is_first: bool) -> None:
        """A request begins from this state; one that resumes does not use it once more."""
        self.residency.use([node], now, is_first=is_first)

    def load(self, node: Node, slots: Any, now: float) -> list[Transfer]:
        """Bring a state to the GPU, into these slots: straight from a tier directly below or, as pages of KV, through the tier
        between. Returns what is to be carried out, the load last; nothing if the tier between has no room.
        """
        residency = self.residency
        source, between = next((tier, between) for tier, between in self._sources if node.state[tier.index] == READY)
        read: list[Transfer] = []
        before: list[Transfer] = []
        if between is not None:
            if node.state[between.index] or not self.transfers.make_room(between, self.units, now):
                return []
            residency.promise_copy(node, between)
            before = self.transfers.flush()
            read = [self.transfers.start(Transfer(source, between, [node], goes_down=False))]
        residency.add_copy(node, self.gpu, INCOMING, slots)
        load = Transfer(between or source, self.gpu, [node], goes_down=False, after=read)
        load.begun = not read
        return [*before, *read, self.transfers.start(load)]

    def keep_recent(self, runs: tuple[Run, ...], depth: int, limit: int) -> None:
        """Of the path's states within its first ``depth`` pages, keep ``limit``: those used longest ago are given up."""
        states = [node for _, node in self.index.deepest_first(runs, depth) if any(node.state)]
        states.sort(key=lambda node: node.last_used)
        for node in states[: max(0, len(states) - limit)]:
            for tier in self.tiers:
                if node.state[tier.index] == READY and not node.pins[tier.index]:
                    self.residency.free(node, tier)

    def clear(self) -> None:
        """All states are given up."""
        self.index = StateIndex()


STRIDE = 1 << 32
"""Between the numbers of two states' runs: more than a state can take slots."""
