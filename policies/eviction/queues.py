"""Queues of pages, at a cost per node instead of per page: the base class of policies that keep several lists."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from math import ceil, floor, inf
from typing import Any

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Real, check_settings
from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, last_pages
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import SteppingEviction
from kvsim.policies.eviction.leaf_queue import Leaf, LeafQueue


class Mark:
    """What the policy knows of a page: its queue, its place there, and a value of the policy's own. Marks never change.

    The lowest place leaves first.
    """

    __slots__ = ("place", "queue", "value")

    def __init__(self, queue: int, place: int, value: Any = None) -> None:
        self.queue = queue
        self.place = place
        self.value = value

    def same(self, other: "Mark") -> bool:
        return self is other or self.place == other.place and self.queue == other.queue and bool(self.value == other.value)


Part = tuple[int, Mark]
"""(pages, mark): consecutive pages with one mark."""


def forget_beyond(ghosts: ExtentOrder, pages: float) -> None:
    """Keep only the ``pages`` most recent pages of a ghost list."""
    held = float(ghosts.pages)
    if held > pages:
        ghosts.pop_oldest(ceil(held - pages))


def check_fractions(settings: object, *names: str) -> None:
    """Raise ValueError unless each of these settings is a share of the tier's pages, above 0 and below 1."""
    check_settings(settings, Real(above=0, below=1), *names, hint="it is a share of the tier's pages")


def check_multiples(settings: object, *names: str) -> None:
    """Raise ValueError unless each of these settings is a multiple of the tier's pages, above 0."""
    check_settings(settings, Real(above=0), *names, hint="it is a multiple of the tier's pages")


