"""Recurrent states of hybrid models, saved after a page of a prompt: where they are, and the longest one that a prompt can use.

A cached prefix of a hybrid model is worth nothing unless a state was saved at its end, since a state cannot be cut. A state is
named by the last page before it: a page id names everything up to its page, and so does a state.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedDict

from kvsim.core.movement import CPU, GPU, Movement
from kvsim.core.pages import Run
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node

T = TypeVar("T")


def page_before(runs: tuple[Run, ...], depth: int) -> int:
    """The id of the page at which the first ``depth`` pages end; ``depth`` is at least 1 and at most the pages there are."""
    for start, pages in runs:
        if depth <= pages:
            return start + depth - 1
        depth -= pages
    raise ValueError("the prompt has fewer pages")


class StateIndex(Generic[T]):
    """What is known of the state after a page, by page id: found by runs, at O(log states) a run."""

    def __init__(self) -> None:
        self._states: Any = SortedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __setitem__(self, page: int, state: T) -> None:
        self._states[page] = state

    def get(self, page: int) -> T | None:
        """The state after this page."""
        found: T | None = self._states.get(page)
        return found

    def pop(self, page: int) -> None:
        """Forget the state after this page, if there is one."""
        self._states.pop(page, None)

    def values(self) -> list[T]:
        """All that is known."""
        return list(self._states.values())

    def deepest_first(self, runs: tuple[Run, ...], limit: int) -> Iterator[tuple[int, T]]:
        """(depth in pages, state) of a prompt's states within its first ``limit`` pages, the deepest first."""
        depth, within = 0, []
        for start, pages in runs:
            pages = min(pages, limit - depth)
            if pages <= 0:
                break
            within.append((start, pages, depth))
            depth += pages
        for start, pages, before in reversed(within):
            for page in self._states.irange(start, start + pages - 1, reverse=True):
                yield before + page - start + 1, self._states[page]

    def along(self, runs: tuple[Run, ...]) -> list[T]:
        """All states after pages of these runs."""
        return [self._states[page] for start, pages in runs for page in self._states.irange(start, start + pages - 1)]


class DetachedStates:
    """States that outlive the KV of their prefix on the GPU: a cache of its own, least recently used first to go.

    ``capacity`` is in states; None keeps all.
    """

    def __init__(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity must be 0 or more, not {capacity}")
        self.capacity = capacity
        self.evicted = 0
        self._index: StateIndex[int] = StateIndex()
        self._recency: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recency)

    def insert(self, page: int) -> None:
        """Keep the state after a page, as the most recent one."""
        if self.capacity == 0:
            self.evicted += 1
            return
        self._index[page] = page
        self.touch(page)
        if self.capacity is not None and len(self._recency) > self.capacity:
            oldest, _ = self._recency.popitem(last=False)
            self._index.pop(oldest)
            self.evicted += 1

    def touch(self, page: int) -> None:
        """The state is the most recent one now."""
        self._recency[page] = None
        self._recency.move_to_end(page)

    def longest(self, runs: tuple[Run, ...], limit: int) -> tuple[int, int] | None:
        """(depth in pages, page) of the prompt's deepest state within its first ``limit`` pages."""
        return next(self._index.deepest_first(runs, limit), None)

    def remove(self, page: int) -> None:
        """Give the state up."""
        if self._recency.pop(page, self) is not self:
            self._index.pop(page)

    def clear(self) -> None:
        """Give all states up."""
        self.__init__(self.capacity)  # type: ignore[misc]


@dataclass(slots=True)
class CheckpointCounts:
    """What became of recurrent states."""

    saved: int = 0
    used: int = 0
    """Requests that began from one."""
    evicted: int = 0
    """Given up, and in no tier any more."""
    detached: int = 0
    """Kept when the KV of their prefix left the GPU."""
    no_room: int = 0
    """Not saved, as everything in the tier was in use."""
    bytes: int = 0
    """Of all states saved."""
    tokens_lost_to_missing_state: int = 0
    """Prompt tokens whose KV was there, but after the last state that was."""


