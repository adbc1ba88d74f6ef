"""Workload-aware eviction (Wang et al.: KVCache cache in the wild, USENIX ATC 2025)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, inf
from typing import Any, Final

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.leaf_queue import Leaf, LeafQueue

REUSE = ("session", "pages")
HORIZONS_PER_WINDOW = 16
"""How often per window all bounds are renewed; more often makes them tighter."""
COUNTED: Final = -inf
NS_PER_S: Final = 1_000_000_000


class RequestClass:
    """Requests of one type and turn: how often and how soon they are continued, and the leaves that they used last.

    The note of a node is its class and, if the class counts its next use, when it was used last; otherwise ``COUNTED``.
    """

    def __init__(self, tier: int, window_s: float) -> None:
        self.tier = tier
        self.window_s = window_s
        self.requests = self.continued = 0
        self.reuse_s = 0.0
        """Sum, over continued requests, of the time until the continuation."""
        self._reuse_ns = 0
        self.note: tuple[RequestClass, float] = self, COUNTED
        """The note of nodes whose next use the class does not count."""
        self._rate = self._p = self._later = 0.0
        """a, p and e^-aW of the latest counts."""
        self.leaves = LeafQueue()
        """Leaves, as entries of place 0 that are checked when they come first; their number is the leaf's last page."""
        self._compact_at = 64
        self.head_used_s = inf
        """Last use of the head when the class was last examined; infinite without a leaf."""
        self.version = 0
        """Version of the class's place among others; places with an earlier version are stale."""

    def add(self, node: Node) -> None:
        """Enter a leaf; from time to time drop stale entries."""
        leaves = self.leaves
        leaves.push(entry_of(node, self.tier))
        if len(leaves) > self._compact_at:
            leaves.keep_latest([entry for entry in leaves.all() if self._has(entry.node)])
            self._compact_at = max(64, 2 * len(leaves))

    def _has(self, node: Node) -> bool:
        """Whether the node is a leaf and of this class."""
        tier = self.tier
        if node.state[tier] != READY or node.pins[tier] or node.children_in[tier]:
            return False
        note: tuple[Any, ...] = node.notes[tier]
        return note[0] is self

    def head(self) -> Leaf | None:
        """Return the entry of the least recently used leaf, among equals that of the one that ends last; None without leaves."""
        leaves = self.leaves
        while (entry := leaves.first()) is not None:
            node = entry.node
            if not self._has(node):
                leaves.remove(entry)
            elif node.last_used_in(self.tier) != entry.used_s or node.depth + node.pages != entry.end:
                leaves.remove(entry)
                leaves.push(entry_of(node, self.tier))
            else:
                return entry
        return None

    def count(self, *, requests: int = 0, continued: int = 0, reuse_s: float = 0.0) -> None:
        """Add to the class's requests, continued requests and time until continuation."""
        self.requests += requests
        self.continued += continued
        self.reuse_s += reuse_s
        self._rate = (self.continued + 1) / (self.reuse_s + self.window_s)
        self._p = (self.continued + 1) / (self.requests + 2)
        self._later = exp(-self._rate * self.window_s)

    def count_pages(self, pages: int, reuse_s: float) -> None:
        """Count pages that are used again after ``reuse_s``: with the same result at once as one by one, in any order."""
        self._reuse_ns += pages * round(reuse_s * NS_PER_S)
        self.reuse_s = self._reuse_ns / NS_PER_S
        self.count(continued=pages)

    def reuse_probability(self, age_s: float) -> float:
        """Return the probability that a leaf unused for ``age_s`` is used within the next ``window_s``; it falls with age.

        1 for a class without requests, which holds the nodes whose first request has not finished.
        """
        if not self.requests:
            return 1.0
        p, still = self._p, exp(-self._rate * age_s)
        return p * (still - still * self._later) / (1 - p + p * still)


class Place(Leaf):
    """A class among others, by its head. In place of the last use, ``used_s`` is P, or a lower bound of it."""

    __slots__ = ("own", "version")

    def __init__(self, probability: float, head: Leaf, own: RequestClass) -> None:
        super().__init__(0, probability, head.end, head.number, head.node)
        self.own = own
        self.version = own.version

    def is_current(self) -> bool:
        """Whether the class has no other place since."""
        return self.version == self.own.version