@mypyc_attr(allow_interpreted_subclasses=True)
class QueueEviction(SteppingEviction):
    """Keeps each page of a tier in one of several queues. The result does not depend on how paths are cut into nodes.

    mark     usually shared by all pages of a node. If a ghost list knew only some of them, the node has several parts, and is
             cut when the last part is about to leave
    leaves   only leaves compete: each queue has them in order, by place. Among equals the least recently used leaves
    moves    a leaf moves to another queue or place together with all pages above it that have the same mark
    room     is made for all pages of a request before they enter, so a page that has left counts as one that has entered
    ghosts   only pages that the policy chose to evict are remembered, not pages that move up or are lost with their prefix

    A subclass defines where a page enters (``enter``), how a hit changes its mark (``use``), which queue gives the next victim
    (``choose``), and what the ghost list keeps of the victim (``remember``).
    """

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        queues = self.count_queues()
        self.sizes = [0] * queues
        """Pages in each queue."""
        self.clock = 0
        """Place of pages that enter a queue now."""
        self.left_pages = 0
        """Pages evicted since the latest request arrived, minus pages that have entered; at least 0."""
        self.has_evicted = False
        """Whether a page has been evicted since the latest request arrived."""
        self.ghosts = ExtentOrder()
        """Evicted pages that are remembered. It may hold older pages, which are removed before each look-up."""
        self.ghost_pages = 0.0
        """Maximum number of pages remembered."""
        self._running: set[Request] = set()
        """Requests announced and not finished; each counts once."""
        self._request: Request | None = None
        """The latest request, until its ghosts have been looked up."""
        self._hit_pages = 0
        self._new: tuple[Extent, ...] = ()
        """Pages that the latest request needs, if none of them has a ghost."""
        self._marks: dict[Node, Mark] = {}
        """The mark of each node's last part: of all its pages, unless the node is in ``mixed``."""
        self.mixed: dict[Node, list[Part]] = {}
        """For nodes of several parts, the parts before the last one, head to tail."""
        self.leaves = [LeafQueue() for _ in range(queues)]
        """The leaves of each queue. Entries that are out of date are dropped when they come first."""
        self._entries = 0
        self._compact_at = 1024
        self._offered: Node | None = None
        self.capacity_pages: float = inf if context.capacity_pages is None else context.capacity_pages

    def count_queues(self) -> int:
        """Return the number of queues."""
        return 2

    def share(self, fraction: float) -> float:
        """Return a fraction of the tier's capacity, rounded down to whole pages."""
        pages = fraction * self.capacity_pages
        return floor(pages + 1e-9) if pages < inf else inf

    # --- what a subclass defines -------------------------------------------------------------------------------------

    @abstractmethod
    def enter(self, ghost: Any) -> Mark:
        """Return the mark of a page that enters the tier. ``ghost`` is its value in the ghost list, or None."""

    @abstractmethod
    def use(self, mark: Mark) -> Mark:
        """Return the mark that a page with this mark has after a hit."""

    @abstractmethod
    def choose(self) -> tuple[int, float] | None:
        """Return the queue whose first leaf leaves now and the most pages it may lose; None if there is no leaf."""

    def remember(self, extents: tuple[Extent, ...], mark: Mark) -> None:
        """Called when these pages, which had this mark, have been evicted."""

    def expect(self, extents: tuple[Extent, ...]) -> bool:
        """Called with pages that a request needs and the tier lacks. Keeps their ghosts; returns whether there are any."""
        ghosts = self.ghosts
        is_known = ghosts.may_hold(extents)
        if is_known or float(ghosts.pages) > 2 * self.ghost_pages:
            forget_beyond(ghosts, self.ghost_pages)
        return is_known and ghosts.touch(extents) > 0

    def recall(self, extents: tuple[Extent, ...]) -> list[tuple[int, Any]]:
        """Remove pages that enter the tier from the ghost list. Returns (pages, value or None), head to tail."""
        forget_beyond(self.ghosts, self.ghost_pages)
        pieces = self.ghosts.pieces(extents)
        if len(pieces) > 1 or pieces[0][1] is not None:
            self.ghosts.remove(extents)
        return [(pages, ghost) for (_, pages), ghost in pieces]

    # --- notifications from the core ---------------------------------------------------------------------------------

    def on_request(self, request: Request, now: float) -> None:
        if request in self._running:
            return
        self._running.add(request)
        if self._request is not None:
            self._expect()
        self.advance(request.prompt_pages)
        self._request = request
        self._hit_pages = self.left_pages = 0
        self.has_evicted = False

    def advance(self, pages: int) -> None:
        """Advance the clock for a request of ``pages`` pages."""
        self.clock += 1

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        self._running.discard(request)

    def _expect(self) -> None:
        """Look up the ghosts of the pages that the latest request did not find in the tier."""
        request, self._request = self._request, None
        self._new = ()
        if request is not None and (missing := request.prompt_pages - self._hit_pages):
            rest = last_pages(request.runs, missing)
            if not self.expect(rest):
                self._new = rest

    def on_insert(self, node: Node, now: float) -> None:
        if self._request is not None:
            self._expect()
        left = self.left_pages - node.pages
        self.left_pages = left if left > 0 else 0
        if node.runs == self._new or node.is_state:  # states have no ghosts: one that returns counts as new
            mark = self._marks[node] = self.enter(None)
            self.sizes[mark.queue] += node.pages
            return
        parts = [(pages, self.enter(ghost)) for pages, ghost in self.recall(node.runs)]
        for pages, mark in parts:
            self.sizes[mark.queue] += pages
        self._keep_parts(node, parts)

    def on_hit(self, node: Node, now: float) -> None:
        if node.runs[0][0] >= 0:  # not a state
            if self._request is not None and not is_on_path(node, self._request.runs):
                self._expect()  # the hit belongs to another request, which has just finished
            self._hit_pages = node.depth + node.pages
        if self.mixed and node in self.mixed:
            self._set_parts(node, [(pages, self.use(mark)) for pages, mark in self.parts(node)])
        else:
            old = self._marks[node]
            self._marks[node] = mark = self.use(old)
            if mark.queue != old.queue:
                self.sizes[old.queue] -= node.pages
                self.sizes[mark.queue] += node.pages
        if not node.pins[self.tier] and not node.children_in[self.tier]:
            self.on_evictable(node)

    def on_split(self, upper: Node, lower: Node) -> None:
        if lower not in self.mixed:
            self._marks[upper] = self._marks[lower]
            return
        before = self.mixed[lower]
        last = upper.pages + lower.pages - sum([pages for pages, _ in before])
        parts, above, left = [*before, (last, self._marks[lower])], [], upper.pages
        while left:
            pages, mark = parts.pop(0)
            above.append((min(pages, left), mark))
            if pages > left:
                parts.insert(0, (pages - left, mark))
            left -= min(pages, left)
        self._keep_parts(upper, above)
        self._keep_parts(lower, parts)

    def on_merge(self, upper: Node, lower: Node) -> None:
        self._keep_parts(lower, self.parts(upper) + self.parts(lower))
        self.mixed.pop(upper, None)
        del self._marks[upper]

    def on_remove(self, node: Node) -> None:
        if self.mixed and node in self.mixed:
            for pages, part in self.parts(node):
                self.sizes[part.queue] -= pages
            del self.mixed[node], self._marks[node]
            return
        if node is self._offered:
            self._offered = None
            self.on_victim(node)
        else:
            self.sizes[self._marks.pop(node).queue] -= node.pages

    def on_victim(self, node: Node) -> None:
        """Called when the chosen leaf leaves."""
        mark, pages, extents = self._marks.pop(node), node.pages, node.runs
        self.sizes[mark.queue] -= pages
        self.left_pages += pages
        self.has_evicted = True
        if extents[0][0] >= 0:  # not a state
            self.remember(extents, mark)

    def on_shorten(self, node: Node, pages: int) -> None:
        mark = self._marks[node]
        self.sizes[mark.queue] -= pages
        self.left_pages += pages
        self.has_evicted = True
        self.remember(last_pages(node.runs, pages), mark)
        if self.mixed and node in self.mixed and pages == self._last_pages(node):
            parts = self.mixed.pop(node)
            self._marks[node] = parts.pop()[1]
            if parts:
                self.mixed[node] = parts

    def on_evictable(self, node: Node) -> None:
        if node is self._offered:
            self._offered = None
        mark = self._marks[node]
        self.push(self.leaves[mark.queue], mark.place, node)

    # --- leaves ------------------------------------------------------------------------------------------------------

    def push(self, leaves: LeafQueue, place: int, node: Node) -> None:
        self._entries = entry = self._entries + 1
        leaves.push(Leaf(place, node.last_used_in(self.tier), node.depth + node.pages, entry, node))
        if len(leaves) > self._compact_at:
            self._compact()

    def _compact(self) -> None:
        """Keep only the latest entry of each leaf in each queue."""
        for queue, leaves in enumerate(self.leaves):
            leaves.keep_latest([leaf for leaf in leaves.all() if self.is_current(queue, leaf)])
        self._compact_at = max(1024, 2 * max([len(leaves) for leaves in self.leaves]))

    def is_leaf(self, node: Node) -> bool:
        """Whether the node can leave now."""
        tier = self.tier
        return node.state[tier] == READY and not node.pins[tier] and not node.children_in[tier]

    def is_current(self, queue: int, entry: Leaf) -> bool:
        """Whether an entry of the queue is current: its node is a leaf with this queue and place."""
        node = entry.node
        if not self.is_leaf(node):
            return False
        mark = self._marks[node]
        return mark.place == entry.place and mark.queue == queue

    def first(self, queue: int) -> Node | None:
        """Return the leaf that leaves the queue first, or None. Its entry then comes first."""
        leaves, tier, marks = self.leaves[queue], self.tier, self._marks
        while (entry := leaves.first()) is not None:
            node = entry.node
            if node.state[tier] == READY and not node.pins[tier] and not node.children_in[tier]:
                mark = marks[node]
                if mark.queue == queue and mark.place == entry.place:
                    return node
            leaves.remove(entry)
        return None

    def first_of(self, queue: int, most_pages: float = inf) -> tuple[int, float] | None:
        """Return the queue and ``most_pages`` if it has a leaf; else any other queue that has one, and no limit."""
        if self.first(queue) is not None:
            return queue, most_pages
        for other in range(len(self.leaves)):
            if self.first(other) is not None:
                return other, inf
        return None

    def victims(self, now: float) -> Iterator[Node]:
        self.begin_pass()
        return super().victims(now)

    def next_victim(self) -> Node | None:
        chosen = self.choose()
        if chosen is None:
            return None
        queue, most = chosen
        leaves = self.leaves[queue]
        entry = leaves.first()
        assert entry is not None
        leaves.remove(entry)
        node = entry.node
        self._limit(node, most)
        self._offered = node
        return node

    def begin_pass(self) -> None:
        """Called before victims are chosen."""
        if self._request is not None:
            self._expect()

    def _limit(self, node: Node, most_pages: float) -> None:
        """Limit what is offered of a node to ``most_pages`` pages of its last part."""
        self.most_pages = self._last_pages(node) if self.mixed and node in self.mixed else UNLIMITED
        if most_pages < inf and most_pages < float(self.most_pages):
            self.most_pages = ceil(most_pages)

    def pages(self) -> dict[Node, int]:
        """Return the number of pages of each node in the queues."""
        return {node: sum([pages for pages, _ in self.parts(node)]) for node in self._marks}

    # --- marks -------------------------------------------------------------------------------------------------------

    def mark(self, node: Node) -> Mark:
        """Return the mark of the node's last part."""
        return self._marks[node]

    def end(self) -> int:
        """Return a place after all places in use and before those of pages that enter later."""
        self.clock += 2
        return self.clock - 1

    def move(self, leaf: Node, mark: Mark) -> None:
        """Give a new mark to the last part of a leaf and to all pages above it that have the same mark.

        Under the rules of vLLM, a node above it may be a leaf, too.
        """
        node: Node | None = leaf
        marks, mixed = self._marks, self.mixed
        old, moved = marks[leaf], 0
        leaves: list[Node] = []
        while node is not None:
            held = marks.get(node)
            if held is None or not held.same(old):
                break
            if node is leaf or self.is_leaf(node):
                leaves.append(node)
            pages = self._last_pages(node)
            moved += pages
            if mixed and node in mixed:
                self._keep_parts(node, [*self.mixed[node], (pages, mark)])
                break
            marks[node] = mark
            node = node.parent
        self.sizes[old.queue] -= moved
        self.sizes[mark.queue] += moved
        for each in leaves:
            self.on_evictable(each)

    def demote(self, upper: int, lower: int, most_pages: float) -> None:
        """Move first leaves of ``upper`` to the end of ``lower`` while ``upper`` has more than ``most_pages`` pages."""
        while float(self.sizes[upper]) > most_pages and (leaf := self.first(upper)) is not None:
            self.move(leaf, Mark(lower, self.end(), self._marks[leaf].value))

    def _last_pages(self, node: Node) -> int:
        """Return the pages of the node's last part."""
        if not self.mixed or node not in self.mixed:
            return node.pages
        return node.pages - sum([pages for pages, _ in self.mixed[node]])

    def parts(self, node: Node) -> list[Part]:
        return [*self.mixed.get(node, ()), (self._last_pages(node), self._marks[node])]

    def _set_parts(self, node: Node, parts: list[Part]) -> None:
        """Replace the mark of every part of a node."""
        for (pages, old), (_, mark) in zip(self.parts(node), parts, strict=True):
            self.sizes[old.queue] -= pages
            self.sizes[mark.queue] += pages
        self._keep_parts(node, parts)

    def _keep_parts(self, node: Node, parts: Iterable[Part]) -> None:
        """Store a node's parts, joining neighbours with equal marks."""
        joined: list[Part] = []
        for pages, mark in parts:
            if joined and joined[-1][1].same(mark):
                joined[-1] = joined[-1][0] + pages, mark
            else:
                joined.append((pages, mark))
        self._marks[node] = joined.pop()[1]
        if joined:
            self.mixed[node] = joined
        else:
            self.mixed.pop(node, None)


def is_on_path(node: Node, extents: tuple[Extent, ...]) -> bool:
    """Whether a node's first page is a page of the path ``extents``, at the same depth."""
    depth = node.depth
    for start, pages in extents:
        if depth < pages:
            return node.runs[0][0] == start + depth
        depth -= pages
    return False
