"""The contract of eviction policies, and the base class of policies that rank each node on its own."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from operator import itemgetter
from typing import Any, Final

from kvsim.core.answers import whole_number
from kvsim.core.pool import UNLIMITED
from kvsim.core.questions import Eviction
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.ranks import check_rank, check_risen, name, never_still, refuse_order

DEPTH: Final = 1e9
"""Weight of one page of depth in an entry's place; exceeds the number of entries. Exact up to 9 million pages per prompt."""
LEFT: Final = 256
"""Free places that the beginning of a line may always have; beyond that, it has at most four for each entry."""
NEAR_END: Final = 256
"""An entry that belongs among the last ones of a line, this many at most, is put there: moving them costs less than a heap."""
BY_RANK: Final = itemgetter(0)
BY_PLACE: Final = itemgetter(1)
"""To sort entries by place and then by rank compares floats only, which is quicker than comparing entries."""


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(Eviction):
    """The base class of eviction policies. ``Eviction`` says what the core asks and announces."""

    @property
    def needs_future(self) -> bool:
        """Whether it looks ahead in ``context.requests``, so that it cannot serve requests that nobody knows in advance."""
        return False

    @property
    def files(self) -> tuple[str, ...]:
        """Files that its decisions depend on, besides its settings: a run whose files have changed is another one."""
        return ()

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run."""
        self.tier = context.tier
        if context.empty_cache is not None:
            self.empty_cache = context.empty_cache

    def variant(self) -> "EvictionPolicy":
        """Return the policy that these settings stand for: this one, unless a setting selects an algorithm of another class."""
        return self


@mypyc_attr(allow_interpreted_subclasses=True)
class BypassEviction(EvictionPolicy):
    """Decides after each request which pages to keep, among those in the tier and the request's own; it may keep none of these.

    Running requests take no room and pin nothing, so the result bounds what a real tier of the same size can do. More room
    never means fewer hits. It rejects the same requests as any other policy.

    Such a policy keeps track of its pages itself: ``bounds/bypass.py`` runs it, in a replay of one tier only. The same object
    may serve several runs.
    """

    @property
    def needs_future(self) -> bool:
        return True

    def on_evictable(self, node: Node) -> None:
        """Never called: there are no nodes."""

    def victims(self, now: float) -> Iterator[Node]:
        """Never called: ``use`` drops what is not kept."""
        return iter(())

    @abstractmethod
    def prepare(self, requests: Sequence[Request], usable_pages: Sequence[int]) -> None:
        """Called before each run, after ``bind``, with the requests to serve and how many leading pages of each may be hits."""

    @abstractmethod
    def use(self, request: Request) -> tuple[int, int]:
        """Serve the next of these requests. Returns its hit pages and the number of pages kept afterwards.

        The kept pages never exceed the tier's capacity and are prefix-closed: a page is kept only with all pages before it.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