def entry_of(node: Node, tier: int) -> Leaf:
    """Return the entry of a leaf."""
    start, pages = node.runs[-1]
    return Leaf(0, node.last_used_in(tier), node.depth + node.pages, start + pages - 1, node)


def all_of(places: LeafQueue) -> list[Place]:
    """Return all places, in no order."""
    return [place for place in places.all() if isinstance(place, Place)]


def first_of(places: LeafQueue) -> Place | None:
    """Return the first place, after dropping those before it whose classes have others since; None if there is none."""
    while (first := places.first()) is not None:
        assert isinstance(first, Place)
        if first.is_current():
            return first
        places.remove(first)
    return None


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WorkloadAware(EvictionPolicy):
    """Keeps pages that their kind of request tends to reuse soon: a search is rarely continued, the fifth turn of a chat often.

    class     type and turn of the last finished request that used a node
    P         p (e^-at - e^-a(t+W)) / (1 - p + p e^-at): chance of a use within W = ``window_s`` after an age t without one
    victim    the lowest P among the least recently used leaf of each class; if equal, the page that is later in its prompt

    A request is continued by the next one of its session, with probability p = (continued + 1) / (requests + 2) and after an
    exponentially distributed time of rate a = (continued + 1) / (sum of times + W), counted per class since the run began.
    Needs requests with a ``session``, a ``turn`` and a ``kind``. ``reuse=pages`` counts otherwise: see ``PageReuse``.

    P falls with age, so the P that a class's head will have at the end of a horizon is a lower bound until then. Only classes
    whose bound is not above the lowest P known are examined; the victim is the same as if all were.
    """

    window_s: float = 60.0
    reuse: str = "session"

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0), "window_s")
        if self.reuse not in REUSE:
            raise ValueError(f"reuse must be {' or '.join(REUSE)}, not {self.reuse}")
        self._classes: dict[tuple[str, int], RequestClass] = {}
        self._latest: dict[int, tuple[int, RequestClass | None, float]] = {}
        """By session: index and class of its latest request, and when that was admitted."""
        self._bounds = LeafQueue()
        self._looked_at: list[Place] = []
        """Bounds that the last pass has removed."""
        self._offered: dict[RequestClass, None] = {}
        """Classes whose leaves the last pass has offered."""
        self._changed: dict[RequestClass, None] = {}
        """Classes that need a new bound."""
        self._horizon_s = -inf

    def variant(self) -> EvictionPolicy:
        return self if self.reuse == "session" else PageReuse(window_s=self.window_s)

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self._require_sessions(context)
        context.require("turn", "the turn of each request in its session")
        context.require("kind", "the type of each request")
        self._unfinished = RequestClass(self.tier, self.window_s)

    def _require_sessions(self, context: PolicyContext) -> None:
        context.require("session", "the session of each request")

    def on_request(self, request: Request, now: float) -> None:
        index, previous, then = self._latest.get(request.session, (-1, None, now))
        if request.session < 0 or request.index <= index:
            return
        own = self._class_of(request)
        self._latest[request.session] = request.index, own, now
        own.count(requests=1)
        self._changed[own] = None
        if previous is not None:
            previous.count(continued=1, reuse_s=now - then)
            self._changed[previous] = None

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        own = self._class_of(request)
        if request.session < 0:
            own.count(requests=1)
            self._changed[own] = None
        self.note_path(node, own.note)

    def on_evictable(self, node: Node) -> None:
        note: tuple[RequestClass, float] | None = node.notes[self.tier]
        if note is None:
            note = self._unfinished.note
            node.note(self.tier, note)
        own = note[0]
        own.add(node)
        if node.last_used_in(self.tier) <= own.head_used_s:
            self._changed[own] = None

    def victims(self, now: float) -> Iterator[Node]:
        self._end_last_pass()
        if now >= self._horizon_s:
            self._horizon_s = now + self.window_s / HORIZONS_PER_WINDOW
            self._changed.update(dict.fromkeys([place.own for place in all_of(self._bounds) if place.is_current()]))
            self._bounds = LeafQueue()
        known = LeafQueue()
        while (place := self._next_place(known, now)) is not None:
            own = place.own
            head = own.leaves.first()
            assert head is not None
            own.leaves.remove(head)
            self._offered[own] = None
            self._enter(known, own, now)
            other = first_of(known)
            is_tied = other is not None and other.used_s == place.used_s
            self.most_pages = max(1, place.end - other.end) if is_tied and other is not None else UNLIMITED
            yield head.node

    def _end_last_pass(self) -> None:
        """Mark classes that have lost leaves for a new bound, and restore the bounds of the others, which still hold."""
        self._changed.update(self._offered)
        self._offered.clear()
        for place in self._looked_at:
            if place.own.head_used_s < inf:
                self._bounds.push(place)
        self._looked_at.clear()

    def _next_place(self, known: LeafQueue, now: float) -> Place | None:
        """Take the class whose head has the lowest P from ``known``, which has classes by P; those with a lower bound are
        examined."""
        bounds = self._bounds
        for own in self._changed:
            own.version += 1
            self._enter(bounds, own, self._horizon_s)
        self._changed.clear()
        while True:
            best, bound = first_of(known), first_of(bounds)
            if bound is not None and (best is None or best.used_s >= bound.used_s):
                bounds.remove(bound)
                self._looked_at.append(bound)
                self._enter(known, bound.own, now)
                continue
            if best is None:
                return None
            known.remove(best)
            own, head = best.own, best.own.head()
            if head is not None and head.used_s == own.head_used_s and head.end == best.end and head.number == best.number:
                return best
            self._enter(known, own, now)  # its head has left with another victim, as states leave with their pages

    def _enter(self, places: LeafQueue, own: RequestClass, now: float) -> None:
        """Give the class a place by the P that its head has at ``now``; a class without leaves gets none."""
        head = own.head()
        if head is None:
            own.head_used_s = inf
            return
        own.head_used_s = head.used_s
        places.push(Place(own.reuse_probability(now - head.used_s), head, own))

    def _class_of(self, request: Request) -> RequestClass:
        key = request.kind, request.turn
        if key not in self._classes:
            self._classes[key] = RequestClass(self.tier, self.window_s)
        return self._classes[key]


