"""The contract of eviction policies, and the base class of those that rank nodes one by one."""

from abc import ABCMeta, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from operator import itemgetter
from typing import Any

from kvsim.core.answers import whole_number
from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import ServedCache
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.core.tree import NO_LIMIT, READY, Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.offload_order import OffloadOrder
from kvsim.policies.eviction.ranks import check_rank, check_risen, name, refuse_order

DEPTH = 1e9
"""A page's weight in an entry's place: more than there are entries. Places are exact up to 9 million pages of one prompt."""


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(metaclass=ABCMeta):
    """Says which nodes leave a tier first. One instance serves one tier.

    The core owns the tree, pins and slots. Only evictable nodes leave: ready in the tier, unpinned, without a child there
    (``node.is_evictable(tier)``). Where fewer pages are wanted than a victim has, the core cuts it (``on_split``) and evicts
    the lower part (``on_remove``), or shortens the node (``on_shorten``) unless the policy overrides the former alone. What a
    policy reads of a node changes only while the node is pinned, or with ``on_hit``; its extent also with a cut, a merge or an
    eviction.
    ``node.notes[tier]`` is the policy's own: what it wants to remember of the uses of these pages.
    """

    tier: int = 0
    cut: Callable[[Node, int], Node]
    """Given by the core: cuts a node after so many pages."""
    most_pages: int = NO_LIMIT
    """Set by ``victims`` with each node that it offers: so many of its pages, from the last one on, leave before another node is
    asked for. More than it has: all."""

    empty_cache: Callable[[Tier], ServedCache]
    """An empty cache like the one that the policy serves, of another tier alone. For trials."""
    beside: Sequence[Node] = ()
    """Given by the core for ``on_finish``: recurrent states that the request has begun from or saved, if they are in the pages'
    room. A state (``node.is_state``) is a leaf of the root, evictable like any other, and leaves whole; ``node.partner`` are the
    pages it is the state after."""

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run."""
        self.tier = context.tier
        self.empty_cache = lambda tier: Cache([tier], [], Rules(), context.page_tokens)

    def variant(self) -> "EvictionPolicy":
        """The policy that these settings stand for: this one, unless a setting chooses an algorithm of another class."""
        return self

    def on_arrival(self, request: Request, now: float) -> None:
        """The request has arrived and waits to be admitted. Only where time passes: a replay has no queue and says nothing."""

    def on_request(self, request: Request, now: float) -> None:
        """The request is about to use nodes, or to insert some: the next ``on_hit`` and ``on_insert`` are its own.

        A request is announced for each of the two, and once more if it was retracted.
        """

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        """The request has finished; its path, down to ``node``, is about to be unpinned."""

    def on_insert(self, node: Node, now: float) -> None:
        """The node has become ready in the tier."""

    def on_hit(self, node: Node, now: float) -> None:
        """A request uses the node, which is ready in the tier. Its ``hits`` and ``last_used`` count that already."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """A node has been cut. ``lower`` is the old object, ``upper`` a new one with the same history."""

    def on_merge(self, upper: Node, lower: Node) -> None:
        """A cut is undone, since nothing distinguishes the parts any more: ``lower`` becomes the whole, ``upper`` is gone."""

    def on_remove(self, node: Node) -> None:
        """The node leaves the tier, or is about to: it is written to the tier below."""

    def on_shorten(self, node: Node, pages: int) -> None:
        """The last pages of a node, which ``victims`` has offered, are about to leave; the others stay evictable."""

    @abstractmethod
    def on_evictable(self, node: Node) -> None:
        """The node has become evictable: unpinned, or without its last child in the tier."""

    def note_path(self, node: Node, note: Any) -> None:
        """Note the same of a node, of all above it and of the states beside them, when the request that used them finishes.

        On the GPU they are still pinned. In lower tiers they may be evictable already, and are announced anew.
        """
        tier = self.tier
        while node.parent is not None:
            node.note(tier, note)
            if tier and node.is_evictable(tier):
                self.on_evictable(node)
            node = node.parent
        for state in self.beside:
            state.note(tier, note)
            if state.is_evictable(tier):
                self.on_evictable(state)

    @abstractmethod
    def victims(self, now: float) -> Iterator[Node]:
        """Evictable nodes, the first to leave first.

        The core takes each node before it asks for the next, and stops when it has enough. What has been offered and does not
        leave, or only a part of it, is announced again by ``on_evictable``. A node may be offered again in the same
        call if only a part of it has left.
        """

    def cut_offered(self, node: Node) -> None:
        """Cut from the node that is offered what does not leave now."""
        if self.most_pages < node.pages and not node.is_state:
            self.cut(node, node.pages - self.most_pages)

    def offload_order(self, capacity_pages: int) -> OffloadOrder:
        """The order of single pages in vLLM's CPU tier. Raises ValueError if the policy has none."""
        raise ValueError(f"{type(self).__name__} does not order the single pages of vLLM's CPU tier: choose lru or arc")


