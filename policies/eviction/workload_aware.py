"""Workload-aware eviction (Wang et al.: KVCache cache in the wild, USENIX ATC 2025)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import exp, inf

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tree import READY, Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy

REUSE = ("session", "pages")
HORIZONS_PER_WINDOW = 16
"""How often per window all bounds are renewed; more often makes them tighter."""


Entry = tuple[float, int, int, Node]
"""A leaf: (last use, minus its end in pages, number of the entry, node)."""


class RequestClass:
    """Requests of one type and turn: how often and how soon they are continued, and the leaves that they used last."""

    def __init__(self, tier: int, window_s: float) -> None:
        self.tier = tier
        self.window_s = window_s
        self.requests = self.continued = 0
        self.reuse_s = 0.0
        """Sum, over continued requests, of the time until the continuation."""
        self._rate = self._p = self._later = 0.0
        """a, p and e^-aW of the latest counts."""
        self.heap: list[Entry] = []
        """Leaves, as entries that are checked when they reach the top."""
        self._compact_at = 64
        self.head_used_s = inf
        """Last use of the head when the class was last examined; infinite without a leaf."""
        self.version = 0
        """Version of the class's place among others; places with an earlier version are stale."""

    def add(self, node: Node, number: int) -> None:
        """Enter a leaf; from time to time drop stale entries."""
        heap, tier = self.heap, self.tier
        heappush(heap, (node.last_used_in(self.tier), -(node.depth + node.pages), number, node))
        if len(heap) > self._compact_at:
            entries = {entry[3]: entry for entry in sorted(heap) if entry[3].is_evictable(tier) and entry[3].notes[tier] is self}
            heap[:] = entries.values()
            heapify(heap)
            self._compact_at = max(64, 2 * len(heap))

    def head(self) -> Entry | None:
        """Return the entry of the least recently used leaf, among equals that of the one that ends last; None without leaves."""
        heap, tier = self.heap, self.tier
        while heap:
            entry = heap[0]
            last_used, end, number, node = entry
            if node.state[tier] != READY or node.pins[tier] or node.children_in[tier] or node.notes[tier] is not self:
                heappop(heap)
            elif node.last_used_in(self.tier) != last_used or node.depth + node.pages + end:
                heapreplace(heap, (node.last_used_in(self.tier), -node.depth - node.pages, number, node))
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

    def reuse_probability(self, age_s: float) -> float:
        """Return the probability that a leaf unused for ``age_s`` is used within the next ``window_s``; it falls with age.

        1 for a class without requests, which holds the nodes whose first request has not finished.
        """
        if not self.requests:
            return 1.0
        p, still = self._p, exp(-self._rate * age_s)
        return p * (still - still * self._later) / (1 - p + p * still)