@mypyc_attr(allow_interpreted_subclasses=True)
class PageReuse(WorkloadAware):
    """``reuse=pages``: counts pages, each as reused when any request uses it again, as in the paper's figure 15.

    So system prompts, which other sessions use, speak for their classes, too. Sessions are not needed. A page that has left
    the tier counts as not reused, whatever comes later. A request counts as a user of its pages from its end on: another one
    that uses them before counts for their earlier class, if it is the first to do so, or for none.

    The authors count uses in a profile of a trace without running requests (their change to vLLM, pull request 22236, simulates a
    cache request by request), as a replay does; there, no two requests overlap. In a simulation, P is asked of pages that no
    request uses, with an age since their last use. What is used again while its first user runs would have been there whatever
    is evicted, so it does not tell what keeping a page is worth, and it came at no age at all.
    """

    def _require_sessions(self, context: PolicyContext) -> None:
        pass

    def on_request(self, request: Request, now: float) -> None:
        pass

    def on_hit(self, node: Node, now: float) -> None:
        note: tuple[RequestClass, float] | None = node.notes[self.tier]
        if note is not None and note[1] != COUNTED:
            own, then = note
            own.count_pages(node.pages, now - then)
            node.note(self.tier, own.note)
            self._changed[own] = None

    def on_remove(self, node: Node) -> None:
        note: tuple[RequestClass, float] | None = node.notes[self.tier]
        if note is not None:
            node.note(self.tier, note[0].note)

    def on_shorten(self, node: Node, pages: int) -> None:
        """Nothing is remembered of the pages that leave."""

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        own, tier, pages = self._class_of(request), self.tier, 0
        self.note_path(node, own.note)
        at, note = node, own.note
        while at.parent is not None:
            if at.state[tier] == READY:
                pages += at.pages
                used_s = at.last_used_in(tier)
                if used_s != note[1]:
                    note = own, used_s
                at.note(tier, note)
            at = at.parent
        own.count(requests=pages)
        self._changed[own] = None