@mypyc_attr(allow_interpreted_subclasses=True)
class BypassEviction(EvictionPolicy):
    """Says after each request which pages stay, of the tier's and of the request's own: a request may leave nothing behind.

    Running requests take no room and pin nothing, so this is a bound on what a tier of some size can do, and no tier. With
    more room it hits no less. Rejected are the requests that would be rejected under any other policy.

    A policy of this kind keeps account of its pages by itself: ``bounds/bypass.py`` plays it, in a replay of one tier only. The
    same object may play again.
    """

    def on_evictable(self, node: Node) -> None:
        """Never told: there are no nodes."""

    def victims(self, now: float) -> Iterator[Node]:
        """Never asked: what does not stay is gone."""
        return iter(())

    @abstractmethod
    def prepare(self, requests: Sequence[Request], usable_pages: Sequence[int]) -> None:
        """Called before each run, after ``bind``: the requests to be served, and how many leading pages of each may be hits."""

    @abstractmethod
    def use(self, request: Request) -> tuple[int, int]:
        """Serve the next of those requests. Returns its hit pages and, after it, the pages kept of all requests.

        What is kept is at most the tier's capacity and prefix-closed: a page stays only if all pages before it do.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
class RankedEviction(EvictionPolicy):
    """Evicts by a rank that each node has for itself: the least leaves first.

    Leaves stand in a lazy queue: an entry is made when a node becomes evictable and looked at when it comes to the front. One
    whose node is not evictable is dropped, one whose rank has risen is put back. A rank may change only while its node is
    pinned, or rise; a policy whose rank falls calls ``on_evictable`` again. Anything else is a PolicyError.

    The queue is a sorted line and a heap: an entry that belongs behind the whole line, or before it, as nearly all of an LRU do,
    is put there, and any other goes to the heap.
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.line: deque[Any] = deque()
        """Entries (rank, place among equals, node) in ascending order: pages of equal rank are of one path, of which the deeper
        ones leave first."""
        self.heap: list[Any] = []
        """More of them."""
        self._entries = 0
        self._compact_at = 1024
        self._offered: Node | None = None
        self._untaken: dict[Node, None] = {}
        """Offered in this pass to a subclass's ``victims``, which kept them to itself."""
        self._name = name(self)
        self._ranks_by_place = type(self).pages_before is not RankedEviction.pages_before

    @abstractmethod
    def rank(self, node: Node) -> Any:
        """The node's place in the order of leaving; comparable with every other node's."""

    def pages_before(self, node: Node, next_rank: Any) -> int:
        """How many of a victim's pages, from the last one on, leave before a leaf of ``next_rank``: 1 or more.

        All of them, unless the rank of a page depends on where it is: then the others may have to wait.
        """
        return node.pages

    def on_evictable(self, node: Node) -> None:
        if node is self._offered:
            self._offered = None
        self._entries += 1
        self._enter(self.rank(node), self._entries - node.depth * DEPTH, node)
        if len(self.heap) + len(self.line) > self._compact_at:
            self._compact()

    def _enter(self, rank: Any, place: float, node: Node) -> None:
        entry, line = (rank, place, node), self.line
        try:
            is_last = bool(line) and entry > line[-1]
            if not is_last or type(rank) is tuple:  # a NaN alone is behind nothing
                check_rank(self, node, rank)
            if is_last or not line:
                line.append(entry)
            elif entry < line[0]:
                line.appendleft(entry)
            else:
                heappush(self.heap, entry)
        except (TypeError, ValueError) as error:
            refuse_order(self, [rank, *self._ranks()], error)

    def _compact(self) -> None:
        """Keep one entry for each evictable node, the last one."""
        entries = sorted([*self.line, *self.heap], key=itemgetter(1), reverse=True)
        places = {node: place for _, place, node in entries if node.is_evictable(self.tier)}
        ranked: list[Any] = [(self.rank(node), place, node) for node, place in places.items()]
        try:
            for rank, _, node in ranked:
                check_rank(self, node, rank)
            ranked.sort()
        except (TypeError, ValueError) as error:
            refuse_order(self, [rank for rank, _, _ in ranked], error)
        self.line.clear()
        self.line.extend(ranked)
        self.heap.clear()
        self._compact_at = max(1024, 2 * len(self.line))

    def victims(self, now: float) -> Iterator[Node]:
        tier, line, heap = self.tier, self.line, self.heap
        self._offer_again()
        untaken = self._untaken
        while line or heap:
            entry = self._next_entry()
            node: Node = entry[2]
            if node.state[tier] != READY or node.pins[tier] or node.children_in[tier] or untaken and node in untaken:
                continue
            rank = self.rank(node)
            if rank != entry[0]:
                check_risen(self, node, entry[0], rank)
                self._enter(rank, entry[1], node)
                continue
            if self._ranks_by_place:
                self._limit_to_next(node)
            self._offered = node
            yield node
            self._look_back()

    def _look_back(self) -> None:
        """Remember what was offered last, if it is still there and has not been announced again."""
        if self._offered is not None and self._offered.is_evictable(self.tier):
            self._untaken[self._offered] = None

    def _offer_again(self) -> None:
        """Enter anew what the last pass has offered and is still there."""
        self._look_back()
        self._offered = None
        if self._untaken:
            nodes = list(self._untaken)
            self._untaken.clear()
            for node in nodes:
                if node.is_evictable(self.tier):
                    self.on_evictable(node)

    def _next_entry(self) -> Any:
        """Take the first entry out of the queue."""
        line, heap = self.line, self.heap
        try:
            if not line or heap and heap[0] < line[0]:
                return heappop(heap)
        except (TypeError, ValueError) as error:
            refuse_order(self, self._ranks(), error)
        return line.popleft()

    def _ranks(self) -> list[Any]:
        return [entry[0] for entry in [*self.line, *self.heap]]

    def _limit_to_next(self, node: Node) -> None:
        """Of a victim, which is out of the queue, offer no pages that leave only after the next leaf."""
        following = [*self.heap[:1], *islice(self.line, 1)]
        self.most_pages = NO_LIMIT
        if following:
            try:
                next_rank = min(following)[0]
            except (TypeError, ValueError) as error:
                refuse_order(self, self._ranks(), error)
            policy: Any = self
            answer: object = policy.pages_before(node, next_rank)
            self.most_pages = whole_number(self._name, "pages_before()", answer, NO_LIMIT, 1)