class SteppingEviction(EvictionPolicy):
    """Finds one victim after another by ``next_victim``."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._passes = Pass(self)

    @abstractmethod
    def next_victim(self) -> Node | None:
        """Return the next node of a pass, which no other pass offers until it is announced again; None if there is none."""

    def victims(self, now: float) -> Iterator[Node]:
        return self._passes


class Pass:
    """The victims of one pass after another of a ``SteppingEviction``: an iterator, without the frame of a generator."""

    __slots__ = ("policy",)

    def __init__(self, policy: SteppingEviction) -> None:
        self.policy = policy

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Node:
        node = self.policy.next_victim()
        if node is None:
            raise StopIteration
        return node


@mypyc_attr(allow_interpreted_subclasses=True)
class RankedEviction(SteppingEviction):
    """Evicts by a rank that depends on the node alone: the lowest rank leaves first.

    Leaves wait in a lazy queue. An entry is made when a node becomes evictable and checked when it reaches the front: it is
    dropped if the node is no longer evictable, and put back if its rank has risen. A rank may rise at any time but fall only
    while the node is pinned; a policy that lowers the rank of an evictable node must call ``on_evictable`` again. Anything
    else is a PolicyError.

    The queue is a sorted line plus a heap. An entry that sorts after the whole line, as most of LRU do, is added to its end, one
    that sorts before it to its beginning, and one that belongs near its end is put there; any other goes to the heap.
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.line: list[Any] = []
        """Entries (rank, place among equals, node) in ascending order. Nodes of equal rank lie on one path; the deepest leaves
        first."""
        self.head = 0
        """Number of free places at the beginning of ``line``, which are None."""
        self.heap: list[Any] = []
        """The other entries."""
        self._entries = 0
        self._compact_at = 1024
        self._offered: Node | None = None
        self._offered_entry: tuple[Any, ...] = ()
        """Its entry, which has left the queue."""
        self._last_rank = -inf
        """The rank of the last entry of ``line`` if that is a float, or a larger one; infinite for any other rank."""
        self._heap_rank = inf
        """The lowest rank in ``heap`` if that is a float; infinite without an entry, and lower than all for any other rank."""
        self._untaken: dict[Node, None] = {}
        """Nodes offered in this pass to the ``victims`` of a subclass, which did not pass them on."""
        self._name = name(self)
        self._ranks_by_place = type(self).pages_before is not RankedEviction.pages_before

    @abstractmethod
    def rank(self, node: Node) -> Any:
        """Return the node's rank, comparable with that of any other node; the lowest leaves first."""

    def pages_before(self, node: Node, next_rank: Any) -> int:
        """Return how many of a victim's pages, counted from its end, leave before a leaf of ``next_rank``: at least 1.

        All of them, unless the rank of a page depends on its depth: then the remaining pages may have to wait.
        """
        return node.pages

    def on_evictable(self, node: Node) -> None:
        rank = self.rank(node)
        if node is self._offered:
            self._offered = None
            if self._stays_first(node, rank):
                self.head -= 1
                self.line[self.head] = self._offered_entry
                return
        self._entries += 1
        self._enter(rank, self._entries - node.depth * DEPTH, node)
        if len(self.heap) + len(self.line) - self.head > self._compact_at:
            self._compact()

    def _stays_first(self, node: Node, rank: Any) -> bool:
        """Whether a node that has just been offered is still before all others, strictly, so that its entry has its old place."""
        line, head = self.line, self.head
        if not head or head == len(line):
            return False
        place: float = self._offered_entry[1]
        if not 0 < place + node.depth * DEPTH < DEPTH:
            return False  # it was cut since the entry was made, and its place is that of another depth
        first: tuple[Any, ...] = line[head]
        noted, next_rank = self._offered_entry[0], first[0]
        if isinstance(rank, float) and isinstance(noted, float) and isinstance(next_rank, float):
            lowest: float = rank
            return lowest == noted and lowest < next_rank and lowest < self._heap_rank
        return False

    def _enter(self, rank: Any, place: float, node: Node) -> None:
        entry: tuple[Any, ...] = (rank, place, node)
        line, head = self.line, self.head
        try:
            if isinstance(rank, float) and rank == rank:
                if rank > self._last_rank:
                    self._last_rank = rank
                    line.append(entry)
                    return
            else:
                check_rank(self, node, rank)
            if head == len(line):
                self._last_rank = rank if isinstance(rank, float) else inf
                line.append(entry)
                return
            other: tuple[Any, ...] = line[-1]
            if rank > other[0] or rank == other[0] and place > other[1]:
                self._last_rank = rank if isinstance(rank, float) else inf
                line.append(entry)
                return
            other = line[head]
            if rank < other[0] or rank == other[0] and place < other[1]:
                if not head:
                    head = len(line)
                    line[:0] = [None] * head
                self.head = head - 1
                line[head - 1] = entry
                return
            if isinstance(rank, float) and self._enter_near_end(rank, entry):
                return
            heappush(self.heap, entry)
            self._note_heap()
        except (TypeError, ValueError) as error:
            refuse_order(self, [rank, *self._ranks()], error)

    def _enter_near_end(self, rank: float, entry: tuple[Any, ...]) -> bool:
        """Put an entry where it belongs among the last ones of the line; return False if it belongs before them.

        Also if one of those that it is compared with has a rank that is no float.
        """
        line, place = self.line, entry[1]
        low, high = max(self.head, len(line) - NEAR_END), len(line)
        first = low
        while low < high:
            middle = (low + high) // 2
            other: tuple[Any, ...] = line[middle]
            noted = other[0]
            if not isinstance(noted, float):
                return False
            if rank > noted or rank == noted and place > other[1]:
                low = middle + 1
            else:
                high = middle
        if low == first:
            return False
        line.insert(low, entry)
        return True

    def _compact(self) -> None:
        """Keep only the latest entry of each evictable node."""
        entries = sorted([*self.line[self.head :], *self.heap], key=BY_PLACE, reverse=True)
        places = {node: place for _, place, node in entries if node.is_evictable(self.tier)}
        ranked: list[Any] = [(self.rank(node), place, node) for node, place in places.items()]
        try:
            for rank, _, node in ranked:
                check_rank(self, node, rank)
            ranked.sort(key=BY_PLACE)
            ranked.sort(key=BY_RANK)
        except (TypeError, ValueError) as error:
            refuse_order(self, [rank for rank, _, _ in ranked], error)
        self.line = ranked
        self._last_rank = inf
        self.head = 0
        self.heap.clear()
        self._note_heap()
        self._compact_at = max(1024, 2 * len(self.line))

    def victims(self, now: float) -> Iterator[Node]:
        if self._untaken or self._offered is not None:
            self._offer_again()
        return super().victims(now)

    def next_victim(self) -> Node | None:
        """Return the next node of a pass, which has left the queue; None if there is none."""
        if self._offered is not None:
            self._look_back()
        tier, untaken = self.tier, self._untaken
        risen = 0
        while (found := self._next_entry()) is not None:
            entry: tuple[Any, ...] = found
            node: Node = entry[2]
            if node.state[tier] != READY or node.pins[tier] or node.children_in[tier] or untaken and node in untaken:
                continue
            rank, noted = self.rank(node), entry[0]
            if not (isinstance(rank, float) and isinstance(noted, float) and rank == noted) and rank != noted:
                check_risen(self, node, noted, rank)
                risen += 1
                if risen > len(self.line) - self.head + len(self.heap) + 1:
                    raise never_still(self, node, rank)
                self._enter(rank, entry[1], node)
                continue
            if self._ranks_by_place:
                self._limit_to_next(node)
            self._offered, self._offered_entry = node, entry
            return node
        return None

    def _look_back(self) -> None:
        """Remember the last node offered if it is still evictable and has not been announced again."""
        if self._offered is not None and self._offered.is_evictable(self.tier):
            self._untaken[self._offered] = None

    def _offer_again(self) -> None:
        """Enter the nodes again that the last pass offered and that are still evictable."""
        self._look_back()
        self._offered = None
        if self._untaken:
            nodes = list(self._untaken)
            self._untaken.clear()
            for node in nodes:
                if node.is_evictable(self.tier):
                    self.on_evictable(node)

    def _next_entry(self) -> Any:
        """Remove the first entry from the queue and return it; None if the queue is empty."""
        line, head, heap = self.line, self.head, self.heap
        if head == len(line):
            return self._pop_heap() if heap else None
        first: tuple[Any, ...] = line[head]
        rank = first[0]
        if not (isinstance(rank, float) and rank < self._heap_rank) and heap:
            other: tuple[Any, ...] = heap[0]
            try:
                if other[0] < rank or other[0] == rank and other[1] < first[1]:
                    return self._pop_heap()
            except (TypeError, ValueError) as error:
                refuse_order(self, self._ranks(), error)
        line[head] = None
        self.head = head + 1
        if head > LEFT and 5 * head > 4 * len(line):
            del line[: head + 1]
            self.head = 0
        return first

    def _pop_heap(self) -> Any:
        entry = heappop(self.heap)
        self._note_heap()
        return entry

    def _note_heap(self) -> None:
        rank = self.heap[0][0] if self.heap else inf
        self._heap_rank = rank if isinstance(rank, float) else -inf

    def _ranks(self) -> list[Any]:
        return [entry[0] for entry in [*self.line[self.head :], *self.heap]]

    def _limit_to_next(self, node: Node) -> None:
        """Limit ``most_pages`` to the pages of a victim that leave before the next leaf; the victim is out of the queue."""
        following = [*self.heap[:1], *self.line[self.head : self.head + 1]]
        self.most_pages = UNLIMITED
        if following:
            try:
                next_rank = min(following)[0]
            except (TypeError, ValueError) as error:
                refuse_order(self, self._ranks(), error)
            policy: Any = self
            answer: object = policy.pages_before(node, next_rank)
            self.most_pages = whole_number(self._name, "pages_before()", answer, UNLIMITED, 1)