class StateStore:
    """The states in the tiers of ``home``: those of the KV cache, or, if states have room of their own, tiers of states only.

    A state is a leaf of the tree's root that takes ``units`` slots of its tier, all or none; its one run begins at a number
    below zero, so that no prompt finds it (``Node.is_state``). Copies, pins and transfers of such a leaf are like any other
    node's.
    """

    def __init__(self, home: Movement, units: int) -> None:
        self.home = home
        self.units = units
        self.counts = CheckpointCounts()
        self.index: StateIndex[Node] = StateIndex()
        self._created = 0

    @staticmethod
    def page_of(node: Node) -> int:
        """The page after which the state was saved."""
        return -1 - node.runs[0][0] // STRIDE

    def count(self, state_bytes: int) -> CheckpointCounts:
        """What became of all states, each of so many bytes."""
        alive = sum(any(node.state) for node in self.index.values())
        self.counts.evicted = self._created - alive - self.counts.detached
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

    def save(self, page: int, depth: int, now: float, slots: Any = None, end: Node | None = None) -> Any:
        """Keep the state after a page, the ``depth``-th of its prompt, on the GPU: in some of these slots, or in slots that are
        free or freed. Returns the slots that are left. ``end`` is the node that ends with this page, if it is in ``home``.
        """
        home, gpu = self.home, self.home.gpu
        node = self.find(page)
        if node is not None and end is not None:
            self.join_to(node, end)
        if node is not None and node.state[GPU] != ABSENT:
            if node.state[GPU] == LEAVING:
                home.stay(node, gpu, now)
            self._use(node, now)
            return slots
        if slots is None:
            if not home.make_room(gpu, self.units, now) or gpu.pool.free - gpu.owed_pages < self.units:
                self.counts.no_room += 1
                return None
            slots = gpu.pool.take(self.units)
        if node is None:
            node = home.tree.add(home.tree.root, ((STRIDE * (-1 - page), self.units),), self.units, now)
            node.depth = depth - self.units
            if end is not None:
                self.join_to(node, end)
            self.index[page] = node
            self._created += 1
        else:
            self._use(node, now)
        mine, left = gpu.pool.split(slots, self.units)
        home.add_copy(node, gpu, READY, mine)
        node.state[GPU] = ABSENT
        home.set_ready(node, gpu, now)
        gpu.inserted_pages += self.units
        self.counts.saved += 1
        home.offer_path(node, gpu, now)
        return left

    def adopt(self, state: Node, end: Node | None) -> None:
        """Know a state that has been put into the home's tree, and the node that ends with it."""
        self.index[self.page_of(state)] = state
        self._created += 1
        if end is not None:
            self.join_to(state, end)

    @staticmethod
    def join_to(state: Node, end: Node) -> None:
        """Let a state and the node of pages that ends with it know each other."""
        state.partner, end.partner = end, state

    def follow(self, page: int, now: float) -> None:
        """Copy the state after a page to the CPU, where the KV before it is already."""
        home, node = self.home, self.find(page)
        gpu, cpu = home.tiers[: CPU + 1]
        if node is not None and node.state[GPU] == READY and not node.state[CPU]:
            if home.make_room(cpu, self.units, now):
                home.write_down(node, gpu, cpu)
            else:
                home.counts.no_room_pages += self.units

    def _use(self, node: Node, now: float) -> None:
        node.last_used = now
        node.hits += 1
        if self.home.listeners:
            self.home.tell_hits((node,), now)

    def pin(self, node: Node, now: float) -> int:
        """Keep a usable state in the tier that it is read from, which is returned. Pages that are leaving stay."""
        home = self.home
        if node.state[GPU] == LEAVING:
            home.stay(node, home.gpu, now)
            home.counts.revived_pages += node.pages
        tier = next(tier.index for tier in home.tiers if node.state[tier.index] == READY)
        home.pin(node, tier)
        return tier

    def begin_from(self, node: Node, now: float, *, is_use: bool) -> None:
        """A request begins from this state; one that resumes does not use it a further time."""
        if is_use:
            self.counts.used += 1
            self._use(node, now)
        else:
            node.last_used = now

    def load(self, node: Node, slots: Any) -> Transfer:
        """Bring a state from the CPU to the GPU, into these slots."""
        home = self.home
        home.add_copy(node, home.gpu, INCOMING, slots)
        return home.start(Transfer(home.tiers[CPU], home.gpu, [node], begun=True))

    def keep_recent(self, runs: tuple[Run, ...], depth: int, limit: int) -> None:
        """Of the path's states within its first ``depth`` pages, keep ``limit``: those used longest ago are given up."""
        states = [node for _, node in self.index.deepest_first(runs, depth) if any(node.state)]
        states.sort(key=lambda node: node.last_used)
        for node in states[: max(0, len(states) - limit)]:
            for tier in self.home.tiers:
                if node.state[tier.index] == READY and not node.pins[tier.index]:
                    self.home.free(node, tier)

    def clear(self) -> None:
        """All states are given up."""
        self.index = StateIndex()


STRIDE = 1 << 32
"""Between the numbers of two states' runs: more than a state can take slots."""