Place = tuple[float, int, int, int, RequestClass]
"""A class among others: (P or a lower bound of it, minus the end of its head, number of the entry, version, class)."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class WorkloadAware(EvictionPolicy):
    """Keeps pages that their kind of request tends to reuse soon: a search is rarely continued, the fifth turn of a chat often.

    class     type and turn of the last finished request that used a node
    P         p (e^-at - e^-a(t+W)) / (1 - p + p e^-at): chance of a use within W = ``window_s`` after an age t without one
    victim    the lowest P among the least recently used leaf of each class; if equal, the leaf that ends later in its prompt

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
        self._bounds: list[Place] = []
        self._looked_at: list[Place] = []
        """Bounds that the last pass has removed."""
        self._offered: dict[RequestClass, None] = {}
        """Classes whose leaves the last pass has offered."""
        self._changed: dict[RequestClass, None] = {}
        """Classes that need a new bound."""
        self._horizon_s = -inf
        self._entries = 0

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
        self.note_path(node, own)

    def on_evictable(self, node: Node) -> None:
        own = node.notes[self.tier]
        if own is None:
            own = self._unfinished
            node.note(self.tier, own)
        self._entries += 1
        own.add(node, self._entries)
        if node.last_used_in(self.tier) <= own.head_used_s:
            self._changed[own] = None

    def victims(self, now: float) -> Iterator[Node]:
        self._end_last_pass()
        if now >= self._horizon_s:
            self._horizon_s = now + self.window_s / HORIZONS_PER_WINDOW
            self._changed.update(dict.fromkeys([own for _, _, _, version, own in self._bounds if version == own.version]))
            self._bounds.clear()
        known: list[Place] = []
        while (own := self._next_class(known, now)) is not None:
            node: Node = heappop(own.heap)[3]
            self._offered[own] = None
            yield node
            self._enter(known, own, now)

    def _end_last_pass(self) -> None:
        """Mark classes that have lost leaves for a new bound, and restore the bounds of the others, which still hold."""
        self._changed.update(self._offered)
        self._offered.clear()
        for place in self._looked_at:
            if place[4].head_used_s < inf:
                heappush(self._bounds, place)
        self._looked_at.clear()

    def _next_class(self, known: list[Place], now: float) -> RequestClass | None:
        """Return the class whose head has the lowest P. ``known`` holds classes by P; those with a lower bound are examined."""
        bounds = self._bounds
        for own in self._changed:
            own.version += 1
            self._enter(bounds, own, self._horizon_s)
        self._changed.clear()
        while True:
            while known and known[0][3] != known[0][4].version:
                heappop(known)
            if not bounds or known and known[0][0] < bounds[0][0]:
                if not known:
                    return None
                place = heappop(known)
                own, head = place[4], place[4].head()
                if head is not None and head[0] == own.head_used_s and head[1] == place[1]:
                    return own
                self._enter(known, own, now)  # its head has left with another victim, as states leave with their pages
                continue
            place = heappop(bounds)
            if place[3] == place[4].version:
                self._looked_at.append(place)
                self._enter(known, place[4], now)

    def _enter(self, places: list[Place], own: RequestClass, now: float) -> None:
        """Give the class a place by the P that its head has at ``now``; a class without leaves gets none."""
        head = own.head()
        if head is None:
            own.head_used_s = inf
            return
        own.head_used_s = used_s = head[0]
        self._entries += 1
        heappush(places, (own.reuse_probability(now - used_s), head[1], self._entries, own.version, own))

    def _class_of(self, request: Request) -> RequestClass:
        key = request.kind, request.turn
        if key not in self._classes:
            self._classes[key] = RequestClass(self.tier, self.window_s)
        return self._classes[key]


@mypyc_attr(allow_interpreted_subclasses=True)
class PageReuse(WorkloadAware):
    """``reuse=pages``: counts pages, each as reused when any request uses it again, as in the paper's figure 15.

    So system prompts, which other sessions use, speak for their classes, too. Sessions are not needed. A page that has left
    the tier counts as not reused, whatever comes later.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._used: dict[Node, float] = {}
        """Last use of each node by the requests that its class counts; a node is absent once it has been used again."""

    def _require_sessions(self, context: PolicyContext) -> None:
        pass

    def on_request(self, request: Request, now: float) -> None:
        pass

    def on_hit(self, node: Node, now: float) -> None:
        then, own = self._used.pop(node, None), node.notes[self.tier]
        if then is not None and own is not None:
            own.count(continued=node.pages, reuse_s=node.pages * (now - then))
            self._changed[own] = None

    def on_split(self, upper: Node, lower: Node) -> None:
        if lower in self._used:
            self._used[upper] = self._used[lower]

    def on_merge(self, upper: Node, lower: Node) -> None:
        if self._used.pop(upper, None) is None:
            self._used.pop(lower, None)

    def on_remove(self, node: Node) -> None:
        self._used.pop(node, None)

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        own, tier, pages = self._class_of(request), self.tier, 0
        at = node
        while at.parent is not None:
            if at.state[tier] == READY:
                pages += at.pages
                self._used[at] = at.last_used_in(tier)
            at = at.parent
        own.count(requests=pages)
        self._changed[own] = None
        self.note_path(node, own)
